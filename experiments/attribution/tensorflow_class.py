"""The second class of the document, as it is written there."""

from typing import Any

import tensorflow as tf


class TensorFlowMultiHeadAttention(tf.keras.layers.Layer):  # type: ignore[misc]
    """Four dense layers; the mask times -1e9 is added, after one axis more."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj = tf.keras.layers.Dense(embed_dim)
        self.k_proj = tf.keras.layers.Dense(embed_dim)
        self.v_proj = tf.keras.layers.Dense(embed_dim)
        self.out_proj = tf.keras.layers.Dense(embed_dim)

    def call(self, x: Any, mask: Any = None) -> Any:
        """`x` is (batch, seq, embed), `mask` (batch, seq), 1 = attend, says the document."""
        batch_size, seq_len, _ = x.shape
        q = self.q_proj(x)
        k = self.k_proj(x)
        v = self.v_proj(x)

        q = tf.reshape(q, (batch_size, seq_len, self.num_heads, self.head_dim))
        q = tf.transpose(q, perm=[0, 2, 1, 3])
        k = tf.reshape(k, (batch_size, seq_len, self.num_heads, self.head_dim))
        k = tf.transpose(k, perm=[0, 2, 1, 3])
        v = tf.reshape(v, (batch_size, seq_len, self.num_heads, self.head_dim))
        v = tf.transpose(v, perm=[0, 2, 1, 3])

        attn_weights = tf.matmul(q, tf.transpose(k, perm=[0, 1, 3, 2])) / tf.math.sqrt(
            tf.cast(self.head_dim, dtype=tf.float32)
        )

        if mask is not None:
            mask = tf.cast(mask, dtype=tf.float32)
            mask = mask * -1e9
            mask = tf.expand_dims(mask, axis=1)
            attn_weights = attn_weights + mask

        attn_weights = tf.nn.softmax(attn_weights, axis=-1)
        attn_output = tf.matmul(attn_weights, v)
        attn_output = tf.transpose(attn_output, perm=[0, 2, 1, 3])
        attn_output = tf.reshape(attn_output, (batch_size, seq_len, self.embed_dim))

        return self.out_proj(attn_output)
