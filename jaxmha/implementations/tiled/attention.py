"""Tiled attention with online softmax: memory linear in T and S, in plain XLA.

Scores are materialised by tiles. If the keys are tiled too, tiles known to be fully masked are
skipped, and tiles known to be unmasked get no mask. The backward pass recomputes weights from row
max and row sum, since the rounding error of a large lse would be a relative error of the weights.
If a tile has all keys of its rows, row max, row sum and delta come from the recomputed logits:
gradients of a row's logits then sum to 0 more exactly (without a cotangent of the lse). With
several KV tiles, row max and row sum come from the forward pass, which then computes logits by
matmuls of the same operands and tiles, so that both passes round equally: exp magnifies a
difference of logits. Delta is then the row sum of out * d_out.
Source: Dao et al., "FlashAttention" (2022), and Rabe and Staats, "Self-attention does not need
O(n^2) memory" (2021).
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from jaxmha import sharding
from jaxmha.implementations import fully_masked, partitioned, platforms, varying
from jaxmha.implementations.base import Request, Result, accumulation_dtype
from jaxmha.implementations.mods import Floats, Mod, cotangent
from jaxmha.implementations.online_softmax import Softmax, State
from jaxmha.implementations.tiled import attended, bands, block_mask, layout, per_device
from jaxmha.implementations.tiled.bands import OutAndLse
from jaxmha.implementations.tiled.block_mask import NO_CONDITIONS, Conditions
from jaxmha.implementations.tiled.dropout import Seed, seed_of
from jaxmha.implementations.tiled.feature_order import exchanged, largest_feature
from jaxmha.implementations.tiled.loop import backward, backward_inputs, forward, normalize
from jaxmha.implementations.tiled.per_device import KEYS, CoreInputs
from jaxmha.implementations.tiled.tile import Config
from jaxmha.implementations.tiled.tiling import Tiling, tiling_for
from jaxmha.matmul import SMALL, has_float16_significand, operand_dtype, resolved, split_scale

# `target`, `least_rows` and `side` of `choose_tiling`, by name, instead of the sizes in the tuning
# table. Read once, when a program is traced; its gradient uses the same sizes.
SIZES: dict[str, int] = {}

Tree = TypeVar("Tree")

# `core`, or a function with its arguments and results that splits positions over devices.
Core: TypeAlias = Callable[..., OutAndLse]


def unsupported_reason(request: Request) -> str | None:
    """Returns None if this implementation supports the request, else the reason why not."""
    semantics = request.semantics
    shapes = (*request.query.shape, *request.key.shape, *request.value.shape)
    if not all(isinstance(size, int) for size in shapes):
        return "sizes must be known"
    if request.return_weights:
        return "weights are never materialised: return_weights must be False"
    accumulate = accumulation_dtype(request.query.dtype)
    if (semantics.softmax_dtype or accumulate) != accumulate:
        return f"softmax is in {accumulate}: softmax_dtype must be None or {accumulate}"
    if semantics.fully_masked == "mean" and request.drops:
        return "the mean of fully masked rows has no dropout"
    return None


def _sizes() -> tuple[tuple[str, int], ...]:
    for name, size in SIZES.items():
        whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if name not in ("target", "least_rows", "side") or not whole or size < 1:
            raise ValueError(
                f"blocked.SIZES[{name!r}] = {size!r}: expected target, least_rows or side, "
                "integers of at least 1"
            )
    return tuple((name, int(size)) for name, size in SIZES.items())


def attend(request: Request, distributed: Core | None = None) -> Result:
    """Computes the request; sums are float32, or float64 for float64 inputs. For half precision,
    matmul operands are rounded to its significand, except on CPUs or if a precision is set.

    `distributed`: computes `core` by context parallelism; None: `core` itself.
    """
    semantics = request.semantics
    (B, T, N, _), (_, S, _, h) = request.query.shape, request.value.shape
    accumulate = accumulation_dtype(request.query.dtype)
    # Read once, for the gradient too, which may be traced after `lowering_for` has ended.
    platform = platforms.current().name
    query, key, value, operands = _head_major(request, platform)
    out: jax.Array
    lse: jax.Array | None
    if 0 in (B, N, T, S):
        out, lse = jnp.zeros((B, N, T, h), accumulate), jnp.full((B, N, T), -jnp.inf, accumulate)
    else:
        conditions = block_mask.from_mask(request.mask, T, S, request.mask_mod)
        config = _config(request, conditions, platform, operands)
        masked = not request.mask.empty or request.mask_mod is not None
        plain = not masked and request.bias is None and not request.drops
        plain = plain and request.score_mod is None
        tiling = tiling_for(
            query, key, platform=platform, skips=masked, plain=plain,
            window=config.window, sizes=config.sizes,
        )  # fmt: skip
        bias = None if request.bias is None else request.bias.astype(accumulate)
        found, conditions = attended.with_blocks(conditions, bias, tiling)
        query, key, value = attended.zero_unattended(found, query, key, value)
        traced = conditions._replace(
            window=(None, None), above=None if config.above is not None else conditions.above
        )
        seed = seed_of(request.dropout_key if request.drops else None, request.part)
        arrays = varying.alike((query, key, value, bias, traced, seed, request.score_mod))
        out, lse = (distributed or core)(tiling, config, *arrays)
        valid = sharding.in_order(conditions.rows, 1)
        if valid is not None:
            out = jnp.where(valid[:, None, :, None], out, 0.0)
            lse = None if lse is None else jnp.where(valid[:, None, :], lse, -jnp.inf)
    out = jnp.moveaxis(out, 1, 2)
    if semantics.fully_masked != "zero":
        assert lse is not None
        out = fully_masked.apply(request, out, jnp.swapaxes(lse == -jnp.inf, 1, 2))
    return Result(out.astype(request.query.dtype), None, lse)


class _Operands(NamedTuple):
    """`dtype`: `Config.operands`, the dtype of matmul operands. `scale`: `Config.scale`, the factor
    of the request's scale that queries are not multiplied by, so that logits are."""

    dtype: np.dtype[np.floating] | None
    scale: float


