"""Tiled attention with online softmax: time and memory of a fused kernel, in plain XLA.

Scores are materialised one tile at a time; fully masked tiles are skipped, and unmasked tiles need
no mask. The backward pass recomputes weights from row max and row sum, since the lse of large
logits holds fewer digits than a weight. If a tile has all keys of its rows, row max, row sum and
delta are computed from the recomputed logits, so that gradients of logits cancel exactly. Else row
max and row sum are those of the forward pass, which computes the logits by matmuls of the same
operands and tiles, so that they round alike: exp magnifies a difference of logits. Delta is then
the row sum of out * dout, and gradients of logits cancel up to the rounding of both. Source: Dao et
al., "FlashAttention" (2022), and Rabe and Staats, "Self-attention does not need O(n^2) memory"
(2021).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxmha import sharding
from jaxmha.implementations import fully_masked, platforms, shard_map
from jaxmha.implementations.base import Request, Result, accumulation_dtype
from jaxmha.implementations.tiled import bands, block_mask, layout, tiling
from jaxmha.implementations.tiled.block_mask import NOTHING, Pairs
from jaxmha.implementations.tiled.dropout import words_of
from jaxmha.implementations.tiled.loop import backward, finished, forward, rows_of_gradient
from jaxmha.implementations.tiled.tile import Rules, Running, Softmax
from jaxmha.implementations.tiled.tiling import Plan
from jaxmha.matmul import operand_dtype, split_scale

# Overrides of the tile sizes that tiling.plan chooses: `target`, `least_rows`, `side`. Read once,
# when a program is traced; its gradient and its parts use the same sizes.
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


def cut(
    query: Any,
    key: Any,
    *,
    platform: str,
    skips: bool = False,
    plain: bool = False,
    gradient: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    sizes: tuple[tuple[str, int], ...] = (),
) -> Plan:
    """The tiling of queries `B N T H` and keys `B K S H`; only their shapes are used.

    `platform`: selects the default tile sizes. `sizes`: overrides them; later entries win.
    """
    (B, N, T, _), (K, S) = query.shape, key.shape[1:3]
    before, after = window
    seen = None if before is None or after is None else before + after + 1
    return tiling.plan(
        B, K, N // K, T, S, skips=skips, plain=plain, gradient=gradient, window=seen,
        itemsize=query.dtype.itemsize, platform=platform, **dict(sizes),
    )  # fmt: skip


def _sizes() -> tuple[tuple[str, int], ...]:
    for name, size in SIZES.items():
        whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if name not in ("target", "least_rows", "side") or not whole or size < 1:
            raise ValueError(
                f"blocked.SIZES[{name!r}] = {size!r}: target, least_rows and side may be there, "
                "integers of at least 1"
            )
    return tuple((name, int(size)) for name, size in SIZES.items())


def _drops(request: Request) -> bool:
    return request.dropout_key is not None and request.semantics.dropout_rate > 0


def attend(request: Request, spread: Callable[..., Any] | None = None) -> Result:
    """Computes the request; sums are float32, or float64 for float64 inputs, and matmul operands
    are bfloat16 where `operand_dtype` says so.

    `spread`: computes `core` on many devices (context parallelism); None: on one.
    """
    semantics = request.semantics
    (B, T, N, H), (_, S, K, h) = request.query.shape, request.value.shape
    accumulate = accumulation_dtype(request.query.dtype)
    query, key, value = (jnp.moveaxis(x.astype(accumulate), 2, 1) for x in request[:3])
    scale = H**-0.5 if semantics.scale is None else semantics.scale
    platform = platforms.current().name  # once: the gradient may be traced outside lowering_for
    operands = operand_dtype(request.query.dtype, semantics.precision, platform)
    scale, rest = (scale, 1.0) if operands is None else split_scale(scale)
    query *= scale
    out: jax.Array
    lse: jax.Array | None
    if 0 in (B, N, T, S):
        out, lse = jnp.zeros((B, N, T, h), accumulate), jnp.full((B, N, T), -jnp.inf, accumulate)
    else:
        conditions = block_mask.of_mask(request.mask, T, S)
        plain = request.mask.empty and request.bias is None and not _drops(request)
        skips = not request.mask.empty
        sizes, window = _sizes(), conditions.window
        plan = cut(
            query, key, platform=platform, skips=skips, plain=plain, window=window, sizes=sizes
        )
        bias = None if request.bias is None else request.bias.astype(accumulate)
        live = block_mask.live(conditions, bias, B, N, T, S)
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
            window,
            static,
            semantics.dropout_rate if _drops(request) else 0.0,
            semantics.dropout_broadcast,
            request.return_lse or semantics.fully_masked != "zero",
            platform,
            None if request.part is None else (request.part.N, request.part.T),
            sizes,
            operands,
            rest,
        )
        traced = conditions._replace(
            window=(None, None), above=None if static is not None else conditions.above
        )
        words = words_of(request.dropout_key if _drops(request) else None, request.part)
        arrays = shard_map.alike((query, key, value, bias, traced, words))
        out, lse = (spread or core)(plan, rules, *arrays)
        there = sharding.in_order(conditions.rows, 1)
        if there is not None:
            out = jnp.where(there[:, None, :, None], out, 0.0)
            lse = None if lse is None else jnp.where(there[:, None, :], lse, -jnp.inf)
    out = jnp.moveaxis(out, 1, 2)
    if semantics.fully_masked != "zero":
        assert lse is not None
        out = fully_masked.answer(request, out, jnp.swapaxes(lse == -jnp.inf, 1, 2))
    return Result(out.astype(request.query.dtype), None, lse)


def _per_key_head(live: jax.Array, K: int) -> jax.Array:
    """Reduces attended keys `b n S` over the query heads of each key/value head: `b k S`."""
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
    """Output `B N T h` and lse `B N T` (None unless `rules.lse`); fully masked rows are 0 and -inf.

    Args:
      plan: the tiling.
      rules: the static config.
      query: `B N T H`, scaled except for `rules.scale`. key: `B K S H`. value: `B K S h`.
      bias: `b n t s`.
      traced: the mask conditions that are arrays.
      words: the dropout seed (words of the threefry key); None: no dropout.
    """
    heads = query, key, value

    def run(
        rules: Rules, query: Any, key: Any, value: Any, words: Any, keys: Any = None
    ) -> tuple[jax.Array, jax.Array | None]:
        of_band = NOTHING._replace(keys=keys)
        plain = rules.above is None and words is None
        part = cut(query, key, platform=rules.platform, plain=plain, sizes=rules.sizes)
        return shown(rules, blockwise(part, rules, query, key, value, None, of_band, words))

    kind = bands.kind(plan, rules, traced, bias)
    if kind == "rows":
        return bands.of_rows(run, plan, rules, *heads, words)
    if kind == "keys":
        assert traced.keys is not None
        return bands.of_keys(run, plan, rules, *heads, traced.keys, words)
    return shown(rules, blockwise(plan, rules, *heads, bias, traced, words))


def shown(rules: Rules, found: Softmax) -> tuple[jax.Array, jax.Array | None]:
    """Output and, if `rules.lse`, the log-sum-exp."""
    return found.out, found.lse if rules.lse else None


def blockwise(
    plan: Plan,
    rules: Rules,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    traced: Pairs,
    words: jax.Array | None,
) -> Softmax:
    """`core` by the tiles of `plan`; row max and row sum are None unless `rules.lse`."""

    def output(running: Running) -> Any:
        found = finished(rules, running, words)
        # A second output would keep XLA from fusing small tiles into one kernel.
        return found if rules.lse else (found.out, None, None)

    # Queries are padded with 1: 0 times an infinite key is NaN.
    parts = layout.tiles(plan, query, 1.0), layout.chunks(plan, key), layout.chunks(plan, value)
    found = forward(plan, rules, parts, bias, traced, words, output)
    whole: Any = (None if x is None else layout.rows(plan, x) for x in found)
    return Softmax(*whole)


def before_gradient(plan: Plan, rules: Rules, *arguments: Any) -> Softmax:
    """`blockwise` with the tile sizes of the backward pass."""
    # Under differentiation, bands and unrolled loops gain little and compile slowly.
    plan = replace(plan, unroll=False)
    transposed = plan.chunks > 1
    if transposed:
        plan = _gradient_plan(plan, rules, *arguments)
    return blockwise(plan, rules._replace(lse=True, transposed=transposed), *arguments)


def core_forward(
    plan: Plan, rules: Rules, *arguments: Any
) -> tuple[tuple[jax.Array, jax.Array | None], Any]:
    found = before_gradient(plan, rules, *arguments)
    names = "attention_out", "attention_lse", "attention_lse"
    found = Softmax(*map(checkpoint_name, found, names))
    return shown(rules, found), (*arguments, found)


def _gradient_plan(
    plan: Plan, rules: Rules, query: Any, key: Any, value: Any, bias: Any, traced: Any, words: Any
) -> Plan:
    return cut(
        query, key, platform=rules.platform, skips=plan.chunks > 1,
        plain=bias is None and words is None, gradient=True, window=rules.window, sizes=rules.sizes,
    )  # fmt: skip


def core_backward(plan: Plan, rules: Rules, saved: Any, slopes: Any) -> tuple[Any, ...]:
    """Computes gradients with transposed scores, so that every matmul has row-major operands."""
    query, key, value, bias, traced, words, found = saved
    plan = _gradient_plan(plan, rules, *saved[:-1])
    per_row = rows_of_gradient(plan, query, found if plan.chunks > 1 else None, *slopes)
    per_key = layout.chunks(plan, key), layout.chunks(plan, value)
    bias_slope, (dq, dk, dv) = backward(plan, rules, per_row, per_key, bias, traced, words)
    if bias_slope is not None:
        bias_slope = bias_slope[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    dk, dv = (layout.unchunked(plan, x) for x in (dk, dv))
    return layout.rows(plan, jnp.swapaxes(dq, -1, -2)), dk, dv, bias_slope, None, None


core.defvjp(core_forward, core_backward)
