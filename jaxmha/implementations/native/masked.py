"""Attention with a mask function by the native kernels, which skip fully masked blocks of pairs.

XLA evaluates the function for many pairs at a time, and packs its mask into one bit per pair.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, UInt8

from jaxmha.implementations import varying
from jaxmha.implementations.mods import Mod, block_within
from jaxmha.implementations.native import operands, primitives
from jaxmha.implementations.native.operands import FAR, Problem, Residuals, Settings
from jaxmha.implementations.tiled.block_mask import NO_CONDITIONS, Conditions, TilePosition, allowed
from jaxmha.implementations.tiled.layout import Index

Arrays: TypeAlias = tuple[jax.Array, ...]

# A pass evaluates the mask, one bit per pair, as a whole if it takes at most MASK_BYTES, for which a
# loop would not pay, or at most WHOLE times the bytes of the output or, in the backward pass, of output,
# its cotangent and gradients. Otherwise a loop visits some queries and keys at a time: their bits, and
# the copies of their operands and results, take about MASK_BYTES or PARTS times the same bytes,
# whichever is more. They take more only if the fewest queries (64) and keys (LEAST_KEYS) of a visit do.
MASK_BYTES = 2**20
WHOLE, PARTS = 1 / 4, 1 / 6
# Minimum number of keys of a visit of the backward pass that does not visit all keys: more than
# ALL_KEYS of backward.cc (1536). With at most ALL_KEYS keys, the backward kernel computes delta from
# the keys that it gets, which is right only if they are all keys of its rows; with more, it computes
# delta from the output.
LEAST_KEYS = 2048


class Config(NamedTuple):
    """Static config of `core`: attention in visits of some queries and keys at a time.

    Attributes:
      settings: the settings of the kernels. Their bounds are FAR: `Problem.offset` has the right
        bound, and the bits of the mask the left one.
      rows: number of queries that the forward pass visits at a time.
      gradient_rows, gradient_keys: numbers of queries and keys that the backward pass visits at a
        time.
      below: left bound of the window, `i - below <= j`; None: no bound.
    """

    settings: Settings
    rows: int
    gradient_rows: int
    gradient_keys: int
    below: int | None


class Masks(NamedTuple):
    """The conditions that, with a left bound, become `Problem.bits`: a mask function, and a dense
    mask `b n t s`, each axis full or 1 (None: no dense mask)."""

    mod: Mod
    array: jax.Array | None


def attend(
    settings: Settings, query: Any, key: Any, value: Any, conditions: Conditions
) -> tuple[jax.Array, jax.Array]:
    """Output `B T N h` and lse `B N T`, which is -inf on fully masked rows.

    Query is `B T N H`, key `B S K H`, value `B S K h`, and no size is 0. `settings` has the static
    bounds of `conditions`; `conditions.mod` is not None.
    """
    assert conditions.mod is not None
    masks = Masks(conditions.mod, conditions.array)
    above: Any = conditions.above
    if settings.above < FAR:
        above = jnp.asarray(settings.above, np.int32).reshape(1)
        if conditions.above is not None:
            above = jnp.minimum(above, conditions.above)
    below = None if settings.below == FAR else settings.below
    settings = settings._replace(below=FAR, above=FAR)
    rest = conditions._replace(window=(None, None), array=None, mod=None, above=above)
    problem = operands.problem(query, key, value, None, rest)
    problem, masks = varying.alike((problem, masks))
    return core(Config(settings, *_sizes(problem, masks), below), problem, masks)


def _sizes(problem: Problem, masks: Masks) -> tuple[int, int, int]:
    """How many queries the forward pass visits at a time, and how many queries and keys the backward
    pass: `rows`, `gradient_rows` and `gradient_keys` of `Config`. A pass visits all of them at once
    if it evaluates the mask as a whole."""
    (B, T, N, H), (S, K, h) = problem.query.shape, problem.value.shape[1:]
    uses = masks.mod.program.uses
    matrices = (B if "b" in uses else 1) * (N if "n" in uses else 1)
    if masks.array is not None:
        matrices = max(matrices, masks.array.shape[0] * masks.array.shape[1])
    item, per_pair = problem.query.dtype.itemsize, matrices / 8
    results = item * B * T * N * h
    rows = T
    if not _is_few(T * S * per_pair, results):
        per_row = S * per_pair + 4 * B * N * (H + h)
        rows = _evenly(T, max(MASK_BYTES, PARTS * results) / per_row, _grain(masks, "i"))
    results = item * B * (T * N * (H + 2 * h) + S * K * (H + h))
    if _is_few(T * S * per_pair, results):
        return rows, T, S
    most = max(MASK_BYTES, PARTS * results)
    # Bytes per key, in float32: key and value, their gradients, and what a step adds to these.
    per_key = 4 * B * K * 3 * (H + h)
    parts = max(1, S // max(LEAST_KEYS, int(most / 2 / per_key)))
    keys, grain = S // parts, _grain(masks, "j")
    if parts > 1 and keys - keys % grain >= LEAST_KEYS:
        keys -= keys % grain
    rest = max(most - keys * per_key, most / 2) if parts > 1 else most
    per_row = keys * per_pair + 4 * B * N * (3 * H + 2 * h)
    return rows, _evenly(T, rest / per_row, _grain(masks, "i")), keys


def _is_few(mask_bytes: float, results: int) -> bool:
    return mask_bytes <= max(MASK_BYTES, WHOLE * results)


def _grain(masks: Masks, letter: str) -> int:
    """The least common multiple of 64 and the size of the blocks of queries or keys within which the
    mask function is constant: ranges of such sizes split neither these blocks nor those that kernels
    skip, of 64 queries and 32 keys. `letter`: i for queries, j for keys."""
    return math.lcm(64, masks.mod.program.grain(letter))


def _evenly(size: int, most: float, grain: int) -> int:
    """The number of queries, out of `size`, to visit at a time, so that all visits have similar numbers:
    `size`, or a multiple of `grain` (of 64 if `grain` exceeds `most`), of about `most` or fewer."""
    grain = grain if grain <= most else 64
    parts = -(-size // max(grain, int(most)))
    return min(size, -(-size // (parts * grain)) * grain)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def core(config: Config, problem: Problem, masks: Masks) -> tuple[jax.Array, jax.Array]:
    """Output `B T N h` and lse `B N T`. `problem` has no bias and no dense mask, neither `allowed` nor
    `bits`: `masks` has it."""
    out, *row = _attend(config, problem, masks)
    return out, operands.lse(config.settings, problem, *row)


def _forward(config: Config, problem: Problem, masks: Masks) -> Any:
    parts = _in_parts(config, problem)
    settings = config.settings._replace(out=np.dtype(np.float32), gradient=True, in_parts=parts)
    out, *row = _attend(config._replace(settings=settings), problem, masks)
    out = checkpoint_name(out, "attention_out")  # type: ignore[no-untyped-call]
    row = [checkpoint_name(x, "attention_lse") for x in row]  # type: ignore[no-untyped-call]
    lse = operands.lse(config.settings, problem, *row)
    return (out.astype(config.settings.out), lse), (problem, masks, out, row)


def _backward(config: Config, saved: Any, cotangents: Any) -> Any:
    problem, masks, out, row = saved
    heads = _attend_backward(config, problem, masks, Residuals(*row, *cotangents), out)
    none: Any = None
    return Problem(*heads, *[none] * (len(problem) - 3)), none


core.defvjp(_forward, _backward)


class _Span(NamedTuple):
    """A range of queries or keys, of a static size; `start`, which may be traced, is a multiple of
    `aligned`."""

    start: Index
    size: int
    aligned: int

    def of(self, x: jax.Array, axis: int) -> jax.Array:
        """The entries of `x` within this range of `axis`; an absent operand stays absent."""
        if not x.size or x.shape[axis] == self.size:
            return x
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.size, axis)

    def put(self, whole: jax.Array, part: jax.Array, axis: int) -> jax.Array:
        """`whole` with this range of `axis` overwritten by `part`."""
        if part.shape == whole.shape:
            return part
        return jax.lax.dynamic_update_slice_in_dim(whole, part, self.start, axis)


def _fold(
    size: int, each: int, visit: Callable[[_Span, Arrays], Arrays], carry: Arrays, *, least: int = 1
) -> Arrays:
    """Computes `carry = visit(span, carry)` for consecutive spans of `each` positions, which cover an
    axis of `size` positions, and returns the last carry. The last span has the remaining positions;
    if they are fewer than `least`, they join the span before."""
    whole, rest = divmod(size, each)
    if 0 < rest < least:
        whole, rest = whole - 1, rest + each
    if whole == 1:
        carry = visit(_Span(0, each, each), carry)
    elif whole:

        def step(n: jax.Array, carry: Arrays) -> Arrays:
            return visit(_Span(n * np.int32(each), each, each), carry)

        carry = jax.lax.fori_loop(np.int32(0), np.int32(whole), step, carry)
    return visit(_Span(whole * each, rest, each), carry) if rest else carry


def _part(config: Config, problem: Problem, masks: Masks, rows: _Span, keys: _Span) -> Problem:
    """The operands of a kernel for the queries in `rows` and the keys in `keys`, with the bits of
    their mask and with causal offsets between positions within these ranges."""
    offset = problem.offset
    return problem._replace(
        query=rows.of(problem.query, 1),
        key=keys.of(problem.key, 1),
        value=keys.of(problem.value, 1),
        bits=_bits(config, problem, masks, rows, keys),
        rows=rows.of(problem.rows, 1),
        keys=keys.of(problem.keys, 1),
        query_ids=rows.of(problem.query_ids, 1),
        key_ids=keys.of(problem.key_ids, 1),
        offset=offset + np.int32(1) * (rows.start - keys.start) if offset.size else offset,
    )


def _bits(
    config: Config, problem: Problem, masks: Masks, rows: _Span, keys: _Span
) -> UInt8[jax.Array, "b n t8 s"]:
    """`Problem.bits` of the queries in `rows` and the keys in `keys`: the pairs that the mask function,
    the dense mask and the left bound allow, eight queries in a byte."""
    B, T, N, _ = problem.query.shape
    S, lines = problem.key.shape[1], -(-rows.size // 8)
    position = TilePosition(
        0, B, 0, N, rows.start, 8 * lines, keys.start, keys.size, T, S,
        aligned=(rows.aligned, keys.aligned),
    )  # fmt: skip
    conditions = NO_CONDITIONS._replace(window=(config.below, None), mod=masks.mod)
    mask = allowed(conditions, position)
    assert mask is not None
    if masks.array is not None:
        array = masks.array
        if array.shape[2] != 1:
            array = rows.of(array, 2)
            more = 8 * lines - rows.size
            array = jnp.pad(array, ((0, 0), (0, 0), (0, more), (0, 0)))
        mask &= keys.of(array, 3) if array.shape[3] != 1 else array
    alone = masks.array is None and config.below is None
    if alone and block_within(masks.mod, position.extent, "i") % 8 == 0:
        return _shared_by_lines(mask, lines, keys.size) * np.uint8(255)
    mask = jnp.broadcast_to(mask, (*mask.shape[:2], 8 * lines, keys.size))
    mask = mask.reshape(*mask.shape[:2], lines, 8, keys.size)
    bits = mask.astype(np.uint8) << jnp.arange(8, dtype=np.uint8).reshape(1, 1, 1, 8, 1)
    # XLA fuses the evaluation with this reduction, so that memory holds only the bits.
    packed: jax.Array = jax.lax.reduce(bits, np.uint8(0), jax.lax.bitwise_or, (3,))
    return packed


def _shared_by_lines(
    mask: Bool[jax.Array, "b n T s"], lines: int, keys: int
) -> UInt8[jax.Array, "b n t8 s"]:
    """`mask` at the first of every eight queries, as 0 or 1, for masks that are equal for all eight.
    `lines`, `keys`: sizes of the result; `mask` may have size 1 on axes of other size there."""
    b, n = mask.shape[:2]
    first = mask[:, :, ::8] if mask.shape[2] > 1 else mask
    return jnp.broadcast_to(first, (b, n, lines, keys)).astype(np.uint8)


def _whole(size: int) -> _Span:
    return _Span(0, size, size)


def _attend(config: Config, problem: Problem, masks: Masks) -> Arrays:
    """Output `B T N h` in `config.settings.out`, and row max and row sum `B N T` as in `Residuals`."""
    (B, T, N, _), (S, _, h) = problem.query.shape, problem.value.shape[1:]
    shapes = ((B, T, N, h), config.settings.out), *[((B, N, T), np.float32)] * 2

    def visit(rows: _Span, results: Arrays) -> Arrays:
        part = _part(config, problem, masks, rows, _whole(S))
        part = _widened(part) if config.settings.in_parts else part
        found = primitives.attend(config.settings, part)
        return tuple(map(rows.put, results, found, (1, 2, 2)))

    return _fold(T, config.rows, visit, _zeros(problem.query, shapes))


def _zeros(like: jax.Array, shapes: Sequence[tuple[tuple[int, ...], Any]]) -> Arrays:
    return tuple(jnp.zeros_like(like, dtype, shape=shape) for shape, dtype in shapes)


def _in_parts(config: Config, problem: Problem) -> bool:
    """True if the forward or the backward pass visits only some queries or keys at a time.

    If there is a gradient, operands of both passes are then float32: gradients of several visits
    are summed in float32, and both passes must sum logits alike.
    """
    T, S = problem.query.shape[1], problem.key.shape[1]
    return (config.rows, config.gradient_rows, config.gradient_keys) != (T, T, S)


def _widened(part: Problem) -> Problem:
    query, key, value = (x.astype(np.float32) for x in part[:3])
    return part._replace(query=query, key=key, value=value)


def _attend_backward(
    config: Config, problem: Problem, masks: Masks, residuals: Residuals, out: jax.Array
) -> list[jax.Array]:
    """Gradients of query, key and value, in their dtypes; several visits are summed in float32.
    `out`: the output in float32."""
    T, S = problem.query.shape[1], problem.key.shape[1]
    parts = _in_parts(config, problem)
    settings = config.settings._replace(in_parts=parts)
    dtypes = [np.dtype(np.float32) if parts else x.dtype for x in problem[:3]]

    def visit_keys(keys: _Span, gradients: Arrays) -> Arrays:
        of_keys = [((x.shape[0], keys.size, *x.shape[2:]), x.dtype) for x in gradients[1:]]

        def visit_rows(rows: _Span, before: Arrays) -> Arrays:
            part = _part(config, problem, masks, rows, keys)
            *of_rows, out_of_rows = map(rows.of, (*residuals, out), (2, 2, 1, 2, 1))
            operands = _widened(part) if parts else part
            found = primitives.attend_backward(settings, operands, Residuals(*of_rows), out_of_rows)
            if not parts:
                return tuple(found[:3])
            d_query = rows.put(before[0], rows.of(before[0], 1) + found[0], 1)
            return d_query, before[1] + found[1], before[2] + found[2]

        start = gradients[0], *_zeros(problem.query, of_keys)
        d_query, *others = _fold(T, config.gradient_rows, visit_rows, start)
        return d_query, *(
            keys.put(x, part, 1) for x, part in zip(gradients[1:], others, strict=True)
        )

    shapes = [(x.shape, dtype) for x, dtype in zip(problem[:3], dtypes, strict=True)]
    start = _zeros(problem.query, shapes)
    found = _fold(S, config.gradient_keys, visit_keys, start, least=config.gradient_keys)
    return [x.astype(y.dtype) for x, y in zip(found, problem[:3], strict=True)]
