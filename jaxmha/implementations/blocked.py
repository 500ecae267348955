"""Attention block by block: time and memory of a fused kernel, in plain XLA.

Scores exist for one block at a time; blocks that conditions rule out are never computed, and where
a block has none but allowed pairs no condition is looked at. The gradient recomputes scores from
the log-sum-exp. Source: Dao et al., "FlashAttention" (2022), and Rabe and Staats, "Self-attention
does not need O(n^2) memory" (2021).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmha import sharding
from jaxmha.implementations import bands, blocks, empty_rows, one_block, pairs, reach, tiles
from jaxmha.implementations.blocked_dropout import kept, words_of
from jaxmha.implementations.blocks import Plan
from jaxmha.implementations.one_block import Rules, Running
from jaxmha.implementations.pairs import NOTHING, Pairs, Place
from jaxmha.implementations.request import Request, Result, accumulation_dtype

# Sizes of blocks, for those who know better than the rule: `target`, `least_rows`, `side` of
# blocks.plan.
SIZES: dict[str, int] = {}


def supports(request: Request) -> str | None:
    """None, or why not."""
    semantics = request.semantics
    shapes = (*request.query.shape, *request.key.shape, *request.value.shape)
    if not all(isinstance(size, int) for size in shapes):
        return "sizes must be known"
    if request.return_weights:
        return "weights are never materialised: return_weights must be False"
    accumulate = accumulation_dtype(request.query.dtype)
    if (semantics.softmax_dtype or accumulate) != accumulate:
        return f"softmax is in {accumulate}: softmax_dtype must be None"
    if semantics.fully_masked == "mean" and _drops(request):
        return "the mean of fully masked rows has no dropout"
    return None


def cut(query: jax.Array, key: jax.Array, *, skips: bool = False, fused: bool = False) -> Plan:
    """The cut of queries `B N T H` and keys `B K S H`, as `blocks.plan` has it."""
    (B, N, T, _), (K, S) = query.shape, key.shape[1:3]
    return blocks.plan(
        B, K, N // K, T, S, skips=skips, fused=fused, itemsize=query.dtype.itemsize,
        platform=jax.default_backend(), **SIZES,
    )  # fmt: skip


def _drops(request: Request) -> bool:
    return request.dropout_key is not None and request.semantics.dropout_rate > 0


def attend(request: Request, spread: Callable[..., Any] | None = None) -> Result:
    """Computes the request; intermediates are float32, or float64 for float64 inputs.

    `spread`: what computes `core` on many devices.
    """
    semantics = request.semantics
    (B, T, N, H), (_, S, K, h) = request.query.shape, request.value.shape
    accumulate = accumulation_dtype(request.query.dtype)
    query, key, value = (jnp.moveaxis(x.astype(accumulate), 2, 1) for x in request[:3])
    scale = H**-0.5 if semantics.scale is None else semantics.scale
    query *= scale
    out: jax.Array
    lse: jax.Array | None
    if 0 in (B, T, S):
        out, lse = jnp.zeros((B, N, T, h), accumulate), jnp.full((B, N, T), -jnp.inf, accumulate)
    else:
        conditions = pairs.of_mask(request.mask, T, S)
        plain = request.mask.empty and request.bias is None and not _drops(request)
        plan = cut(query, key, skips=not request.mask.empty, fused=plain)
        bias = None if request.bias is None else request.bias.astype(accumulate)
        live = pairs.live(conditions, bias, B, N, T, S)
        rows, keys = (sharding.in_order(x, 2) for x in live)
        if rows is not None:
            query = jnp.where(rows[..., None], query, 0.0)
        if keys is not None:
            keys = _per_key_head(keys, K)
            key, value = (jnp.where(keys[..., None], x, 0.0) for x in (key, value))
        static = conditions.above if isinstance(conditions.above, int) else None
        rules = Rules(
            semantics.logits_soft_cap,
            semantics.precision,
            conditions.window,
            static,
            semantics.dropout_rate if _drops(request) else 0.0,
            semantics.dropout_broadcast,
            request.return_lse or semantics.fully_masked != "zero",
            None if request.part is None else (request.part.N, request.part.T),
        )
        traced = conditions._replace(
            window=(None, None), above=None if static is not None else conditions.above
        )
        words = words_of(request.dropout_key if _drops(request) else None, request.part)
        out, lse = (spread or core)(plan, rules, query, key, value, bias, traced, words)
        there = sharding.in_order(conditions.rows, 1)
        if there is not None:
            out = jnp.where(there[:, None, :, None], out, 0.0)
            lse = None if lse is None else jnp.where(there[:, None, :], lse, -jnp.inf)
    out = jnp.moveaxis(out, 1, 2)
    if semantics.fully_masked != "zero":
        assert lse is not None
        out = empty_rows.answer(request, out, jnp.swapaxes(lse == -jnp.inf, 1, 2))
    return Result(out.astype(request.query.dtype), None, lse)


def _per_key_head(live: jax.Array, K: int) -> jax.Array:
    """Of `b n S`, whether any query head of a key head looks there: `b k S`."""
    b, n, S = live.shape
    return live if n == 1 else live.reshape(b, K, n // K, S).any(2)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def core(
    plan: Plan,
    rules: Rules,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    traced: Pairs,
    words: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Output `B N T h`, 0 on empty rows, and lse `B N T`, -inf there, or None by `rules.lse`.

    Args:
      plan: the cut.
      rules: what is static.
      query: `B N T H`, scaled. key: `B K S H`. value: `B K S h`.
      bias: `b n t s`.
      traced: the conditions that are arrays.
      words: of the threefry key of dropout.
    """
    heads = query, key, value

    def run(rules: Rules, query: Any, key: Any, value: Any, words: Any) -> Any:
        fused = rules.above is None and words is None
        part = cut(query, key, fused=fused)
        return blockwise(part, rules, query, key, value, None, NOTHING, words)

    kind = bands.kind(plan, rules, traced, bias)
    if kind == "rows":
        return bands.of_rows(run, plan, rules, *heads, words)
    if kind == "keys":
        assert traced.keys is not None
        return bands.of_keys(run, plan, rules, *heads, traced.keys, words)
    return blockwise(plan, rules, *heads, bias, traced, words)


