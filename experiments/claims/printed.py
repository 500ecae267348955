"""The two layers of the first document: what they compute, errors included.

Each is four affine maps around softmax attention. The one fills logits where its mask is False with
-1e9; the other adds -1e9 times its mask. Both insert one axis into the mask.
"""

from typing import Any

import numpy as np
import torch

from jaxmha.converters.layout.arrays import NDArray

D, N, T, B = 512, 8, 10, 2
NAMES = ("q_proj", "k_proj", "v_proj", "out_proj")
Weights = dict[str, tuple[NDArray, NDArray]]  # kernel Dq Do and bias


def torch_weights(seed: int = 42) -> Weights:
    """Of nn.Linear, as it draws them."""
    torch.manual_seed(seed)
    layers = {name: torch.nn.Linear(D, D) for name in NAMES}
    return {
        name: (layer.weight.detach().numpy().T.copy(), layer.bias.detach().numpy().copy())
        for name, layer in layers.items()
    }


def tensorflow_weights(seed: int = 42) -> Weights:
    """Of Dense, as it draws them after TensorFlow's own seed is set."""
    import keras
    import tensorflow as tf

    tf.random.set_seed(seed)
    layers = {name: keras.layers.Dense(D) for name in NAMES}
    for layer in layers.values():
        layer.build((None, None, D))
    return {name: tuple(layer.get_weights()) for name, layer in layers.items()}


def torch_layer(
    weights: Weights, x: NDArray, mask: NDArray | None = None, **options: Any
) -> NDArray:
    """The layer of the first example."""
    dtype = options.get("dtype", torch.float32)
    fill = options.get("fill", -1e9)
    given = {n: [torch.tensor(a).to(dtype) for a in pair] for n, pair in weights.items()}
    rows = torch.tensor(x).to(dtype)

    def heads(name: str) -> torch.Tensor:
        kernel, bias = given[name]
        return (rows @ kernel + bias).view(*x.shape[:2], N, D // N).transpose(1, 2)

    q, k, v = (heads(name) for name in NAMES[:3])
    logits = q @ k.transpose(-2, -1) / (D // N) ** 0.5
    if mask is not None:
        logits = logits.masked_fill(~torch.tensor(mask).bool().unsqueeze(1), fill)
    out = (torch.softmax(logits, -1) @ v).transpose(1, 2).reshape(*x.shape[:2], D)
    kernel, bias = given["out_proj"]
    return (out @ kernel + bias).double().numpy()


def tensorflow_layer(
    weights: Weights, x: NDArray, mask: NDArray | None = None, **options: Any
) -> NDArray:
    """The layer of the second example."""
    import tensorflow as tf

    dtype = options.get("dtype", "float32")
    given = {n: [tf.cast(tf.constant(a), dtype) for a in pair] for n, pair in weights.items()}
    rows = tf.cast(tf.constant(x), dtype)

    def heads(name: str) -> Any:
        kernel, bias = given[name]
        split = tf.reshape(rows @ kernel + bias, (*x.shape[:2], N, D // N))
        return tf.transpose(split, (0, 2, 1, 3))

    q, k, v = (heads(name) for name in NAMES[:3])
    logits = tf.matmul(q, k, transpose_b=True) / tf.sqrt(tf.cast(D // N, dtype))
    if mask is not None:
        logits = logits + tf.expand_dims(tf.cast(mask, dtype) * -1e9, 1)
    out = tf.transpose(tf.matmul(tf.nn.softmax(logits, -1), v), (0, 2, 1, 3))
    kernel, bias = given["out_proj"]
    out = tf.reshape(out, (*x.shape[:2], D)) @ kernel + bias
    return np.asarray(tf.cast(out, "float64"))


def features(batch: int = B, seed: int = 42) -> NDArray:
    """The input of both layers, `B T D`."""
    torch.manual_seed(seed)
    return torch.randn(batch, T, D).numpy()


def apart(a: NDArray, b: NDArray) -> float:
    """Length of the difference relative to the length of the second."""
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b))
