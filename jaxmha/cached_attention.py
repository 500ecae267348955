"""Attention over a cache of keys and values, where each sequence has its own length."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmha import bias_kv
from jaxmha.cached_step import Cache, Step, make_step, over_extras, over_slots
from jaxmha.implementations import cache_kernels, online_softmax, platforms
from jaxmha.implementations.fused.cudnn_cached import Stored
from jaxmha.implementations.native import cache_step
from jaxmha.implementations.online_softmax import State
from jaxmha.implementations.sinks import share_of_keys
from jaxmha.mask import Mask
from jaxmha.mod_arguments import Mods
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
) -> Float[jax.Array, "B T N h"]:
    """Attention of queries over a cache and the extra positions.

    Args:
      params: of the layer; only extra positions and sinks are read. None: it has none.
      query: projected queries.
      cache: keys and values, including those of the query tokens, which its lengths count.
      positions: positions of the queries.
      mask: window, key/value padding and array over slots, with one batch axis.
      semantics: as in `multi_head_attention`.
      block: keys per tile.
      mods: traced score and mask functions; i and j are positions in the sequence, not slots.
    """
    (B, T, N, _), h = query.shape, cache.value.shape[-1]
    learned = None if params is None else params.sinks
    if 0 in (B, T, cache.slots):
        return jnp.zeros((B, T, N, h), query.dtype)

    def finished(find: Callable[[Step], State]) -> jax.Array:
        step = make_step(query, cache, positions, mask, semantics, mods)
        state = find(step)
        if params is not None:
            state = over_extras(step, params, semantics, state)
        softmax = online_softmax.normalize(state)
        out = softmax.out
        if learned is not None:  # a row without keys has output 0: sinks have no value
            sinks = jnp.repeat(jnp.asarray(learned).astype(out.dtype), T)
            share = share_of_keys(softmax.lse, sinks.reshape(1, *out.shape[1:3]))
            out *= share[..., None]
        elif semantics.fully_masked == "nan":
            out = jnp.where(softmax.row_sum == 0, jnp.nan, out)
        return jnp.moveaxis(out.reshape(B, N, T, h), 1, 2).astype(query.dtype)

    def plain() -> jax.Array:
        return finished(lambda step: _natively(step, block) or over_slots(step, block))

    stored, lengths = _by_length(cache, mask, mods, T)
    if stored is None:
        return plain()
    extras = learned is not None or (params is not None and bias_kv.count(params, semantics) > 0)
    kernel: Callable[[], jax.Array] | None = None
    if T == 1 and not extras:
        kernel = cache_kernels.attend(query, stored, lengths, semantics)
    else:
        state = cache_kernels.state(query, stored, positions[:, 0], lengths, semantics)
        if state is not None:
            kernel = partial(finished, lambda _: state())
    return plain() if kernel is None else cache_kernels.on_kernels_platform(kernel, plain)


def _by_length(
    cache: Cache, mask: Mask, mods: Mods, T: int
) -> tuple[Stored | None, Int[jax.Array, "B"]]:
    """Keys and values of which a step attends the first ones, and how many; None: it does not, or
    they do not lie in whole arrays."""
    lengths = jnp.asarray(cache.lengths)
    # A cache of at most left + 1 slots needs no window: it holds no token to the left of it.
    left, _ = mask.window_size or (None, None)
    windowed = left is not None and left + 1 < cache.slots
    if mask.key_value_padding is not None or mask.array is not None:
        return None, lengths
    if mods.score is not None or mods.mask is not None:
        return None, lengths
    if windowed and (T > 1 or platforms.current().name != "cuda"):
        return None, lengths
    slots, table = cache.whole(), cache.pages()
    if slots is not None:
        stored = Stored(slots.keys, slots.values)
    elif table is not None:
        stored = Stored(jnp.asarray(cache.key), jnp.asarray(cache.value), table)
    else:
        return None, lengths
    if not windowed or left is None:
        return stored, lengths
    # One query attends the last tokens: a copy of these alone, in their order, also of a ring.
    offsets = jnp.arange(left + 1, dtype=lengths.dtype)[None]
    positions = (lengths - left - 1).clip(0)[:, None] + offsets
    heads = stored.at(positions % cache.slots)
    last = Stored(*(jnp.swapaxes(x, 1, 2) for x in heads))
    return last, jnp.minimum(lengths, left + 1)


def _natively(step: Step, block: int) -> State | None:
    """The same by the native kernel; None: it cannot compute this step, or cannot run here."""
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
    """The operands of the native kernel as a step in plain XLA."""
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
    """`x` with NaN where the condition holds.

    `jax_debug_nans` would report a constant NaN even if no row is NaN.
    """
    infinite = jnp.where(condition, jnp.inf, 0.0).astype(x.dtype)
    return jnp.where(condition, infinite - infinite, x)
