"""Keras' attention by jaxmha; each function returns None for calls that Keras computes itself.

Sources: keras/src/backend/jax/nn.py (`dot_product_attention`), and `_compute_attention` of
keras/src/layers/attention/multi_head_attention.py and grouped_query_attention.py. The layers call
the former unless they return scores or have a dropout rate: then they materialise the scores, and
the weights of masked keys are 0.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

import jaxmha
from jaxmha.semantics import Semantics

if TYPE_CHECKING:
    import keras


def fused(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> jax.Array | None:
    """`keras.ops.dot_product_attention`.

    Returns None for calls with a bias (rows whose biases are all -inf are NaN in Keras), a soft
    cap, a mask that is not Boolean with four axes, or `flash_attention=True`, which asks for the
    kernel of Keras.
    """
    from keras.src import backend

    if bias is not None or attn_logits_soft_cap is not None or flash_attention is True:
        return None
    inputs = [backend.convert_to_tensor(x) for x in (query, key, value)]
    dtype = backend.result_type(*(x.dtype for x in inputs))
    q, k, v = (backend.cast(x, dtype) for x in inputs)
    kept = None if mask is None else backend.convert_to_tensor(mask)
    if not _supported(q, k, v, kept):
        return None
    semantics = Semantics.keras("fused", dtype=dtype)
    return jaxmha.dot_product_attention(
        q,
        k,
        v,
        mask=kept,
        scale=scale,
        is_causal=bool(is_causal),
        fully_masked=semantics.fully_masked,
        softmax_dtype=semantics.softmax_dtype,
    )


class Call(NamedTuple):
    """The arguments of `_compute_attention`, and settings of its layer."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    mask: jax.Array | None
    causal: bool
    training: bool | None
    scores: bool
    dropout: float
    flash: bool | None
    scale: float


def of_multi_head(
    layer: "keras.layers.MultiHeadAttention",
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array | None = None,
    training: bool | None = None,
    return_attention_scores: bool = False,
    use_causal_mask: bool = False,
) -> tuple[jax.Array, jax.Array | None] | None:
    """`MultiHeadAttention._compute_attention`."""
    import keras

    # A subclass may override any part of the computation.
    if type(layer) is not keras.layers.MultiHeadAttention:
        return None
    scale = layer._inverse_sqrt_key_dim
    settings = (return_attention_scores, layer.dropout, layer._flash_attention, scale)
    return _with_scores(
        Call(query, key, value, attention_mask, use_causal_mask, training, *settings)
    )


def of_grouped(
    layer: "keras.layers.GroupQueryAttention",
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention_mask: jax.Array | None = None,
    training: bool | None = None,
    use_causal_mask: bool = False,
) -> tuple[jax.Array, jax.Array | None] | None:
    """`GroupedQueryAttention._compute_attention`, whose keys and values Keras has repeated."""
    import keras

    if type(layer) is not keras.layers.GroupQueryAttention:
        return None
    scale = layer._inverse_sqrt_head_dim
    settings = (layer._return_attention_scores, layer.dropout, layer._flash_attention, scale)
    return _with_scores(
        Call(query, key, value, attention_mask, use_causal_mask, training, *settings)
    )


def _with_scores(call: Call) -> tuple[jax.Array, jax.Array | None] | None:
    """Computes as Keras does where it materialises the scores.

    Returns None for calls that Keras computes: without scores and dropout rate, for which it calls
    `fused`; with dropout in training, which Keras' seed generator draws; with several attended
    axes; with masks that are not Boolean; and with scores and flash attention, which Keras refuses.
    """
    dropped = call.dropout > 0
    if not (dropped or call.scores) or (dropped and call.training) or (call.flash and call.scores):
        return None
    mask = call.mask
    if mask is not None and jnp.ndim(mask) == 3:
        mask = mask[:, None]
    elif mask is not None and jnp.ndim(mask) == 2:
        mask = mask[None, None]
    if not _supported(call.query, call.key, call.value, mask):
        return None
    semantics = Semantics.keras("scores", dtype=call.query.dtype)
    found: Any = jaxmha.dot_product_attention(
        call.query,
        call.key,
        call.value,
        mask=mask,
        scale=call.scale,
        is_causal=bool(call.causal),
        fully_masked=semantics.fully_masked,
        softmax_dtype=semantics.softmax_dtype,
        return_weights=call.scores,
    )
    return found if isinstance(found, tuple) else (found, None)


def _supported(query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None) -> bool:
    """True for heads of one floating dtype with matching shapes, and a Boolean mask that fits."""
    heads = (query, key, value)
    if any(jnp.ndim(x) != 4 or x.dtype != query.dtype for x in heads):
        return False
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    fit = key.shape == (B, S, K, H) and value.shape[:3] == (B, S, K) and N % K == 0
    if not fit or not jnp.issubdtype(query.dtype, jnp.floating):
        return False
    return mask is None or (
        mask.dtype == bool
        and jnp.ndim(mask) == 4
        and all(size in (1, full) for size, full in zip(mask.shape, (B, N, T, S), strict=True))
    )
