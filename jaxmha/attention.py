"""Scaled dot-product attention."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int

from jaxmha import checks, implementations, sharding
from jaxmha.arrays import Array, DTypeLike
from jaxmha.axes import bind
from jaxmha.implementations.request import Request, Result, simplified
from jaxmha.mask import Mask
from jaxmha.semantics import FullyMasked, Precision, ReturnWeights, Semantics


def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K h"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, "*B"] | None = None,
    key_value_seq_lengths: Int[Array, "*B"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: Int[Array, "*B T"] | tuple[Int[Array, "*B T"], Int[Array, "*B S"]] | None = None,
    logits_soft_cap: float | None = None,
    fully_masked: FullyMasked = "zero",
    softmax_dtype: DTypeLike | None = None,
    precision: Precision = None,
    dropout_rate: float = 0.0,
    dropout_broadcast: tuple[str, ...] = (),
    dropout_key: Any = None,
    return_weights: ReturnWeights = False,
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Any:
    """Softmax-weighted values: `softmax(scale * query @ key + bias) @ value`, per head.

    The arguments of `jax.nn.dot_product_attention` with their names, order and layout, and more
    (`return_lse` is its `return_residual`, and implementations have other names). Here rows with
    nothing left to attend have one declared answer, and keys that nothing may attend influence
    nothing, whatever they hold.

    Args:
      query: `(B, T, N, H)` or `(T, N, H)`.
      key: `(B, S, K, H)`; query head n reads key/value head `n // (N // K)`.
      value: `(B, S, K, h)`.
      bias: added to the logits, broadcastable to `(B, N, T, S)`; -inf excludes the pair.
      mask: Boolean, broadcastable to `(B, N, T, S)`, True = attend; or a `Mask`.
      scale: factor of the logits, default `H ** -0.5`.
      is_causal: query i attends keys j <= i (aligned top-left; `Mask.causal(offset)` otherwise).
      query_seq_lengths: `(B,)`; rows beyond are 0.
      key_value_seq_lengths: `(B,)`; keys beyond are excluded.
      local_window_size: w or (left, right): `i - left <= j <= i + right`.
      segment_ids: `(B, T)` for both, or a pair `(B, T)`, `(B, S)`; only equal ids attend.
      logits_soft_cap: c: scaled logits x become `c * tanh(x / c)`, before the bias.
      fully_masked: answer of a row with nothing left: `zero`, `nan` or `mean` of the values.
      softmax_dtype: default at least float32; float64 stays float64.
      precision: of the two matrix products; None: as `Semantics.precision`.
      dropout_rate: of the weights; acts only with a `dropout_key`.
      dropout_broadcast: axes of BNTS that share a draw.
      dropout_key: a PRNG key.
      return_weights: also return the weights `(B, N, T, S)`: `"before_dropout"` (= True) or
        `"after_dropout"`.
      return_lse: also return the log-sum-exp of the logits `(B, N, T)` in float32 (float64 for
        float64 inputs), -inf on empty rows.
      implementation: a name, or names in order of preference; None: the first that supports it.

    Returns:
      `out[, weights][, lse]`; out is `(B, T, N, h)` in the promoted dtype of the inputs.

    Raises:
      ValueError: a shape or value does not fit; names the argument, the axes and the shape.
      TypeError: a dtype does not fit, or float64 would be rounded because x64 is off.

    >>> import jax.numpy as jnp
    >>> q, k, v = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 7, 2, 8)), jnp.ones((2, 7, 2, 3))
    >>> dot_product_attention(q, k, v, is_causal=True).shape
    (2, 5, 4, 3)
    """
    checks.are_arrays(query=query, key=key, value=value, bias=bias)
    checks.no_silent_rounding(query=query, key=key, value=value, bias=bias)
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be a Python bool, got {type(is_causal).__name__}")
    semantics = Semantics(
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        fully_masked=fully_masked,
        softmax_dtype=softmax_dtype,
        precision=precision,
        dropout_rate=dropout_rate,
        dropout_broadcast=tuple(dropout_broadcast),
    )
    structure: dict[str, Any] = {"causal_offset": 0 if is_causal else None}
    if local_window_size is not None:
        window = local_window_size
        left, right = window if isinstance(window, tuple) else (window, window)
        structure["window_size"] = Mask.window(left, right).window_size
    structure["query_lengths"] = query_seq_lengths
    structure["key_value_lengths"] = key_value_seq_lengths
    if segment_ids is not None:
        pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
        structure["query_segments"], structure["key_value_segments"] = pair
    with implementations.forward_mode():
        return _dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            Mask(**structure),
            dropout_key,
            semantics,
            return_weights=checks.weights_kind(return_weights),
            return_lse=return_lse,
            implementation=hashable(implementation),
        )


_KEYWORDS = {
    "query_lengths": "query_seq_lengths",
    "key_value_lengths": "key_value_seq_lengths",
    "query_segments": "segment_ids",
    "key_value_segments": "segment_ids",
}


def _places(query: Any, *_: Any, return_weights: Any, return_lse: bool, **__: Any) -> Any:
    spread = sharding.of_heads(query)
    if spread is None:
        return None
    more = [spread.pairs] * (bool(return_weights) + return_lse)
    return spread.axes, (spread.heads, *more) if more else spread.heads


@partial(jax.jit, static_argnames=("return_weights", "return_lse", "implementation"))
@sharding.by_types(_places)
def _dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    keywords: Mask,
    dropout_key: Any,
    semantics: Semantics,
    *,
    return_weights: ReturnWeights,
    return_lse: bool,
    implementation: str | tuple[str, ...] | None,
) -> Any:
    if query.ndim not in (3, 4):
        raise ValueError(f"query: expected axes (B, T, N, H) or (T, N, H), got {query.shape}")
    lead = "B " * (query.ndim - 3)
    sizes: dict[str, int] = {}
    bind("query", query.shape, f"{lead}T N H", sizes)
    bind("key", key.shape, f"{lead}S K H", sizes)
    bind("value", value.shape, f"{lead}S K h", sizes)
    batch = query.shape[:-3]
    dtype = checks.promoted(query=query, key=key, value=value)
    query, key, value = (
        x.astype(dtype).reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value)
    )
    merged = checks.flatten_mask(as_mask(mask), batch, sizes) & checks.flatten_mask(
        keywords, batch, sizes, _KEYWORDS
    )
    result = attend(
        query,
        key,
        value,
        None if bias is None else checks.flatten_bias(bias, batch, sizes),
        merged,
        semantics,
        dropout_key,
        return_weights,
        implementation,
        return_lse=return_lse,
    )
    answer: tuple[Any, ...] = (result.out,)
    if return_weights:
        answer += (result.weights,)
    if return_lse:
        answer += (result.lse,)
    answer = tuple(x.reshape(*batch, *x.shape[1:]) for x in answer)
    return answer if len(answer) > 1 else answer[0]


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: Mask,
    semantics: Semantics,
    dropout_key: Any,
    return_weights: ReturnWeights,
    implementation: str | Sequence[str] | None,
    *,
    return_lse: bool = False,
) -> Result:
    """Attention on checked arrays with one batch axis, by the implementation selected."""
    N, K = query.shape[2], key.shape[2]
    if K == 0 or N % K:
        raise ValueError(
            f"query heads N={N} must be a multiple of key/value heads K={K}: query is "
            f"(B, T, N, H) = {query.shape}, key is (B, S, K, H) = {key.shape}"
        )
    if query.shape[3] == 0:
        raise ValueError(f"head size H must be at least 1: query is (B, T, N, H) = {query.shape}")
    request = Request(
        query,
        key,
        value,
        bias,
        simplified(mask),
        semantics,
        dropout_key,
        return_weights,
        return_lse,
    )
    out, weights, lse = implementations.attend(request, implementation)
    out = checkpoint_name(out, "attention_out")  # type: ignore[no-untyped-call]
    if lse is not None:
        lse = checkpoint_name(lse, "attention_lse")  # type: ignore[no-untyped-call]
    return Result(out, weights, lse)


def as_mask(mask: Any) -> Mask:
    """A mask argument (array, `Mask` or None) as a Mask."""
    if mask is None:
        return Mask()
    return mask if isinstance(mask, Mask) else Mask.dense(mask)


def hashable(implementation: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """As a static argument of jit; what is hashable stays what it is."""
    if implementation is None or isinstance(implementation, str | implementations.Question):
        return implementation
    return tuple(implementation)
