"""Attention with a mask function by the native kernels, which skip empty blocks of pairs.

XLA evaluates the function for many queries at a time, and stores one bit per pair.
"""

from functools import partial
from typing import Any, NamedTuple

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

# Bytes of the mask, a bit per pair, that is evaluated at a time: at least MASK_BYTES, which is not
# worth a part of its own, or a share of the bytes of the queries; in the gradient, of those of the
# gradients of keys and values, which parts would hold twice. Every call of a kernel copies the keys,
# and the parts are unrolled: a part has at least LEAST_ROWS queries, and there are at most MOST_PARTS.
MASK_BYTES = 2**21
SHARE, GRADIENT_SHARE = 1 / 16, 1.0
LEAST_ROWS = 128
MOST_PARTS = 16


class Config(NamedTuple):
    """Static config.

    Attributes:
      settings: that of the kernels, without bounds.
      rows, gradient_rows: number of queries whose mask is evaluated at a time, by the forward and
        by the backward pass.
      below: left bound of the window; None: no bound.
    """

    settings: Settings
    rows: int
    gradient_rows: int
    below: int | None


class Masks(NamedTuple):
    """The conditions of which the kernel gets a dense mask: a mask function, and perhaps another
    dense mask, each axis full or 1."""

    mod: Mod
    array: jax.Array | None


