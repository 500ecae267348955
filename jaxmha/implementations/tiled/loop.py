"""Loops over tiles: online-softmax forward pass, and gradients of query, key, value and bias."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmha.implementations.tiled import block_mask, layout, schedule, tile
from jaxmha.implementations.tiled.block_mask import NOTHING, Pairs, Place
from jaxmha.implementations.tiled.dropout import kept
from jaxmha.implementations.tiled.tile import Rules, Running, Softmax
from jaxmha.implementations.tiled.tiling import Plan

Chunk = Callable[[Any], tuple[jax.Array, jax.Array]]


def forward(
    plan: Plan,
    rules: Rules,
    parts: tuple[jax.Array, ...],
    bias: jax.Array | None,
    traced: Pairs,
    words: jax.Array | None,
    answer: Callable[[Running], Any],
    before: Running | None = None,
    read: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> Any:
    """Loops over KV tiles for every query tile, and applies `answer` to its softmax state.

    `parts`: query, key and value as tiles of `layout`. `before`: state from other keys, updated in
    place and returned instead, without `answer`. `read`: decodes a KV tile when it is visited.
    """
    conditions, bias = _conditions(plan, rules, traced, bias)
    reached = schedule.table(conditions, plan)

    def block(index: Any, i: Any, rows: jax.Array, chunk: Chunk, start: Any) -> Running:
        def visit(j: jax.Array | int, clear: bool, carry: Running | None) -> Running:
            place = _place(plan, index, i, j)
            mask_or_bias, keep = _beside(
                plan, rules, NOTHING if clear else conditions, bias, words, place, rows.dtype
            )
            return tile.forward(rules, rows, *chunk(j), mask_or_bias, keep, carry)

        seen: Running = schedule.visit_all(reached, plan, index, i, visit, start)
        return seen

    def step(index: Any, x: tuple[jax.Array, ...]) -> Any:
        rows_of_all, keys, values = x
        h = values.shape[-1]
        if rules.transposed:
            rows_of_all, values = turned((rows_of_all, values))
        else:
            keys = jnp.swapaxes(keys, -1, -2)

        def chunk(j: Any) -> tuple[jax.Array, jax.Array]:
            return layout.part(plan, keys, j), layout.part(plan, values, j)

        def of(i: Any, rows: jax.Array) -> Any:
            start = None if plan.chunks == 1 else tile.nothing_yet(rules, rows, h)
            seen = block(index, i, rows, chunk, start)
            return answer(turned(seen) if rules.transposed else seen)

        return layout.each(of, plan.blocks, rows_of_all, unroll=plan.unroll)

    def more(index: Any, before: Running, _: None, x: tuple[jax.Array, ...]) -> Any:
        rows_of_all, *per_key = x

        def chunk(j: Any) -> tuple[jax.Array, jax.Array]:
            seen, weighed = (read(layout.part(plan, x, j)) for x in per_key)
            return seen, jnp.swapaxes(weighed, -1, -2)

        def of(i: Any, seen: Running, _: None, rows: jax.Array) -> Any:
            return block(index, i, rows, chunk, seen), None

        return layout.refine(of, plan.blocks, before, None, rows_of_all)

    if before is None:
        return layout.each(step, plan.steps, parts, unroll=plan.unroll and plan.chunks == 1)
    return layout.refine(more, plan.steps, before, None, parts)[0]


def turned(arrays: Any) -> Any:
    """Swaps the last two axes of every array of a pytree."""
    return jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2), arrays)


def finished(rules: Rules, seen: Running, words: jax.Array | None) -> Softmax:
    """Normalises the softmax state: output, divided by the keep rate of dropout too, and row max
    and row sum."""
    # 1 on fully masked rows; elsewhere the largest logit alone contributes 1 to the row sum.
    divisor = jnp.maximum(seen.row_sum, 1.0)
    out = seen.out / (divisor if words is None else divisor * (1 - rules.dropout_rate))
    return Softmax(out, seen.row_max, seen.row_sum)


def rows_of_gradient(
    plan: Plan, query: Any, softmax: Softmax | None, slope: Any, slope_lse: Any
) -> tuple[Any, ...]:
    """Query tiles of the backward pass: transposed queries, output cotangent, row max, and shift.

    If `softmax` is None, each tile has all keys of its rows and computes row max, row sum and delta
    from its own logits, so that the shift is the cotangent of the lse alone. Else delta is
    subtracted from the shift, and output cotangent and shift are divided by the row sum.
    """
    # dlogit = weight * (dout @ value - delta + dlse) with delta = sum(dout * out); weight is
    # exp(logit - row max) / row sum, and 0 in fully masked rows.
    query = jnp.swapaxes(layout.tiles(plan, query), -1, -2)
    shift = jnp.zeros_like(slope[..., :1]) if slope_lse is None else slope_lse[..., None]
    slope, shift = layout.tiles(plan, slope), layout.tiles(plan, shift)
    if softmax is None:
        return query, slope, None, shift
    row_max = jnp.where(softmax.row_sum == 0, jnp.inf, softmax.row_max)
    row_max = layout.tiles(plan, row_max, jnp.inf)
    out, row_sum = layout.tiles(plan, softmax.out), layout.tiles(plan, softmax.row_sum)
    divisor = jnp.maximum(row_sum, 1.0)
    # An einsum: for a sum, XLA:CPU emits a kernel that holds all terms several times.
    shift -= jnp.einsum("...h,...h->...", slope, out, precision="highest")[..., None]
    return query, slope / divisor, row_max, shift / divisor


def backward(
    plan: Plan,
    rules: Rules,
    per_row: tuple[Any, ...],
    per_key: tuple[jax.Array, ...],
    bias: jax.Array | None,
    traced: Pairs,
    words: jax.Array | None,
    before: tuple[jax.Array, ...] | None = None,
    read: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> Any:
    """Gradients of the bias, and of query (transposed), key and value as tiles.

    `before`: gradients of query, key and value so far, accumulated in place; then there is no bias.
    `read`: as in `forward`.
    """
    conditions, bias = _conditions(plan, rules, traced, bias)
    reached = schedule.table(conditions, plan)
    dtype = per_row[0].dtype
    bias_slope = None if bias is None else jnp.zeros_like(bias, dtype)

    def block(index: Any, i: Any, parts: Any, chunk: Any, start: Any) -> Any:
        def visit(j: jax.Array | int, clear: bool, carry: Any) -> Any:
            dq, dk, dv, bias_slope = carry
            place = _place(plan, index, i, j)
            mask_or_bias, keep = _beside(
                plan, rules, NOTHING if clear else conditions, bias, words, place, dtype
            )
            more_dq, more_dk, more_dv, d_added = tile.backward(
                rules, parts, chunk(j), mask_or_bias, keep
            )
            if bias_slope is not None:
                bias_slope = _add_bias_slope(plan, bias_slope, d_added, place)
            dk, dv = layout.add(plan, dk, j, more_dk), layout.add(plan, dv, j, more_dv)
            return dq + more_dq, dk, dv, bias_slope

        dq, *carry = schedule.visit_all(reached, plan, index, i, visit, start)
        return tuple(carry), dq

    def step(index: Any, x: Any, bias_slope: jax.Array | None, per_row: Any) -> Any:
        rows, keys, values = x
        per_key = keys, values, jnp.swapaxes(keys, -1, -2)

        def chunk(j: Any) -> tuple[jax.Array, ...]:
            return tuple(layout.part(plan, x, j) for x in per_key)

        def each(i: Any, rows: jax.Array, carry: Any, others: Any) -> Any:
            start = jnp.zeros_like(rows), *carry
            carry, dq = block(index, i, (rows, *others), chunk, start)
            return dq, carry

        zeros = jnp.zeros_like(keys), jnp.zeros_like(values), bias_slope
        dq, (dk, dv, bias_slope) = layout.refine(each, plan.blocks, rows, zeros, per_row)
        return (dq, dk, dv), bias_slope

    def more(index: Any, before: Any, _: None, x: Any) -> Any:
        (dq, dk, dv), (per_row, per_key) = before, x

        def chunk(j: Any) -> tuple[jax.Array, ...]:
            keys, values = (read(layout.part(plan, x, j)) for x in per_key)
            return keys, values, jnp.swapaxes(keys, -1, -2)

        def each(i: Any, dq: jax.Array, carry: Any, parts: Any) -> Any:
            carry, dq = block(index, i, parts, chunk, (dq, *carry, None))
            return dq, carry[:2]

        dq, (dk, dv) = layout.refine(each, plan.blocks, dq, (dk, dv), per_row)
        return (dq, dk, dv), None

    if before is None:
        # Gradients reuse the buffers of their primals.
        rows, *others = per_row
        slopes, bias_slope = layout.refine(
            step, plan.steps, (rows, *per_key), bias_slope, tuple(others)
        )
        return bias_slope, slopes
    return None, layout.refine(more, plan.steps, before, None, (per_row, per_key))[0]


def _add_bias_slope(plan: Plan, total: jax.Array, d_added: jax.Array, place: Place) -> jax.Array:
    """Accumulates the bias gradient of a tile, summed over the axes that the bias broadcasts."""
    shape = (place.batches, place.heads, place.rows, place.keys)
    part = d_added.reshape(shape)
    axes = tuple(axis for axis, size in enumerate(total.shape) if size == 1)
    part = part.sum(axes, keepdims=True)
    starts = (place.b, place.n, place.t, place.s)
    first = [
        jnp.asarray(0 if size == 1 else start, jnp.int32)
        for size, start in zip(total.shape, starts, strict=True)
    ]
    before = jax.lax.dynamic_slice(total, first, part.shape)
    return jax.lax.dynamic_update_slice(total, before + part, first)


def _conditions(
    plan: Plan, rules: Rules, traced: Pairs, bias: jax.Array | None
) -> tuple[Pairs, jax.Array | None]:
    above = traced.above if rules.above is None else rules.above
    return block_mask.pad(traced._replace(window=rules.window, above=above), bias, plan)


def _beside(
    plan: Plan,
    rules: Rules,
    conditions: Pairs,
    bias: jax.Array | None,
    words: jax.Array | None,
    place: Place,
    dtype: Any,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Mask or bias tile, and dropout keep-mask, of a score tile: `[cells] rows keys`."""
    mask_or_bias = block_mask.mask_or_bias(conditions, bias, place, plan.G, dtype)
    keep = kept(plan, rules.dropout_rate, rules.dropout_broadcast, rules.whole, words, place)
    return layout.cells(plan, mask_or_bias), layout.cells(plan, keep)


def _place(plan: Plan, step: jax.Array | int, i: jax.Array | int, j: jax.Array | int) -> Place:
    return Place(
        step // plan.groups * plan.batches,
        plan.batches,
        step % plan.groups * plan.heads * plan.G,
        plan.heads * plan.G,
        i * plan.rows,
        plan.rows,
        j * plan.keys,
        plan.keys,
    )
