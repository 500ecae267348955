"""Attention block by block: time and memory of a fused kernel, in plain XLA.

Scores exist for one block at a time; blocks that structure rules out are never computed. The
gradient recomputes them from the log-sum-exp. Source: Dao et al., "FlashAttention" (2022), and
Rabe and Staats, "Self-attention does not need O(n^2) memory" (2021), with whole rows per block,
so that no row is ever rescaled.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxmha import dropout
from jaxmha.implementations import blocks, pairs, tiles
from jaxmha.implementations.blocked_dropout import kept
from jaxmha.implementations.blocks import Band, Plan
from jaxmha.implementations.pairs import Pairs, Place
from jaxmha.implementations.request import Request, Result, accumulation_dtype
from jaxmha.products import matmul, pairwise_sum

LOWEST = {name: float(np.finfo(name).min) for name in ("float32", "float64")}
# Sizes of blocks, for those who know better than the rule: `target`, `least_rows` of blocks.plan.
SIZES: dict[str, int] = {}


class Rules(NamedTuple):
    """What is static beside the cut."""

    soft_cap: float | None
    precision: Any
    window: tuple[int | None, int | None]
    above: int | None
    dropout_rate: float
    dropout_broadcast: tuple[str, ...]


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


def _drops(request: Request) -> bool:
    return request.dropout_key is not None and request.semantics.dropout_rate > 0


def attend(request: Request) -> Result:
    """Computes the request; intermediates are float32, or float64 for float64 inputs."""
    semantics = request.semantics
    (B, T, N, H), (_, S, K, h) = request.query.shape, request.value.shape
    accumulate = accumulation_dtype(request.query.dtype)
    query, key, value = (jnp.moveaxis(x.astype(accumulate), 2, 1) for x in request[:3])
    scale = H**-0.5 if semantics.scale is None else semantics.scale
    query *= scale
    values, there = value, None
    if 0 in (B, T, S):
        out, lse = jnp.zeros((B, N, T, h), accumulate), jnp.full((B, N, T), -jnp.inf, accumulate)
    else:
        conditions = pairs.of_mask(request.mask, T, S)
        below, above = pairs.bounds(conditions)
        plan = blocks.plan(
            B, K, N // K, T, S, below=below, above=above, itemsize=accumulate.itemsize,
            platform=jax.default_backend(), **SIZES,
        )  # fmt: skip
        bias = None if request.bias is None else request.bias.astype(accumulate)
        rows, keys = pairs.live(conditions, bias, plan)
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
        )
        traced = conditions._replace(
            window=(None, None), above=None if static is not None else conditions.above
        )
        words = None
        if request.dropout_key is not None and _drops(request):
            words = jax.random.key_data(dropout.threefry(request.dropout_key))
        out, lse = core(plan, rules, query, key, value, bias, traced, words)
        there = conditions.rows
        if there is not None:
            out = jnp.where(there[:, None, :, None], out, 0.0)
            lse = jnp.where(there[:, None, :], lse, -jnp.inf)
    empty = (lse == -jnp.inf)[..., None]
    lengths = request.mask.query_lengths
    if lengths is not None:  # rows beyond are 0 whatever the policy
        positions = jnp.arange(T).reshape(1, T)
        within = positions < jnp.asarray(lengths).astype(positions.dtype).reshape(-1, 1)
        empty &= within[:, None, :, None]
    if semantics.fully_masked == "mean" and S:
        mean = jnp.repeat(values.mean(2, keepdims=True), N // K, 1)
        out = jnp.where(empty, mean, out)
    if semantics.fully_masked == "nan":  # last, so that no gradient meets a NaN
        out = jnp.where(empty, jnp.nan, out)
    return Result(jnp.moveaxis(out, 1, 2).astype(request.query.dtype), None, lse)


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
) -> tuple[jax.Array, jax.Array]:
    """Output `B N T h`, 0 on empty rows, and lse `B N T`, -inf there.

    Args:
      plan: the cut.
      rules: what is static.
      query: `B N T H`, scaled. key: `B K S H`. value: `B K S h`.
      bias: `b n t s`.
      traced: the conditions that are arrays.
      words: of the threefry key of dropout.
    """
    conditions, bias = _conditions(plan, rules, traced, bias)
    per_key = jnp.swapaxes(tiles.cells(plan, key), 2, 3), tiles.cells(plan, value)

    def step(x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        index, rows_of_all, keys, values = x
        outs, lses = [], []
        for band in plan.bands:

            def block(y: tuple[jax.Array, jax.Array], band: Band = band) -> Any:
                i, rows = y
                place = _place(plan, band, index, i)
                seen = keys[..., band.low : band.high], values[:, band.low : band.high]
                more = pairs.added(conditions, bias, place, plan.G, rows.dtype)
                keep = kept(plan, *rules[-2:], words, place)
                return _forward_block(rules, rows, *seen, more, keep)

            parts = rows_of_all[band.first : band.stop]
            if band.low == band.high:
                shape = parts.shape[:-1]
                outs.append(jnp.zeros((*shape, values.shape[-1]), parts.dtype))
                lses.append(jnp.full(shape, -jnp.inf, parts.dtype))
                continue
            out, lse = tiles.each(block, (jnp.arange(band.first, band.stop), parts))
            outs.append(out)
            lses.append(lse)
        return tiles.joined(outs), tiles.joined(lses)

    steps = jnp.arange(plan.steps)
    out, lse = tiles.each(step, (steps, tiles.tiles(plan, query), *per_key))
    return tiles.rows(plan, out), tiles.rows(plan, lse[..., None])[..., 0]


def _forward_block(
    rules: Rules,
    rows: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    more: jax.Array | None,
    keep: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """One block: rows `c r H`, keys `c H s`, values `c s h`."""
    logits = matmul(rows, keys, precision=rules.precision)
    if rules.soft_cap is not None:
        logits = rules.soft_cap * jnp.tanh(logits / rules.soft_cap)
    if more is not None:
        logits += more
    # A row without keys has maximum -inf, and -inf - -inf is NaN.
    highest = jnp.maximum(logits.max(-1, keepdims=True), LOWEST[logits.dtype.name])
    exps = jnp.exp(logits - highest)
    total = _sum(exps)
    if keep is not None:
        exps = jnp.where(keep, exps, 0.0)
        total_out = total * (1 - rules.dropout_rate)
    else:
        total_out = total
    out = matmul(exps, values, precision=rules.precision)
    out /= jnp.where(total == 0, 1.0, total_out)
    return out, (highest + jnp.log(total))[..., 0]


def _sum(exps: jax.Array) -> jax.Array:
    """Pairwise while the block is small, as products are."""
    if exps.size <= SMALL_SUM:
        return pairwise_sum(exps)
    return exps.sum(-1, keepdims=True)


SMALL_SUM = 2**14


def _core_forward(
    plan: Plan, rules: Rules, *arguments: Any
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    out, lse = core(plan, rules, *arguments)
    out = checkpoint_name(out, "attention_out")  # type: ignore[no-untyped-call]
    lse = checkpoint_name(lse, "attention_lse")  # type: ignore[no-untyped-call]
    return (out, lse), (*arguments, out, lse)


def _core_backward(plan: Plan, rules: Rules, saved: Any, slopes: Any) -> tuple[Any, ...]:
    """Every product of the transposed scores has row-major operands."""
    query, key, value, bias, traced, words, out, lse = saved
    slope, slope_lse = slopes
    conditions, padded = _conditions(plan, rules, traced, bias)
    # d logit = weight * (slope @ value - slope . out + slope of lse); empty rows have weight 0.
    shift = slope_lse - (slope * out).sum(-1)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    dtype = query.dtype
    keys, values = tiles.cells(plan, key), tiles.cells(plan, value)
    flipped = jnp.swapaxes(keys, 2, 3)
    per_row = (
        tiles.tiles(plan, query),
        tiles.tiles(plan, slope),
        tiles.tiles(plan, lse[..., None], jnp.inf),
        tiles.tiles(plan, shift[..., None]),
    )
    bias_slope = None if padded is None else jnp.zeros(padded.shape, dtype)

    def step(bias_slope: jax.Array | None, x: Any) -> Any:
        index, per_row, keys, flipped, values = x
        key_slope, value_slope = jnp.zeros_like(keys), jnp.zeros_like(values)
        query_slopes = []
        for band in plan.bands:
            span = slice(band.low, band.high)
            seen = keys[:, span], flipped[..., span], values[:, span]

            def block(carry: Any, y: Any, band: Band = band, seen: Any = seen) -> Any:
                i, parts = y
                dk, dv, db = carry
                place = _place(plan, band, index, i)
                more = pairs.added(conditions, padded, place, plan.G, dtype)
                keep = kept(plan, *rules[-2:], words, place)
                dq, more_dk, more_dv, d_added = _backward_block(rules, parts, seen, more, keep)
                if db is not None:
                    db = _add_bias_slope(plan, db, d_added, place)
                return (dk + more_dk, dv + more_dv, db), dq

            parts = tuple(x[band.first : band.stop] for x in per_row)
            if band.low == band.high:
                query_slopes.append(jnp.zeros_like(parts[0]))
                continue
            zero = jnp.zeros_like(seen[0]), jnp.zeros_like(seen[2]), bias_slope
            indices = jnp.arange(band.first, band.stop)
            (dk, dv, bias_slope), dq = tiles.scan(block, zero, (indices, parts))
            query_slopes.append(dq)
            key_slope, value_slope = (
                y if x.shape == y.shape and len(plan.bands) == 1 else x.at[:, span].add(y)
                for x, y in ((key_slope, dk), (value_slope, dv))
            )
        return bias_slope, (tiles.joined(query_slopes), key_slope, value_slope)

    steps = jnp.arange(plan.steps)
    bias_slope, (dq, dk, dv) = tiles.scan(step, bias_slope, (steps, per_row, keys, flipped, values))
    if bias_slope is not None:
        bias_slope = bias_slope[:, :, : bias.shape[2]].astype(bias.dtype)
    dk, dv = dk.reshape(key.shape), dv.reshape(value.shape)
    return tiles.rows(plan, dq), dk, dv, bias_slope, None, None


core.defvjp(_core_forward, _core_backward)


def _backward_block(
    rules: Rules,
    per_row: tuple[jax.Array, ...],
    per_key: tuple[jax.Array, ...],
    more: jax.Array | None,
    keep: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Slopes of rows, keys, values and added logits; scores are `c s r` in here."""
    rows, slope, lse, shift = per_row
    keys, flipped, values = per_key
    product = partial(matmul, precision=rules.precision)
    logits = product(keys, jnp.swapaxes(rows, 1, 2))
    bent = None
    if rules.soft_cap is not None:
        bent = jnp.tanh(logits / rules.soft_cap)
        logits = rules.soft_cap * bent
    if more is not None:
        logits += jnp.swapaxes(more, 1, 2)
    weights = jnp.exp(logits - jnp.swapaxes(lse, 1, 2))
    slopes = product(values, jnp.swapaxes(slope, 1, 2))
    dropped = weights
    if keep is not None:
        factor = jnp.where(jnp.swapaxes(keep, 1, 2), 1 / (1 - rules.dropout_rate), 0.0)
        factor = factor.astype(rows.dtype)
        dropped, slopes = weights * factor, slopes * factor
    value_slope = product(dropped, slope)
    d_added = weights * (slopes + jnp.swapaxes(shift, 1, 2))
    d_logits = d_added if bent is None else d_added * (1 - bent * bent)
    key_slope = product(d_logits, rows)
    row_slope = jnp.swapaxes(product(flipped, d_logits), 1, 2)
    return row_slope, key_slope, value_slope, jnp.swapaxes(d_added, 1, 2)


def _add_bias_slope(plan: Plan, total: jax.Array, d_added: jax.Array, place: Place) -> jax.Array:
    """Adds the slope of a block, summed over the axes that the bias broadcasts."""
    shape = (place.batches, place.heads, place.rows, place.high - place.low)
    part = d_added.reshape(shape)
    axes = tuple(axis for axis, size in enumerate(total.shape) if size == 1)
    part = part.sum(axes, keepdims=True)
    starts = (place.b, place.n, place.t, place.low)
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


def _place(plan: Plan, band: Band, step: jax.Array, i: jax.Array) -> Place:
    groups = plan.K // plan.heads
    return Place(
        step // groups * plan.batches,
        plan.batches,
        step % groups * plan.heads * plan.G,
        plan.heads * plan.G,
        i * plan.rows,
        plan.rows,
        band.low,
        band.high,
    )