def _head_major(
    request: Request, platform: str
) -> tuple[
    Float[jax.Array, "B N T H"], Float[jax.Array, "B K S H"], Float[jax.Array, "B K S h"], _Operands
]:
    """Queries, multiplied by the scale but for `_Operands.scale`, keys and values, all in the
    accumulation dtype; and the settings of their matmuls."""
    accumulate = accumulation_dtype(request.query.dtype)
    query, key, value = (jnp.moveaxis(x.astype(accumulate), 2, 1) for x in request[:3])
    semantics = request.semantics
    operands = operand_dtype(request.query.dtype, semantics.precision, platform)
    if has_float16_significand(request.query.dtype, semantics.precision, platform):
        operands = np.dtype(np.float16)
    # Queries are multiplied by a power of two, which is exact, and logits by the rest of the scale.
    # In small matmuls, whose sums are pairwise, queries take the whole scale: rounding them is less
    # of an error than rounding the logits once more.
    small = math.prod((*query.shape, key.shape[2])) <= SMALL and operands is None
    scale, rest = (request.scale, 1.0) if small else split_scale(request.scale)
    query *= scale
    return query, key, value, _Operands(operands, rest)


def _config(request: Request, conditions: Conditions, platform: str, operands: _Operands) -> Config:
    semantics = request.semantics
    return Config(
        semantics.logits_soft_cap,
        # Resolved now: code of one device may be traced later, under another default precision.
        resolved(semantics.precision),
        conditions.window,
        conditions.above if isinstance(conditions.above, int) else None,
        semantics.dropout_rate if request.drops else 0.0,
        semantics.dropout_broadcast,
        request.return_lse or semantics.fully_masked != "zero",
        platform,
        None if request.part is None else (request.part.N, request.part.T),
        _sizes(),
        operands.dtype,
        operands.scale,
        partition=partitioned.may_partition(),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def core(
    tiling: Tiling,
    config: Config,
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K S H"],
    value: Float[jax.Array, "B K S h"],
    bias: Float[jax.Array, "b n t s"] | None,
    traced: Conditions,
    seed: Seed | None,
    score_mod: Mod | None = None,
) -> OutAndLse:
    """Output and lse (None unless `config.lse`), 0 and -inf in fully masked rows. Rows that only
    `traced.rows` masks may have other values, which the caller replaces.

    Args:
      tiling: sizes of the arrays and of their tiles.
      query: multiplied by the scale of the logits, except for its factor `config.scale`.
      key, value: in the accumulation dtype, as the query.
      bias: added to the logits; axes of size 1 broadcast.
      traced: the mask conditions, but for the static bounds, which are in `config`.
      seed: seed of the dropout mask; None: no dropout.
      score_mod: score function, applied after the bias.
    """
    inputs = query, key, value, bias, traced, seed, score_mod
    return per_device.run(
        lambda own, inputs, _: _core(own, config, *inputs), tiling, config.partition, inputs, ()
    )


def _core(
    tiling: Tiling,
    config: Config,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    traced: Conditions,
    seed: Seed | None,
    score_mod: Mod | None,
) -> OutAndLse:
    """Computes `core`, in bands if `bands.kind` chooses some and there is no score function."""

    def attend_band(
        config: Config,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        seed: Seed | None,
        keys: jax.Array | None = None,
    ) -> OutAndLse:
        plain = config.above is None and seed is None
        band = tiling_for(query, key, platform=config.platform, plain=plain, sizes=config.sizes)
        conditions = NO_CONDITIONS._replace(keys=keys)
        return _out_and_lse(band, config, query, key, value, None, conditions, seed)

    kind = None if score_mod is not None else bands.kind(tiling, config, traced, bias)
    if kind == "rows":
        return bands.attend_row_bands(attend_band, tiling, config, query, key, value, seed)
    if kind == "keys":
        assert traced.keys is not None
        return bands.attend_key_bands(
            attend_band, tiling, config, query, key, value, traced.keys, seed
        )
    return _out_and_lse(tiling, config, query, key, value, bias, traced, seed, score_mod)


def _out_and_lse(
    tiling: Tiling,
    config: Config,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    traced: Conditions,
    seed: Seed | None,
    score_mod: Mod | None = None,
) -> OutAndLse:
    """Computes `core` by the tiles of `tiling`, for all rows or for one band."""

    def finalize(state: State) -> Softmax:
        return normalize(config, state, seed)

    def finalize_out(state: State) -> jax.Array:
        return normalize(config, state, seed).out

    inputs = query, key, value, bias, traced, seed
    if config.lse:
        softmax = _by_tiles(tiling, config, *inputs, finalize, score_mod)
        return softmax.out, softmax.lse
    # Without the lse, `finalize_out` returns only the output: XLA does not fuse the work of a small
    # tile into one kernel if it has a second result.
    return _by_tiles(tiling, config, *inputs, finalize_out, score_mod), None


def _by_tiles(
    tiling: Tiling,
    config: Config,
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K S H"],
    value: Float[jax.Array, "B K S h"],
    bias: Float[jax.Array, "b n t s"] | None,
    traced: Conditions,
    seed: Seed | None,
    finalize: Callable[[State], Tree],
    score_mod: Mod | None,
) -> Tree:
    """Runs the forward pass by tiles. `finalize` maps the softmax state of a query tile to arrays
    `*c r d`, which are joined to `B N T d`."""
    # Queries are padded with 1: padded rows are dropped later, but 0 times an infinite key is NaN.
    query_tiles = layout.to_query_tiles(tiling, query, 1.0)
    kv_tiles = layout.to_kv_tiles(tiling, key), layout.to_kv_tiles(tiling, value)
    inputs = query_tiles, *kv_tiles, bias, traced, seed
    tiles = forward(tiling, config, *inputs, finalize, score_mod)
    whole: Tree = jax.tree.map(partial(layout.from_query_tiles, tiling), tiles)
    return whole


def forward_for_gradient(
    tiling: Tiling,
    config: Config,
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K S H"],
    value: Float[jax.Array, "B K S h"],
    bias: Float[jax.Array, "b n t s"] | None,
    traced: Conditions,
    seed: Seed | None,
    score_mod: Mod | None = None,
) -> Softmax:
    """Output, row max and row sum of `core`; with several KV tiles by the tiles and transposed
    scores of the backward pass, so that logits round as there."""
    # Under differentiation, bands and unrolled loops gain little and compile slowly.
    tiling = replace(tiling, unroll=False)
    if tiling.kv_tiles > 1:
        tiling = _gradient_tiling(tiling, config, query, key, bias, seed, score_mod)
        config = config._replace(transposed=True)
    config = config._replace(lse=True)

    def finalize(state: State) -> Softmax:
        return normalize(config, state, seed)

    inputs = query, key, value, bias, traced, seed
    return _by_tiles(tiling, config, *inputs, finalize, score_mod)


def core_forward(
    tiling: Tiling,
    config: Config,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    traced: Conditions,
    seed: Seed | None,
    score_mod: Mod | None = None,
) -> tuple[OutAndLse, tuple[CoreInputs, Softmax]]:
    """The forward rule of `core`. `jax.checkpoint` can save attention_out and attention_lse."""
    inputs = query, key, value, bias, traced, seed, score_mod
    softmax = per_device.run(
        lambda own, inputs, _: forward_for_gradient(own, config, *inputs),
        tiling, config.partition, inputs, (),
    )  # fmt: skip
    names = "attention_out", "attention_lse", "attention_lse"
    softmax = Softmax(*map(checkpoint_name, softmax, names))
    return (softmax.out, softmax.lse if config.lse else None), (inputs, softmax)


def _gradient_tiling(
    tiling: Tiling,
    config: Config,
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None,
    seed: Seed | None,
    score_mod: Mod | None,
) -> Tiling:
    return tiling_for(
        query, key, platform=config.platform, skips=tiling.kv_tiles > 1,
        plain=bias is None and seed is None and score_mod is None, gradient=True, window=config.window,
        sizes=config.sizes,
    )  # fmt: skip


def core_backward(
    tiling: Tiling,
    config: Config,
    saved: tuple[CoreInputs, Softmax],
    cotangents: OutAndLse,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, None, None, Mod | None]:
    """The backward rule of `core`: gradients of query, key, value and bias, None for conditions and
    seed, and a `Mod` with the gradients of the floating arrays that the score function captures."""

    def local(own: Tiling, inputs: CoreInputs, others: tuple[Softmax, OutAndLse]) -> Any:
        return _backward(own, config, inputs, *others)

    inputs, softmax = saved
    *heads, d_bias, floats = per_device.run(
        local, tiling, config.partition, inputs, (softmax, cotangents),
        lambda found: ("bn..", KEYS, KEYS, *per_device.by_rank(found[3:])),
    )  # fmt: skip
    return *heads, d_bias, None, None, cotangent(inputs[-1], floats)


def _backward(
    tiling: Tiling, config: Config, inputs: CoreInputs, softmax: Softmax, cotangents: OutAndLse
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, Floats]:
    """Gradients of query, key, value, bias (None: no bias) and the floating arrays that the score
    function captures, for arrays of one device or of all."""
    query, key, value, bias, traced, seed, mod = inputs
    tiling = _gradient_tiling(tiling, config, query, key, bias, seed, mod)
    last = largest_feature(tiling, query, key, config.platform)
    query, key = exchanged(last, (query, key))
    per_row = backward_inputs(tiling, query, softmax if tiling.kv_tiles > 1 else None, *cotangents)
    kv_tiles = layout.to_kv_tiles(tiling, key), layout.to_kv_tiles(tiling, value)
    more, (dq, dk, dv) = backward(tiling, config, *per_row, *kv_tiles, bias, traced, seed, mod)
    d_bias = more.bias
    if bias is not None and d_bias is not None:
        d_bias = d_bias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    dk, dv = (layout.from_kv_tiles(tiling, x) for x in (dk, dv))
    dq = layout.from_query_tiles(tiling, jnp.swapaxes(dq, -1, -2))
    dq, dk = exchanged(last, (dq, dk))
    return dq, dk, dv, d_bias, more.floats


core.defvjp(core_forward, core_backward)
