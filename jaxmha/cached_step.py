"""One step over a cache in plain XLA: the softmax state over slots and extra positions."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmha import bias_kv
from jaxmha.arrays import Array
from jaxmha.implementations import online_softmax, platforms
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.implementations.mods import of_pairs, of_scores
from jaxmha.implementations.online_softmax import State, cap_and_mask, empty_state
from jaxmha.implementations.varying import alike
from jaxmha.mask import Mask
from jaxmha.matmul import operand_dtype, resolved, split_scale
from jaxmha.mod_arguments import Mods
from jaxmha.params import MHAParams
from jaxmha.semantics import Precision, Semantics, logit_scale

BLOCK = 512  # keys per tile; a step computes only the tiles that hold tokens
WORTH_A_COPY = 4  # copying a key to a tile costs as much as attending this many keys in place


class Tile(NamedTuple):
    """Keys and values of s slots; scales, if any, multiply the stored numbers (`quantized`)."""

    keys: Float[jax.Array, "B K s H"]
    values: Float[jax.Array, "B K s h"]
    key_scale: Float[jax.Array, "B K s"] | None = None
    value_scale: Float[jax.Array, "B K s"] | None = None


@runtime_checkable
class Cache(Protocol):
    """The interface of caches: keys and values by slot, independent of their storage."""

    @property
    def key(self) -> Array: ...
    @property
    def value(self) -> Array: ...
    @property
    def lengths(self) -> Array: ...
    @property
    def slots(self) -> int:
        """S, the number of slots of a sequence."""

    def tile_size(self, block: int) -> int:
        """The number of slots per tile: about `block`."""

    def tile(self, first: int | jax.Array, size: int) -> Tile:
        """Keys and values of `size` slots, starting at slot `first`."""

    def at(self, positions: Int[jax.Array, "B s"]) -> Tile:
        """Keys and values of these positions, which are not negative, of each sequence."""

    def whole(self) -> Tile | None:
        """Keys and values of all slots; None if reading them needs a copy."""

    def pages(self) -> Int[jax.Array, "B M"] | None:
        """The table of the pages with keys and values; None if they have no pages, or have scales."""


class Matmul(NamedTuple):
    """How the matmuls of a step are computed: dtype of operands and sums, precision, platform, and
    `scale`, the part of the logits' factor that `Step.rows` do not contain yet."""

    operands: np.dtype[np.floating]
    accumulate: np.dtype[np.floating]
    precision: Precision
    platform: str
    scale: float

    def einsum(self, axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
        """The product in the accumulation dtype."""
        return jnp.einsum(
            axes, a, b, precision=self.precision, preferred_element_type=self.accumulate
        )


class Step(NamedTuple):
    """One step over a cache; the T queries of all query heads of a key head are rows of one matmul.

    Attributes:
      rows: queries times the scale of the logits, or times its power of two (`Matmul.scale`).
      cache: keys and values, S slots.
      last: position of the latest token of each sequence.
      positions: positions of the queries.
      mask: window, key/value padding and array over slots, with one batch axis.
      mods: traced score and mask functions.
    """

    rows: Float[jax.Array, "B K r H"]
    cache: Cache
    last: Int[jax.Array, "B 1"]
    positions: Int[jax.Array, "B T"]
    mask: Mask
    matmul: Matmul
    soft_cap: float | None
    mods: Mods

    @property
    def left(self) -> int | None:
        """Left bound of the window; None: no bound."""
        return None if self.mask.window_size is None else self.mask.window_size[0]


# The arrays of a step: all but `matmul` and `soft_cap`.
_Arrays: TypeAlias = tuple[jax.Array, Cache, jax.Array, jax.Array, Mask, Mods]


def make_step(
    query: Float[jax.Array, "B T N H"],
    cache: Cache,
    positions: Int[jax.Array, "B T"],
    mask: Mask,
    semantics: Semantics,
    mods: Mods,
) -> Step:
    (B, T, N, H), K = query.shape, cache.key.shape[1]
    accumulate = accumulation_dtype(query.dtype)
    scale = logit_scale(semantics, H)
    # A bfloat16 cache is multiplied directly: a copy in float32 takes longer than the matmuls.
    common = _common_dtype(query.dtype, cache.key.dtype, cache.value.dtype)
    platform = platforms.current().name
    operands = operand_dtype(common, semantics.precision, platform)
    precision = resolved(semantics.precision) if operands is None else "default"
    scale, rest = (scale, 1.0) if operands is None else split_scale(scale)
    operands = operands or accumulate
    rows = jnp.moveaxis((query.astype(accumulate) * scale).reshape(B, T, K, N // K, H), 1, 3)
    rows = rows.reshape(B, K, N // K * T, H).astype(operands)
    cache = jax.tree.map(jnp.asarray, cache)
    rows, cache, positions, mask, mods = alike((rows, cache, positions, mask, mods))
    matmul = Matmul(operands, accumulate, precision, platform, rest)
    last = jnp.asarray(cache.lengths)[:, None] - 1
    return Step(rows, cache, last, positions, mask, matmul, semantics.logits_soft_cap, mods)


def over_slots(step: Step, block: int) -> State:
    """The softmax state over all valid slots, from the whole cache or only from tiles in use.

    Derivatives read all slots: reverse mode cannot transpose a loop over as many tiles as are used.
    """

    def of(arrays: _Arrays, find: Callable[[Step], State]) -> State:
        rows, cache, last, positions, mask, mods = arrays
        own = step._replace(rows=rows, cache=cache, last=last, positions=positions)
        return find(own._replace(mask=mask, mods=mods))

    @jax.custom_jvp
    def state(arrays: _Arrays) -> State:
        return of(arrays, partial(_over_tiles, block=block))

    @state.defjvp
    def _(primals: tuple[_Arrays], tangents: tuple[_Arrays]) -> tuple[State, State]:
        found: tuple[State, State] = jax.jvp(partial(of, find=_over_all), primals, tangents)
        return found

    found: State = state((*step[:5], step.mods))
    return found


def _over_all(step: Step) -> State:
    """The softmax state over all slots; unattended keys are zeroed, so that no NaN in them counts."""
    S = step.cache.slots
    allowed, tokens = _allowed(step, jnp.arange(S, dtype=np.int32))
    attended = _attended(step, allowed)
    every = step.cache.whole() or step.cache.tile(0, S)
    keys = jnp.where(attended[..., None], every.keys, jnp.zeros((), every.keys.dtype))
    scale = every.key_scale
    scale = None if scale is None else jnp.where(attended, scale, jnp.zeros((), scale.dtype))
    tile = every._replace(keys=keys, key_scale=scale)
    return _fold(step, _empty_state(step), tile, allowed, tokens)


def _over_tiles(step: Step, block: int) -> State:
    S = step.cache.slots
    size = step.cache.tile_size(block)
    start = _empty_state(step)
    used = jnp.minimum(jnp.max(step.last) + 1, S)

    def whole(tile: Tile) -> State:
        slots = jnp.arange(S, dtype=np.int32)
        return _fold(step, start, tile, *_allowed(step, slots), all_finite=True)

    # On GPUs, a branch or a loop of a length that the host does not know would wait for the host.
    if step.matmul.platform in ("cuda", "rocm"):
        T = step.positions.shape[1]
        if step.left is not None and copies_window(step.cache, step.left, T):
            window = step.positions[:, :1] + jnp.arange(-step.left, T, dtype=np.int32)[None]
            return over_positions(step, window, start)
        every = step.cache.whole() or step.cache.tile(0, S)
        return _fold(step, start, every, *_allowed(step, jnp.arange(S, dtype=np.int32)))

    def tile(i: jax.Array | int, state: State) -> State:
        # The last tile ends at S; its overlap with the previous tile is masked.
        first = jnp.minimum(i * size, S - size)
        slots = first + jnp.arange(size, dtype=np.int32)
        new = (slots >= i * size).reshape(1, 1, 1, size)
        allowed, tokens = _allowed(step, slots)
        return _fold(step, state, step.cache.tile(first, size), allowed & new, tokens)

    def by_tiles() -> State:
        first = jnp.zeros((), used.dtype)
        if step.left is not None:
            # Tiles to the left of all windows are skipped, unless a sequence has wrapped around: then
            # slots are not in the order of positions.
            before = jnp.maximum(jnp.min(step.positions) - step.left, 0)
            first = jnp.where(jnp.max(step.last) < S, before // size, 0).astype(used.dtype)
        state: State = jax.lax.fori_loop(first, (used + size - 1) // size, tile, start)
        return state

    # Slicing a tile copies it, which costs more than reading the whole cache if much of it is used.
    # If unattended slots hold NaN, the output over the whole cache is NaN, and the loop over tiles,
    # which zeroes unattended values, replaces it.
    all_slots = step.cache.whole()
    if all_slots is None:
        return by_tiles()
    much = used * WORTH_A_COPY > S
    state: State = jax.lax.cond(much, lambda: whole(all_slots), lambda: start)
    chosen: State = jax.lax.cond(much & jnp.isfinite(state.out).all(), lambda: state, by_tiles)
    return chosen


def copies_window(cache: Cache, left: int, T: int) -> bool:
    """True if T queries on a GPU should attend a copy of the keys in their windows, not all slots.

    It compares the numbers copied: keys and values of left + T tokens; or those of all slots if they
    are in pages, and otherwise the values of all slots, which are copied to zero unattended ones.
    """
    copies = 1 if cache.whole() is None else 2
    return copies * (left + T) < cache.slots


def over_positions(step: Step, positions: Int[jax.Array, "B s"], state: State) -> State:
    """Folds the keys of these positions into the state; negative positions are excluded."""
    tokens = jnp.where(positions <= step.last, positions, -1)
    positions = positions.clip(0)
    allowed = _allowed_tokens(step, positions % step.cache.slots, tokens)
    return _fold(step, state, step.cache.at(positions), allowed, tokens)


def _empty_state(step: Step) -> State:
    shape, h = step.rows.shape[:3], step.cache.value.shape[-1]
    out, per_row = (jnp.zeros((*shape, size), step.matmul.accumulate) for size in (h, 1))
    state, _ = alike((empty_state(out, per_row), step.rows))
    return state


def over_extras(step: Step, params: MHAParams, semantics: Semantics, state: State) -> State:
    """Folds the extra positions (`bias_k`, `bias_v`, zeros) into the state, for every query."""
    (B, K, _, H), h = step.rows.shape, step.cache.value.shape[-1]
    empty = [jnp.zeros((B, 0, K, size), step.matmul.accumulate) for size in (H, h)]
    keys = jnp.moveaxis(bias_kv.append(empty[0], params.bias_k, semantics), 1, 2)
    values = jnp.moveaxis(bias_kv.append(empty[1], params.bias_v, semantics), 1, 2)
    if not keys.shape[2]:
        return state
    T = step.positions.shape[1]
    return _fold(step, state, Tile(keys, values), jnp.ones((B, 1, T, keys.shape[2]), bool))


def _allowed(
    step: Step, slots: Int[jax.Array, "s"]
) -> tuple[Bool[jax.Array, "B #N T s"], Int[jax.Array, "B s"]]:
    """Returns the mask of these slots, and the position of the latest token in each of them,
    negative if the slot is empty."""
    slots = slots.reshape(1, -1)
    tokens = step.last - (step.last - slots) % step.cache.slots
    return _allowed_tokens(step, slots, tokens), tokens


def _allowed_tokens(
    step: Step, slots: Int[jax.Array, "#B s"], tokens: Int[jax.Array, "B s"]
) -> Bool[jax.Array, "B #N T s"]:
    """Returns the mask of slots with these tokens: True where a token exists, is not after the query,
    and is allowed by window, mask and mask function."""
    S = step.cache.slots
    i, j = step.positions[:, None, :, None], tokens[:, None, None]
    allowed = (j >= 0) & (j <= i)
    if step.left is not None:
        allowed &= j >= i - step.left
    if step.mask.key_value_padding is not None:
        padding = jnp.asarray(step.mask.key_value_padding)
        allowed &= jnp.take_along_axis(padding, slots, 1, mode="clip")[:, None, None]
    if step.mask.array is not None:
        array = jnp.broadcast_to(step.mask.array, (*step.mask.array.shape[:3], S))
        allowed &= jnp.take_along_axis(array, slots[:, None, None], 3, mode="clip")
    if step.mods.mask is not None:
        allowed = allowed & of_pairs(step.mods.mask, _heads(step), step.positions, tokens)
    return allowed


def _heads(step: Step) -> int:
    """The number of query heads."""
    return step.rows.shape[1] * step.rows.shape[2] // step.positions.shape[1]


def _fold(
    step: Step,
    state: State,
    tile: Tile,
    allowed: Bool[jax.Array, "B n T s"],
    tokens: Int[jax.Array, "B s"] | None = None,
    *,
    all_finite: bool = False,
) -> State:
    """Folds a tile of keys into the state.

    `tokens`: positions of the keys, for a score function; None: the score function is not applied.
    `all_finite`: assumes that all values are finite. Otherwise unattended values are zeroed: their
    weight is 0, but 0 * NaN is NaN.
    """
    (B, K, r, _), matmul = step.rows.shape, step.matmul
    n, T, s = allowed.shape[1:]
    mask = allowed if n > 1 else jnp.broadcast_to(allowed, (B, K * (r // T), T, s))
    mask = mask.reshape(B, K, r, s)
    keys, values = tile.keys.astype(matmul.operands), tile.values.astype(matmul.operands)
    value_scale = tile.value_scale
    if not all_finite:
        attended = _attended(step, allowed)
        values = jnp.where(attended[..., None], values, 0.0)
        value_scale = None if value_scale is None else jnp.where(attended, value_scale, 0.0)
    logits = _query_key(step.rows, keys, matmul)
    if matmul.scale != 1.0:
        logits *= matmul.scale
    if tile.key_scale is not None:
        logits *= tile.key_scale[:, :, None].astype(logits.dtype)
    if step.mods.score is not None and tokens is not None:
        logits, _ = cap_and_mask(logits, step.soft_cap)
        # The function reads 0 for excluded pairs: inf times a cotangent of 0 would make gradients NaN.
        logits = jnp.where(mask, logits, 0.0).reshape(B, K * (r // T), T, s)
        logits = of_scores(step.mods.score, logits, step.positions, tokens)
        logits = jnp.where(mask, logits.reshape(B, K, r, s), -jnp.inf)
    else:
        logits, _ = cap_and_mask(logits, step.soft_cap, mask)

    def weigh(exps: jax.Array) -> jax.Array:
        if value_scale is not None:
            exps *= value_scale[:, :, None].astype(exps.dtype)
        return matmul.einsum("bkrs,bksh->bkrh", exps.astype(matmul.operands), values)

    return online_softmax.fold(logits, weigh, state)


def _attended(step: Step, allowed: Bool[jax.Array, "B n T s"]) -> Bool[jax.Array, "B #K s"]:
    """True for slots that some query attends, per key head if the mask differs between heads."""
    some = allowed.any(2)
    B, n, s = some.shape
    return some if n == 1 else some.reshape(B, step.rows.shape[1], -1, s).any(2)


def _query_key(
    rows: Float[jax.Array, "B K r H"], keys: Float[jax.Array, "B K s H"], matmul: Matmul
) -> Float[jax.Array, "B K r s"]:
    """The logits of all rows and keys, before scale and soft cap."""
    if rows.shape[2] == 1 or matmul.platform != "cpu":
        return matmul.einsum("bkrh,bksh->bkrs", rows, keys)
    # On CPUs, few rows times many keys is several times slower than keys times rows; the barrier
    # keeps XLA from swapping the operands back.
    found = matmul.einsum("bksh,bkrh->bksr", keys, rows)
    return jnp.swapaxes(jax.lax.optimization_barrier(found), 2, 3)  # type: ignore[no-untyped-call]


def _common_dtype(
    query: np.dtype[np.generic], *cached: np.dtype[np.generic]
) -> np.dtype[np.generic]:
    """The promoted dtype of queries and cache; int8 and float8, dtypes of storage, are left out."""
    wide = [dtype for dtype in cached if dtype.itemsize > 1]
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.result_type(query, *wide))
