"""Attention over a cache of keys and values, where each sequence has its own length.

Source of the online softmax: Milakov and Gimelshein, "Online normalizer calculation for
softmax" (2018).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha import bias_kv
from jaxmha.arrays import Array
from jaxmha.implementations import platforms
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.implementations.shard_map import alike
from jaxmha.mask import Mask
from jaxmha.matmul import operand_dtype, resolved, split_scale
from jaxmha.params import MHAParams
from jaxmha.semantics import Semantics

BLOCK = 512  # keys per tile: the cost of a step grows with the tokens, not with the slots
WORTH_A_COPY = 4  # copying a key costs about as much as attending so many


def refuse_structure(mask: Mask) -> None:
    """Raises ValueError for conditions of a mask that a step over a cache does not support."""
    names = ("causal_offset", "query_lengths", "key_value_lengths", "query_padding")
    refused = [name for name in names if getattr(mask, name) is not None]
    refused += ["segments"] * (mask.query_segments is not None)
    if refused:
        raise ValueError(
            f"mask: a decoding step is causal and knows its lengths, got {', '.join(refused)}: "
            "give window, key/value padding or a Boolean array over the slots of the cache"
        )


def attend_cache(
    params: MHAParams,
    query: jax.Array,
    cache: tuple[Array, Array, Array],
    positions: jax.Array,
    mask: Mask,
    semantics: Semantics,
    block: int,
) -> jax.Array:
    """Attention of `B T N H` queries at `positions` over a cache and the extra positions.

    Args:
      params: of the layer, for its extra positions.
      query: `B T N H`.
      cache: keys `B K S H`, values `B K S h`, and lengths `B` with the queries' own tokens.
      positions: `B T`.
      mask: of one batch axis: window, key/value padding and array over slots.
      semantics: as in `multi_head_attention`.
      block: keys read at a time.
    """
    cached_keys, cached_values, lengths = map(jnp.asarray, cache)
    (B, T, N, H), (_, K, S, h) = query.shape, cached_values.shape
    G, dtype = N // K, query.dtype
    if 0 in (B, T, S):
        return jnp.zeros((B, T, N, h), dtype)
    accumulate = accumulation_dtype(dtype)
    scale = H**-0.5 if semantics.scale is None else semantics.scale
    # A bfloat16 cache is multiplied directly: a copy in float32 takes longer than the matmuls.
    common = _common_dtype(query.dtype, cached_keys.dtype, cached_values.dtype)
    platform = platforms.current().name
    operands = operand_dtype(common, semantics.precision, platform)
    precision = resolved(semantics.precision) if operands is None else "default"
    scale, rest = (scale, 1.0) if operands is None else split_scale(scale)
    operands = operands or accumulate
    product = partial(jnp.einsum, precision=precision, preferred_element_type=accumulate)
    rows = jnp.moveaxis((query.astype(accumulate) * scale).reshape(B, T, K, G, H), 1, 3)
    rows = rows.reshape(B, K, G * T, H).astype(operands)
    rows, cached_keys, cached_values, lengths, positions, mask = alike(
        (rows, cached_keys, cached_values, lengths, positions, mask)
    )
    last = lengths[:, None] - 1
    left, _ = mask.window_size or (None, None)
    size = min(block, S)

    def allowed(slots: jax.Array) -> jax.Array:
        """Mask tile `B n T slots`: a slot's token is valid, causal, and within the window."""
        tokens = last - (last - slots.reshape(1, -1)) % S  # latest token in the slot
        i, j = positions[:, None, :, None], tokens[:, None, None]
        there = (j >= 0) & (j <= i)
        if left is not None:
            there &= j >= i - left
        if mask.key_value_padding is not None:
            there &= jnp.take(mask.key_value_padding, slots, 1)[:, None, None]
        if mask.array is not None:
            array = jnp.broadcast_to(mask.array, (*mask.array.shape[:3], S))
            there &= jnp.take(array, slots, 3)
        return there

    def fold(
        state: tuple[Any, ...], keys: Any, values: Any, there: Any, *, dead_too: bool = False
    ) -> tuple[Any, ...]:
        """Online softmax: folds a tile of keys `B K s H` into the row max, row sum and output.

        `dead_too`: skips zeroing of unattended values, which are multiplied by weights of 0.
        """
        highest, total, out = state
        n, s = there.shape[1], keys.shape[2]
        pairs = there if n > 1 else jnp.broadcast_to(there, (B, K * G, T, s))
        pairs = pairs.reshape(B, K, G * T, s)
        keys, values = keys.astype(operands), values.astype(operands)
        if not dead_too:
            values = jnp.where(pairs.any(2)[..., None], values, 0.0)  # 0 * NaN is NaN
        logits = _logits(rows, keys, product, platform)
        if rest != 1.0:
            logits *= rest
        if semantics.logits_soft_cap is not None:
            logits = semantics.logits_soft_cap * jnp.tanh(logits / semantics.logits_soft_cap)
        logits = jnp.where(pairs, logits, -jnp.inf)
        higher = jnp.maximum(highest, logits.max(-1))
        exps, shrink = jnp.exp(logits - higher[..., None]), jnp.exp(highest - higher)
        weighed = product("bkrs,bksh->bkrh", exps.astype(operands), values)
        return higher, total * shrink + exps.sum(-1), out * shrink[..., None] + weighed

    shape = (B, K, G * T)
    lowest = float(np.finfo(accumulate).min)  # finite: -inf - -inf would be NaN
    nothing: tuple[Any, ...] = (
        jnp.full(shape, lowest, accumulate),
        jnp.zeros(shape, accumulate),
        jnp.zeros((*shape, h), accumulate),
    )
    nothing, _ = alike((nothing, rows))
    used = jnp.minimum(jnp.max(last) + 1, S)

    def whole() -> tuple[Any, ...]:
        slots = jnp.arange(S, dtype=np.int32)
        return fold(nothing, cached_keys, cached_values, allowed(slots), dead_too=True)

    def block_of(i: Any, state: tuple[Any, ...]) -> tuple[Any, ...]:
        # The last tile is moved back to fit; its overlap with the tile before is masked.
        start = jnp.minimum(i * size, S - size)
        keys, values = (
            jax.lax.dynamic_slice_in_dim(x, start, size, 2) for x in (cached_keys, cached_values)
        )
        slots = start + jnp.arange(size, dtype=np.int32)
        new = (slots >= i * size).reshape(1, 1, 1, size)
        return fold(state, keys, values, allowed(slots) & new)

    def by_blocks() -> tuple[Any, ...]:
        first = jnp.zeros((), used.dtype)
        if left is not None:  # until a sequence wraps around, tiles before every window are skipped
            before = jnp.maximum(jnp.min(positions) - left, 0)
            first = jnp.where(jnp.max(last) < S, before // size, 0).astype(used.dtype)
        last_block = (used + size - 1) // size
        state: tuple[Any, ...] = jax.lax.fori_loop(first, last_block, block_of, nothing)
        return state

    # Slicing a tile copies it, which costs more than reading the whole cache if much of it is used.
    # Reading it whole fails if unattended slots hold NaN; the loop over tiles is then correct.
    much = used * WORTH_A_COPY > S
    state = jax.lax.cond(much, whole, lambda: nothing)
    state = jax.lax.cond(much & jnp.isfinite(state[2]).all(), lambda: state, by_blocks)

    heads = (jnp.zeros((B, 0, K, x), accumulate) for x in (H, h))
    more = [
        bias_kv.append(x, y, semantics)
        for x, y in zip(heads, (params.bias_k, params.bias_v), strict=True)
    ]
    if more[0].shape[1]:
        keys, values = (jnp.moveaxis(x, 1, 2) for x in more)
        state = fold(state, keys, values, jnp.ones((B, 1, T, keys.shape[2]), bool))
    _, total, out = state
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    empty = (total == 0)[..., None]
    if semantics.fully_masked == "nan":
        out = jnp.where(empty, jnp.nan, out)
    return jnp.moveaxis(out.reshape(B, N, T, h), 1, 2).astype(dtype)


def nan_where(condition: jax.Array, x: jax.Array) -> jax.Array:
    """`x` with NaN where the condition holds.

    `jax_debug_nans` would report a constant NaN even if no row is NaN.
    """
    infinite = jnp.where(condition, jnp.inf, 0.0).astype(x.dtype)
    return jnp.where(condition, infinite - infinite, x)


def _common_dtype(query: np.dtype[Any], *cached: np.dtype[Any]) -> np.dtype[Any]:
    """The promoted dtype; float8, a storage dtype, is widened to the dtype of the queries."""
    wide = [dtype for dtype in cached if dtype.itemsize > 1]
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.result_type(query, *wide))


def _logits(
    rows: jax.Array, keys: jax.Array, product: Callable[..., jax.Array], platform: str
) -> jax.Array:
    """Logits `B K r s` of rows `B K r H` and keys `B K s H`."""
    if rows.shape[2] == 1 or platform != "cpu":
        return product("bkrh,bksh->bkrs", rows, keys)
    # On CPUs, few rows times many keys is several times slower than keys times rows; the barrier
    # keeps XLA from swapping the operands back.
    found = product("bksh,bkrh->bksr", keys, rows)
    return jnp.swapaxes(jax.lax.optimization_barrier(found), 2, 3)  # type: ignore[no-untyped-call]
