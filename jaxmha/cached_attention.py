"""Attention over a cache of keys and values, where each sequence has its own length."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmha import bias_kv
from jaxmha.arrays import Array
from jaxmha.cached_step import (
    Cache,
    Step,
    copies_window,
    make_step,
    over_extras,
    over_positions,
    over_slots,
)
from jaxmha.implementations import cache_kernels, online_softmax, platforms
from jaxmha.implementations.fused.cudnn_cached import Stored
from jaxmha.implementations.native import cache_step
from jaxmha.implementations.online_softmax import State
from jaxmha.implementations.sinks import share_of_keys
from jaxmha.mask import Mask
from jaxmha.mod_arguments import Mods, checked
from jaxmha.params import MHAParams
from jaxmha.semantics import Semantics


def reject_structure(mask: Mask) -> None:
    """Raises ValueError for conditions of a mask that a step over a cache does not support."""
    names = ("causal_offset", "query_lengths", "key_value_lengths", "query_padding")
    unsupported = [name for name in names if getattr(mask, name) is not None]
    unsupported += ["segments"] * (mask.query_segments is not None)
    if unsupported:
        raise ValueError(
            f"mask: a decoding step is causal and knows its lengths, got {', '.join(unsupported)}: "
            "give window, key/value padding or a Boolean array over the slots of the cache"
        )


def attend_cache(
    params: MHAParams | None,
    query: Float[jax.Array, "B T N H"],
    cache: Cache,
    positions: Int[jax.Array, "B T"],
    mask: Mask,
    semantics: Semantics,
    block: int,
    mods: Mods = Mods(),
    *,
    sinks: Array | None = None,
) -> Float[jax.Array, "B T N h"]:
    """Attention of queries over a cache and the extra positions.

    Args:
      params: parameters of the layer, which give extra positions and sinks; None: no extra
        positions, and sinks from `sinks`.
      query: projected queries.
      cache: keys and values, including the keys and values of the query tokens.
      positions: positions of the queries.
      mask: window, key/value padding and array over slots, with one batch axis.
      semantics: as in `multi_head_attention`.
      block: keys per tile.
      mods: traced score and mask functions; i and j are positions in the sequence, not slots.
      sinks: `(N,)`, read only if params are None.
    """
    (B, T, N, _), h = query.shape, cache.value.shape[-1]
    checked(mods, {"B": B, "N": N})
    learned = sinks if params is None else params.sinks
    if 0 in (B, T, cache.slots):
        return jnp.zeros((B, T, N, h), query.dtype)

    def finished(find: Callable[[Step], State]) -> jax.Array:
        step = make_step(query, cache, positions, mask, semantics, mods)
        state = find(step)
        if params is not None:
            state = over_extras(step, params, semantics, state)
        softmax = online_softmax.normalize(state)
        out = softmax.out
        if learned is not None:  # a row without keys attends its sink alone: its output is 0
            logits = jnp.repeat(jnp.asarray(learned).astype(out.dtype), T)
            share = share_of_keys(softmax.lse, logits.reshape(1, *out.shape[1:3]))
            out *= share[..., None]
        elif semantics.fully_masked == "nan":
            out = jnp.where(softmax.row_sum == 0, jnp.nan, out)
        return jnp.moveaxis(out.reshape(B, N, T, h), 1, 2).astype(query.dtype)

    def plain() -> jax.Array:
        return finished(lambda step: _natively(step, block) or over_slots(step, block))

    common = _common(cache, positions, mask, mods)
    if common is None:
        return plain()
    extras = learned is not None or (params is not None and bias_kv.count(params, semantics) > 0)
    kernel: Callable[[], jax.Array] | None = None
    if T == 1 and not extras:
        kernel = cache_kernels.attend(query, common.stored, common.lengths, semantics)
    else:
        find = _by_kernel(query, cache, positions, common, semantics)
        kernel = None if find is None else partial(finished, find)
    return plain() if kernel is None else cache_kernels.on_kernels_platform(kernel, plain)


class Common(NamedTuple):
    """Keys that every query of a step attends: one call of a kernel serves all queries.

    Attributes:
      stored: keys and values; every query attends the first `lengths` of them.
      lengths: the number of keys that every query attends.
      others: positions of further keys, which only some queries attend because of their windows;
        None: only keys of the step's own tokens are further keys, and those are causal.
    """

    stored: Stored
    lengths: Int[jax.Array, "B"]
    others: Int[jax.Array, "B s"] | None


def _common(
    cache: Cache, positions: Int[jax.Array, "B T"], mask: Mask, mods: Mods
) -> Common | None:
    """Returns the keys that all queries attend; None if kernels do not support step or cache."""
    T, past, lengths = positions.shape[1], positions[:, 0], jnp.asarray(cache.lengths)
    # A cache of at most left + 1 slots needs no window: it holds no token to the left of it.
    left, _ = mask.window_size or (None, None)
    windowed = left is not None and left + 1 < cache.slots
    if mask.key_value_padding is not None or mask.array is not None:
        return None
    if mods.score is not None or mods.mask is not None:
        return None
    if windowed and platforms.current().name != "cuda":
        return None
    slots, table = cache.whole(), cache.pages()
    if slots is None and table is None:
        return None
    if not windowed or left is None:
        keys, values = jnp.asarray(cache.key), jnp.asarray(cache.value)
        return Common(Stored(keys, values, table), lengths if T == 1 else past, None)
    # Every query attends the keys from the start of the last query's window to the end of the first
    # query's window. They are copied in order of position, also from a ring buffer. On each side,
    # only some queries attend T - 1 further keys.
    size, others = left + 2 - T, 2 * (T - 1)
    if size <= others or (T > 1 and not copies_window(cache, left, T)):
        return None
    first = (past - left + T - 1).clip(0)
    keys, values, *_ = cache.at(first[:, None] + jnp.arange(size, dtype=np.int32)[None])
    edges = np.r_[-left : T - 1 - left, 1:T].astype(np.int32)
    ends = jnp.minimum(lengths, past + 1)
    return Common(Stored(keys, values), ends - first, past[:, None] + edges[None])


def _by_kernel(
    query: Float[jax.Array, "B T N H"],
    cache: Cache,
    positions: Int[jax.Array, "B T"],
    common: Common,
    semantics: Semantics,
) -> Callable[[Step], State] | None:
    """Returns a function that computes the softmax state of a step by kernels; None if none can.

    Keys `common.others`, which only some queries attend, are folded in by plain XLA.
    """
    shared = cache_kernels.shared(query, common.stored, common.lengths, semantics)
    T, others = query.shape[1], common.others
    if shared is None:
        return None
    if T == 1:
        return lambda _: shared()
    if others is not None:
        return lambda step: over_positions(step, others, shared())
    counts = (jnp.asarray(cache.lengths) - positions[:, 0]).clip(0, T)
    own = cache_kernels.causal(query, Stored(*cache.at(positions)[:2]), counts, semantics)
    return None if own is None else lambda _: online_softmax.joined(shared(), own())


def _natively(step: Step, block: int) -> State | None:
    """Returns the softmax state by the native CPU kernel; None if it cannot compute this step."""
    cache, mask = step.cache, step.mask
    if step.mods.score is not None or step.mods.mask is not None:
        return None
    if cache_step.unsupported_reason(step.rows, cache.key, cache.value) is not None:
        return None
    allowed = mask.array
    if mask.key_value_padding is not None:
        padding = jnp.asarray(mask.key_value_padding)[:, None, None]
        allowed = padding if allowed is None else allowed & padding
    operands = cache_step.operands(
        step.rows,
        cache.key,
        cache.value,
        cache.lengths,
        step.positions[:, 0],
        allowed=allowed,
        **{x: getattr(cache, x, None) for x in ("table", "key_scale", "value_scale")},
    )
    T, context = step.positions.shape[1], (type(cache), step.matmul, block)
    settings = cache_step.Settings(T, step.left, step.soft_cap, _in_xla, context)
    out, row_max, row_sum = cache_step.attend(settings, operands)
    return State(out, row_max[..., None], row_sum[..., None])


def _in_xla(
    settings: cache_step.Settings, given_operands: Sequence[Any]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes in plain XLA what the native kernel returns: output, row max and row sum."""
    context: Any = settings.context
    kind, matmul, block = context
    operands = cache_step.Operands(*given_operands)
    given = {name: x if x.size else None for name, x in operands._asdict().items()}
    cache: Cache = kind(**{name: given[name] for name in kind._fields})
    positions = operands.first[:, None] + jnp.arange(settings.tokens, dtype=np.int32)[None]
    window = None if settings.left is None else (settings.left, None)
    mask = Mask(window_size=window, array=given["allowed"])
    step = Step(
        operands.rows,
        cache,
        operands.lengths[:, None] - 1,
        positions,
        mask,
        matmul,
        settings.soft_cap,
        Mods(),
    )
    state = over_slots(step, block)
    return state.out, state.row_max[..., 0], state.row_sum[..., 0]


def nan_where(condition: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `x` with NaN where `condition`, which has the leading axes of x, holds.

    NaN is computed as inf - inf: a constant NaN would raise under `jax_debug_nans` in every call.
    """
    condition = condition.reshape(condition.shape + (1,) * (x.ndim - condition.ndim))
    infinite = jnp.where(condition, jnp.inf, 0.0).astype(x.dtype)
    return jnp.where(condition, infinite - infinite, x)