def blockwise(
    plan: Plan,
    rules: Rules,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    traced: Pairs,
    words: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    conditions, bias = _conditions(plan, rules, traced, bias)
    reached = reach.table(conditions, plan)

    def step(index: Any, x: tuple[jax.Array, ...]) -> Any:
        rows_of_all, keys, values = x
        keys = jnp.swapaxes(keys, -1, -2)

        def block(i: Any, rows: jax.Array) -> Any:
            def visit(j: jax.Array | int, clear: bool, carry: Running | None) -> Running:
                place = _place(plan, index, i, j)
                added, keep = _beside(
                    plan, rules, NOTHING if clear else conditions, bias, words, place, rows.dtype
                )
                seen, weighed = (tiles.part(plan, x, j) for x in (keys, values))
                return one_block.forward(rules, rows, seen, weighed, added, keep, carry)

            start = None if plan.chunks == 1 else one_block.nothing_yet(rows, values.shape[-1])
            out, highest, total = reach.visit_all(reached, plan, index, i, visit, start)
            divisor = jnp.maximum(total, 1.0)  # the highest logit alone gives 1
            out /= divisor if words is None else divisor * (1 - rules.dropout_rate)
            # A second answer would keep XLA from making one kernel of small blocks.
            return out, (highest + jnp.log(total))[..., 0] if rules.lse else None

        return tiles.each(block, plan.blocks, rows_of_all)

    parts = tiles.tiles(plan, query), tiles.chunks(plan, key), tiles.chunks(plan, value)
    out, lse = tiles.each(step, plan.steps, parts)
    out = tiles.rows(plan, out)
    return out, tiles.rows(plan, lse[..., None])[..., 0] if rules.lse else None


def core_forward(
    plan: Plan, rules: Rules, *arguments: Any
) -> tuple[tuple[jax.Array, jax.Array | None], Any]:
    out, lse = core(plan, rules._replace(lse=True), *arguments)
    out = checkpoint_name(out, "attention_out")  # type: ignore[no-untyped-call]
    lse = checkpoint_name(lse, "attention_lse")  # type: ignore[no-untyped-call]
    return (out, lse if rules.lse else None), (*arguments, out, lse)


def core_backward(plan: Plan, rules: Rules, saved: Any, slopes: Any) -> tuple[Any, ...]:
    """Every product of the transposed scores has row-major operands."""
    query, key, value, bias, traced, words, out, lse = saved
    plan = cut(query, key, skips=plan.chunks > 1)  # never one kernel
    slope, slope_lse = slopes
    conditions, padded = _conditions(plan, rules, traced, bias)
    reached = reach.table(conditions, plan)
    # d logit = weight * (slope @ value - slope . out + slope of lse); empty rows have weight 0.
    shift = -(slope * out).sum(-1)
    if slope_lse is not None:
        shift += slope_lse
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    dtype = query.dtype
    per_row = (
        tiles.tiles(plan, query),
        tiles.tiles(plan, slope),
        tiles.tiles(plan, lse[..., None], jnp.inf),
        tiles.tiles(plan, shift[..., None]),
    )
    per_key = tiles.chunks(plan, key), tiles.chunks(plan, value)
    bias_slope = None if padded is None else jnp.zeros(padded.shape, dtype)

    def step(bias_slope: jax.Array | None, index: Any, x: Any) -> Any:
        per_row, (keys, values) = x
        per_key = keys, values, jnp.swapaxes(keys, -1, -2)

        def block(carry: Any, i: Any, parts: Any) -> Any:
            def visit(j: jax.Array | int, clear: bool, carry: Any) -> Any:
                dq, dk, dv, bias_slope = carry
                place = _place(plan, index, i, j)
                added, keep = _beside(
                    plan, rules, NOTHING if clear else conditions, padded, words, place, dtype
                )
                seen = tuple(tiles.part(plan, x, j) for x in per_key)
                more_dq, more_dk, more_dv, d_added = one_block.backward(
                    rules, parts, seen, added, keep
                )
                if bias_slope is not None:
                    bias_slope = _add_bias_slope(plan, bias_slope, d_added, place)
                dk, dv = tiles.add(plan, dk, j, more_dk), tiles.add(plan, dv, j, more_dv)
                return dq + more_dq, dk, dv, bias_slope

            start = (jnp.zeros_like(parts[0]), *carry)
            dq, *carry = reach.visit_all(reached, plan, index, i, visit, start)
            return tuple(carry), dq

        zeros = jnp.zeros_like(keys), jnp.zeros_like(values), bias_slope
        (dk, dv, bias_slope), dq = tiles.scan(block, plan.blocks, zeros, per_row)
        return bias_slope, (dq, dk, dv)

    bias_slope, (dq, dk, dv) = tiles.scan(step, plan.steps, bias_slope, (per_row, per_key))
    if bias_slope is not None:
        bias_slope = bias_slope[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    dk, dv = (tiles.unchunked(plan, x) for x in (dk, dv))
    return tiles.rows(plan, dq), dk, dv, bias_slope, None, None


core.defvjp(core_forward, core_backward)


def _add_bias_slope(plan: Plan, total: jax.Array, d_added: jax.Array, place: Place) -> jax.Array:
    """Adds the slope of a block, summed over the axes that the bias broadcasts."""
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
    return pairs.pad(traced._replace(window=rules.window, above=above), bias, plan)


def _beside(
    plan: Plan,
    rules: Rules,
    conditions: Pairs,
    bias: jax.Array | None,
    words: jax.Array | None,
    place: Place,
    dtype: Any,
) -> tuple[jax.Array | None, jax.Array | None]:
    """What the scores of a block meet: added logits and kept weights, `[cells] rows keys`."""
    added = pairs.added(conditions, bias, place, plan.G, dtype)
    keep = kept(plan, rules.dropout_rate, rules.dropout_broadcast, rules.whole, words, place)
    return tiles.cells(plan, added), tiles.cells(plan, keep)


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
