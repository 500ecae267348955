"""Code that ring and all-gather share: the call of each device, the positions that it holds, and the
mask conditions between a contiguous range of queries and one of keys, which are called parts."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Float, Num

from jaxmha import sharding
from jaxmha.implementations import shard_map
from jaxmha.implementations.base import Request, Result
from jaxmha.implementations.mods import Mod
from jaxmha.implementations.tiled import attention
from jaxmha.implementations.tiled.bands import OutAndLse
from jaxmha.implementations.tiled.block_mask import NO_CONDITIONS, Conditions
from jaxmha.implementations.tiled.dropout import Seed, shift_seed
from jaxmha.implementations.tiled.layout import Index
from jaxmha.implementations.tiled.tile import Config
from jaxmha.implementations.tiled.tiling import Shaped, Tiling, tiling_for
from jaxmha.implementations.tiled.tuning import tuning_for

# One position or several, or indices of devices: a Python int, a NumPy array or a traced value.
Positions: TypeAlias = Index | np.ndarray[Any, np.dtype[np.integer]]
Truths: TypeAlias = jax.Array | bool | np.bool_ | np.ndarray[Any, np.dtype[np.bool_]]


class Static(NamedTuple):
    """Static config of one call, equal on all devices.

    Attributes:
      config: config of tiled attention for the whole request, in which `lse` is True.
      axis: the mesh axis over which positions are sharded.
      devices: the size of that axis.
      zigzag: whether each device holds two parts of the positions, an early and a late one.
      T, S: sizes of the whole request.
    """

    config: Config
    axis: str
    devices: int
    zigzag: bool
    T: int
    S: int

    @property
    def parts(self) -> int:
        """Number of contiguous ranges of positions (parts) that a device holds."""
        return 2 if self.zigzag else 1

    def starts(self, device: Positions, size: int) -> list[Positions]:
        """The first position of each part that `device`, an index on the mesh axis, holds; several
        devices may be given as an array. `size` is T or S."""
        if not self.zigzag:
            return [device * (size // self.devices)]
        part = size // (2 * self.devices)
        return [device * part, (2 * self.devices - 1 - device) * part]


OutLse: TypeAlias = tuple[Float[jax.Array, "B N t h"], Float[jax.Array, "B N t"]]
# Computes output and lse of one device's queries over the keys and values of all devices:
# `(static, query, key, value, bias, traced, seed, score_mod) -> (out, lse)`. All arguments are for the
# batch rows and heads of this device. Query, key and value, and the rows of bias and dense mask, are
# those of its positions; the other mask conditions in `traced` are for the positions of all devices.
Local: TypeAlias = Callable[..., OutLse]


def unsupported(request: Request) -> str | None:
    """The reason why neither ring nor all-gather can compute the request; None: there is none that
    holds for both."""
    axes = sharding.current()
    if axes is None or axes.context is None:
        return (
            "positions are not sharded: name their mesh axis by "
            "`with jaxmha.sharding.use(mesh, context=...)`"
        )
    T, S = request.query.shape[1], request.key.shape[1]
    reason = attention.unsupported_reason(request)
    if reason:
        return reason
    parts = axes.size((axes.context,)) * (2 if axes.zigzag else 1)
    if T % parts or S % parts or not T or not S:
        return f"T={T} and S={S} must be positive multiples of {parts}"
    return None


def distributed_core(
    local: Local,
    dtype: np.dtype[np.floating],
    tiling: Tiling,
    config: Config,
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K S H"],
    value: Float[jax.Array, "B K S h"],
    bias: Float[jax.Array, "b n t s"] | None,
    traced: Conditions,
    seed: Seed | None,
    score_mod: Mod | None,
) -> OutAndLse:
    """Computes `attention.core` on many devices, each of which runs `local`.

    Masks of rows and keys and segment ids are small, so every device holds them for all positions;
    devices exchange keys, values and gradients, but no masks. `dtype`: of keys and values in the
    request, in which devices exchange them; that of `key` and `value` may be wider.
    """
    B, N, T, _ = query.shape
    K, S = key.shape[1:3]
    key, value = key.astype(dtype), value.astype(dtype)  # exact: the request had this dtype
    split = shard_map.split(B, N, K)
    assert split is not None
    assert split.axes.context is not None
    static = Static(
        config._replace(lse=True, whole=(N, T)),
        split.axes.context,
        split.axes.size((split.axes.context,)),
        split.axes.zigzag,
        T,
        S,
    )

    def spec(x: jax.Array | None, letters: str) -> PartitionSpec | None:
        return None if x is None else split.spec(x.shape, letters)

    mask_mod = None if traced.mod is None else traced.mod._replace(blocks=None)
    conditions = traced._replace(window=(None, None), mod=mask_mod)

    def inside(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None,
        conditions: Conditions,
        seed: Seed | None,
        score_mod: Mod | None,
    ) -> tuple[jax.Array, jax.Array]:
        key, value = (split.own_heads(x, 1) for x in (key, value))
        if seed is not None:
            seed = shift_seed(seed, *split.starts(), 0, 0)
        mask_mod, score_mod = (split.own_part(x) for x in (conditions.mod, score_mod))
        conditions = conditions._replace(mod=mask_mod)
        return local(static, query, key, value, bias, conditions, seed, score_mod)

    out_spec: Any = sharding.spec(split.b, split.n, static.axis)
    in_specs = (
        *(spec(x, f"b{n}c?") for x, n in ((query, "n"), (key, "k"), (value, "k"))),
        spec(bias, "bnc?"),
        _condition_specs(conditions, split),
        None if seed is None else sharding.spec(),
        split.mod_specs(score_mod),
    )
    mapped = split.run(inside, in_specs, (out_spec, out_spec))
    out, lse = mapped(query, key, value, bias, conditions, seed, score_mod)
    return out, lse if config.lse else None


def _condition_specs(conditions: Conditions, split: shard_map.Split) -> Conditions:
    """Returns `conditions` with each array replaced by its partition spec."""
    # Axis letters of `Split.spec` by rank: 1: offsets; 2: masks of rows and keys, and segment ids,
    # whose positions are replicated; 4: the dense mask, whose rows are sharded.
    letters = {1: "b", 2: "b?", 4: "bnc?"}
    arrays: Any = conditions._replace(mod=None)
    specs: Conditions = jax.tree.map(lambda x: split.spec(x.shape, letters[x.ndim]), arrays)
    return specs._replace(mod=split.mod_specs(conditions.mod))


class Pair(NamedTuple):
    """Arguments of `attention.core`, other than query, key, value and bias, for one contiguous range
    (part) of queries and one of keys; positions in `traced` count from the start of each."""

    tiling: Tiling
    config: Config
    traced: Conditions
    seed: Seed | None
    score_mod: Mod | None


def pair_of_parts(
    static: Static,
    query: Shaped,
    key: Shaped,
    traced: Conditions,
    seed: Seed | None,
    t: Index,
    s: Index,
    score_mod: Mod | None = None,
) -> Pair:
    """Tiling, config, conditions, seed and score function for queries `b n t H` from position `t`
    on and keys `b k s H` from position `s` on, of which only shapes and dtypes are used. `traced`,
    `seed` and `score_mod` are for all positions, but for a dense mask, which has only these queries.
    """
    T, S = query.shape[2], key.shape[2]
    below, above = bounds(static, traced)
    shift = jnp.asarray(t - s, jnp.int32)

    def slice_of(x: jax.Array, start: Index, size: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, start, size, 1)

    segments = traced.segments
    if segments is not None:
        segments = slice_of(segments[0], t, T), slice_of(segments[1], s, S)
    local = Conditions(
        None if above is None else (jnp.asarray(above, jnp.int32) + shift).reshape(-1),
        (None, None),
        None if traced.rows is None else slice_of(traced.rows, t, T),
        None if traced.keys is None else slice_of(traced.keys, s, S),
        segments,
        traced.array,
        None if below is None else (below - shift).reshape(-1),
        None if traced.mod is None else traced.mod.shift(0, 0, t, s),
    )
    platform = static.config.platform
    tuning = tuning_for(platform)
    measured = {"side": tuning.shard_side, "target": tuning.shard_tile_bytes}
    sizes = tuple((name, size) for name, size in measured.items() if size is not None)
    sizes = (*sizes, *static.config.sizes)
    skips = local != NO_CONDITIONS
    tiling = tiling_for(query, key, platform=platform, skips=skips, sizes=sizes)
    config = static.config._replace(window=(None, None), above=None, sizes=sizes)
    if seed is not None:
        seed = shift_seed(seed, 0, 0, t, s)
    score_mod = None if score_mod is None else score_mod.shift(0, 0, t, s)
    return Pair(tiling, config, local, seed, score_mod)


def bounds(static: Static, traced: Conditions) -> tuple[int | None, Index | None]:
    """Bounds `i - below <= j <= i + above` between positions of the whole request, by its window and
    causal offset; None: no bound. `above` may be a traced array `b`, of offsets by batch row."""
    below, right = static.config.window
    offset = static.config.above if traced.above is None else traced.above
    both = [x for x in (right, offset) if x is not None]
    above = None if not both else both[0] if len(both) == 1 else jnp.minimum(*both)
    if isinstance(right, int) and isinstance(offset, int):
        above = min(right, offset)
    return below, above


def any_allowed(
    below: int | None, above: Index | None, t: Positions, T: int, s: Positions, S: int
) -> Truths:
    """False if one of the bounds (see `bounds`) masks all pairs of T queries from position t on and S
    keys from position s on, in all batch rows; else True, even if both bounds together mask all.
    """
    found: Truths = True
    if above is not None:
        largest = above if isinstance(above, int) else jnp.max(above)
        found = found & (s <= t + T - 1 + largest)
    if below is not None:
        found = found & (s + S - 1 >= t - below)
    return found


def split_parts(
    static: Static, x: Num[jax.Array, "b n t *d"]
) -> Num[jax.Array, "{static.parts} b n _ *d"]:
    """Splits a device's positions, the third axis, into contiguous ranges (parts), stacked on a new
    first axis."""
    b, n, t, *rest = x.shape
    return jnp.moveaxis(x.reshape(b, n, static.parts, t // static.parts, *rest), 2, 0)


def join_parts(x: Num[jax.Array, "parts b n t *d"]) -> Num[jax.Array, "b n _ *d"]:
    """Joins parts on the first axis along the axis of positions, as a device holds them: the inverse of
    `split_parts`."""
    x = jnp.moveaxis(x, 0, 2)
    b, n, parts, t, *rest = x.shape
    return x.reshape(b, n, parts * t, *rest)


def attend(request: Request, local: Local) -> Result:
    """Computes the request by tiled attention, with `local` on each device in the place of
    `attention.core`."""
    dtype = np.dtype(request.query.dtype)
    return attention.attend(request, partial(distributed_core, local, dtype))