def attend(
    settings: Settings, query: Any, key: Any, value: Any, conditions: Conditions
) -> tuple[jax.Array, jax.Array]:
    """Output `B T N h` and lse `B N T`, which is -inf on fully masked rows. No size is 0.

    `settings`: with the static bounds of `conditions`, one of which is a mask function.
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
    keys_and_values = 4 * (key.size + value.size)
    rows = _rows(problem, masks, SHARE * 4 * query.size)
    gradient_rows = _rows(problem, masks, GRADIENT_SHARE * keys_and_values)
    return core(Config(settings, rows, gradient_rows, below), problem, masks)


def _rows(problem: Problem, masks: Masks, most_bytes: float) -> int:
    """The number of queries whose mask is evaluated at a time, a multiple of 64 or all: those of
    `most_bytes`, if that is not too few."""
    (B, T, N, _), S = problem.query.shape, problem.key.shape[1]
    uses = masks.mod.program.uses
    matrices = (B if "b" in uses else 1) * (N if "n" in uses else 1)
    if masks.array is not None:
        matrices = max(matrices, masks.array.shape[0] * masks.array.shape[1])
    of_bytes = int(8 * max(most_bytes, MASK_BYTES) / (S * matrices))
    rows = max(of_bytes, -(-T // MOST_PARTS), LEAST_ROWS)
    return min(-(-rows // 64) * 64, T)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def core(config: Config, problem: Problem, masks: Masks) -> tuple[jax.Array, jax.Array]:
    """Output and lse; `problem` has neither a dense mask nor a bias."""
    out, *row = _attend(config, problem, masks)
    return out, operands.lse(config.settings, problem, *row)


def _forward(config: Config, problem: Problem, masks: Masks) -> Any:
    settings = config.settings._replace(out=np.dtype(np.float32), gradient=True)
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
    """Queries from `first` to `end`, and an array that is computed before their operands."""

    first: int
    end: int
    after: jax.Array | None

    @property
    def zero(self) -> jax.Array | np.int32:
        """0, once `after` is computed: else XLA would keep the operands of all spans at once."""
        if self.after is None:
            return np.int32(0)
        x = self.after[(0,) * self.after.ndim]
        return ((x < 0) & (x > 0)).astype(np.int32)

    def of(self, x: jax.Array, axis: int) -> jax.Array:
        """The part of an operand that belongs to these queries; an absent operand stays absent."""
        start = self.zero + np.int32(self.first)
        return jax.lax.dynamic_slice_in_dim(x, start, self.end - self.first, axis) if x.size else x


def _part(config: Config, problem: Problem, masks: Masks, span: _Span) -> Problem:
    """The operands of the queries of a span, with the bits of their mask."""
    offset = problem.offset
    return problem._replace(
        query=span.of(problem.query, 1),
        bits=_bits(config, problem, masks, span),
        rows=span.of(problem.rows, 1),
        query_ids=span.of(problem.query_ids, 1),
        offset=offset + np.int32(span.first) if offset.size else offset,
    )


def _bits(
    config: Config, problem: Problem, masks: Masks, span: _Span
) -> UInt8[jax.Array, "b n t8 S"]:
    """The mask of the queries of a span, eight of them in a byte."""
    first, end, _ = span
    B, T, N, _ = problem.query.shape
    count = end - first
    S, lines = problem.key.shape[1], -(-count // 8)
    position = TilePosition(0, B, 0, N, first, 8 * lines, 0, S, T, S)
    conditions = NO_CONDITIONS._replace(window=(config.below, None), mod=masks.mod)
    mask = allowed(conditions, position)
    assert mask is not None
    if masks.array is not None:
        array = masks.array
        if array.shape[2] != 1:
            array = span.of(array, 2)
            array = jnp.pad(array, ((0, 0), (0, 0), (0, 8 * lines - count), (0, 0)))
        mask &= array
    shifts = jnp.arange(8, dtype=np.uint8) + span.zero.astype(np.uint8)
    alone = masks.array is None and config.below is None
    if alone and block_within(masks.mod, position.extent, "i") % 8 == 0:
        return _shared_by_lines(mask, lines) * (np.uint8(255) + shifts[0])
    mask = jnp.broadcast_to(mask, (*mask.shape[:2], 8 * lines, S))
    mask = mask.reshape(*mask.shape[:2], lines, 8, S)
    bits = mask.astype(np.uint8) << shifts.reshape(1, 1, 1, 8, 1)
    # Positions are static: XLA would evaluate a mask of traced ones several times as slowly. It fuses
    # the evaluation with this reduction, and stores bits alone.
    packed: jax.Array = jax.lax.reduce(bits, np.uint8(0), jax.lax.bitwise_or, (3,))
    return packed


def _shared_by_lines(mask: Bool[jax.Array, "b n T S"], lines: int) -> UInt8[jax.Array, "b n t8 S"]:
    """The mask of lines of eight queries that always have the same keys, as 0 and 1."""
    b, n, _, S = mask.shape
    first = mask[:, :, ::8] if mask.shape[2] > 1 else mask
    return jnp.broadcast_to(first, (b, n, lines, S)).astype(np.uint8)


def _attend(config: Config, problem: Problem, masks: Masks) -> list[jax.Array]:
    """Output `B T N h`, row max and row sum `B N T`."""
    whole: list[jax.Array | None] = [None] * 3
    after: jax.Array | None = None
    T, rows = problem.query.shape[1], config.rows
    for first in range(0, T, rows):
        span = _Span(first, min(first + rows, T), after)
        part = primitives.attend(config.settings, _part(config, problem, masks, span))
        after = part[1]
        results = zip(whole, part, (1, 2, 2), strict=True)
        whole = [_placed(x, more, axis, span, T) for x, more, axis in results]
    return [x for x in whole if x is not None]


def _placed(whole: jax.Array | None, part: jax.Array, axis: int, span: _Span, T: int) -> jax.Array:
    """`whole`, in place, with the results of the queries of a span; None: it is not made yet."""
    if part.shape[axis] == T:
        return part
    if whole is None:
        whole = jnp.zeros((*part.shape[:axis], T, *part.shape[axis + 1 :]), part.dtype)
        # The barrier keeps XLA from turning the update into a padded copy.
        whole = jax.lax.optimization_barrier(whole)  # type: ignore[no-untyped-call]
    return jax.lax.dynamic_update_slice_in_dim(whole, part, span.first, axis)


def _attend_backward(
    config: Config, problem: Problem, masks: Masks, residuals: Residuals, out: jax.Array
) -> list[jax.Array]:
    """Gradients of query, key and value; sums over parts are float32."""
    T, rows = problem.query.shape[1], config.gradient_rows
    dtypes = [x.dtype for x in problem[:3]]
    if rows < T:
        query, key, value = (x.astype(np.float32) for x in problem[:3])
        problem = problem._replace(query=query, key=key, value=value)
    d_query: jax.Array | None = None
    d_key: jax.Array | None = None
    d_value: jax.Array | None = None
    for first in range(0, T, rows):
        span = _Span(first, min(first + rows, T), d_key)
        part = _part(config, problem, masks, span)
        axes = zip((*residuals, out), (2, 2, 1, 2, 1), strict=True)
        *of_part, out_of_part = (span.of(x, axis) for x, axis in axes)
        of_queries, more_key, more_value, _ = primitives.attend_backward(
            config.settings, part, Residuals(*of_part), out_of_part
        )
        d_query = _placed(d_query, of_queries, 1, span, T)
        d_key = more_key if d_key is None else d_key + more_key
        d_value = more_value if d_value is None else d_value + more_value
    found = zip((d_query, d_key, d_value), dtypes, strict=True)
    return [x.astype(dtype) for x, dtype in found if x is not None]
