"""Shared parts of context parallelism: the positions of each device, and the conditions between a
part of the queries and a part of the keys."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha import sharding
from jaxmha.implementations import shard_map
from jaxmha.implementations.base import Request
from jaxmha.implementations.tiled import attention
from jaxmha.implementations.tiled.block_mask import NOTHING, Pairs
from jaxmha.implementations.tiled.dropout import placed
from jaxmha.implementations.tiled.tile import Rules
from jaxmha.implementations.tiled.tiling import Plan


class Static(NamedTuple):
    """Static configuration of one call.

    Attributes:
      rules: config of the tiled implementation for the whole request.
      axis: the mesh axis of positions. devices: its size.
      zigzag: whether each device holds an early and a late part of the positions.
      T, S: global sizes.
    """

    rules: Rules
    axis: str
    devices: int
    zigzag: bool
    T: int
    S: int

    @property
    def parts(self) -> int:
        """Number of contiguous parts of positions that a device holds."""
        return 2 if self.zigzag else 1

    def starts(self, device: Any, size: int) -> list[Any]:
        """The first position of each part of a device; `size` is T or S."""
        if not self.zigzag:
            return [device * (size // self.devices)]
        part = size // (2 * self.devices)
        return [device * part, (2 * self.devices - 1 - device) * part]


def declined(request: Request) -> str | None:
    """The reason why positions cannot be sharded over devices; None: they can."""
    axes = sharding.current()
    if axes is None or axes.context is None:
        return (
            "positions lie on one device: `with jaxmha.sharding.use(mesh, context=...)` names "
            "the axis of a mesh"
        )
    T, S = request.query.shape[1], request.key.shape[1]
    reason = attention.supports(request)
    if reason:
        return reason
    parts = axes.size((axes.context,)) * (2 if axes.zigzag else 1)
    if T % parts or S % parts or not T or not S:
        return f"T={T} and S={S} must be multiples of {parts} parts of positions"
    return None


def spread(
    local: Callable[..., tuple[jax.Array, jax.Array]],
    dtype: np.dtype[Any],
    plan: Plan,
    rules: Rules,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    traced: Pairs,
    words: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """`attention.core` on many devices: `local` computes output and lse of one device's queries.

    Conditions on keys are small and therefore replicated; only keys and values are communicated.
    """
    B, N, T, _ = query.shape
    K, S = key.shape[1:3]
    key, value = key.astype(dtype), value.astype(dtype)  # exact: it is their original dtype
    found = shard_map.split(B, N, K)
    assert found is not None
    assert found.axes.context is not None
    static = Static(
        rules._replace(lse=True, whole=(N, T)),
        found.axes.context,
        found.axes.size((found.axes.context,)),
        found.axes.zigzag,
        T,
        S,
    )

    def spec(x: Any, letters: str) -> Any:
        return None if x is None else found.spec(x.shape, letters)

    letters = {1: "b", 2: "b?", 4: "bnc?"}  # offsets; rows, keys and segments; array
    given: Any = traced._replace(window=(None, None))
    specs = jax.tree.map(lambda x: spec(x, letters[x.ndim]), given)

    def inside(query: Any, key: Any, value: Any, bias: Any, given: Pairs, words: Any) -> Any:
        key, value = (found.own_heads(x, 1) for x in (key, value))
        if words is not None:
            words = placed(words, *found.starts(), 0, 0)
        return local(static, query, key, value, bias, given, words)

    out_specs = sharding.spec(found.b, found.n, static.axis)
    out, lse = found.run(
        inside,
        (
            *(spec(x, f"b{n}c?") for x, n in ((query, "n"), (key, "k"), (value, "k"))),
            spec(bias, "bnc?"),
            specs,
            None if words is None else sharding.spec(),
        ),
        (out_specs, out_specs),
    )(query, key, value, bias, given, words)
    return out, lse if rules.lse else None


class Corner(NamedTuple):
    """Arguments of `attention.core` for a part of the queries and a part of the keys."""

    plan: Plan
    rules: Rules
    traced: Pairs
    words: jax.Array | None


# Tile sizes by platform: the memory of a tile does not fall as devices are added.
SIZES: dict[str, dict[str, int]] = {"cpu": {"side": 256, "target": 2**21}}


def corner(
    static: Static,
    query: Any,
    key: Any,
    traced: Pairs,
    words: jax.Array | None,
    t: Any,
    s: Any,
) -> Corner:
    """Tiling and conditions between queries `b n t H` from position `t` and keys `b k s H` from
    position `s`; only the shapes of both are used."""
    T, S = query.shape[2], key.shape[2]
    below, above = bounds(static, traced)
    shift = jnp.asarray(t - s, jnp.int32)

    def slice_of(x: Any, start: Any, size: int) -> Any:
        return None if x is None else jax.lax.dynamic_slice_in_dim(x, start, size, 1)

    segments = traced.segments
    if segments is not None:
        segments = slice_of(segments[0], t, T), slice_of(segments[1], s, S)
    local = Pairs(
        None if above is None else (jnp.asarray(above, jnp.int32) + shift).reshape(-1),
        (None, None),
        slice_of(traced.rows, t, T),
        slice_of(traced.keys, s, S),
        segments,
        traced.array,
        None if below is None else (below - shift).reshape(-1),
    )
    platform = static.rules.platform
    sizes = (*SIZES.get(platform, {}).items(), *static.rules.sizes)
    plan = attention.cut(query, key, platform=platform, skips=local != NOTHING, sizes=sizes)
    rules = static.rules._replace(window=(None, None), above=None, sizes=sizes)
    if words is not None:
        words = placed(words, 0, 0, t, s)
    return Corner(plan, rules, local, words)


def bounds(static: Static, traced: Pairs) -> tuple[int | None, Any]:
    """Bounds `i - below <= j <= i + above`; None: no bound. `above` may be traced, `B`."""
    below, right = static.rules.window
    given = static.rules.above if traced.above is None else traced.above
    both = [x for x in (right, given) if x is not None]
    above = None if not both else both[0] if len(both) == 1 else jnp.minimum(*both)
    if len(both) == 2 and all(isinstance(x, int) for x in both):
        above = min(both)
    return below, above


def meets(below: Any, above: Any, t: Any, T: int, s: Any, S: int) -> Any:
    """True if the bounds allow any pair of T queries from position t and S keys from position s."""
    found: Any = True
    if above is not None:
        highest = above if isinstance(above, int) else jnp.max(above)
        found = found & (s <= t + T - 1 + highest)
    if below is not None:
        found = found & (s + S - 1 >= t - below)
    return found


def split_parts(static: Static, x: jax.Array) -> jax.Array:
    """`b n t ...` as `parts b n t ...`."""
    b, n, t, *rest = x.shape
    return jnp.moveaxis(x.reshape(b, n, static.parts, t // static.parts, *rest), 2, 0)


def join_parts(x: jax.Array) -> jax.Array:
    """The inverse of `split_parts`."""
    x = jnp.moveaxis(x, 0, 2)
    b, n, parts, t, *rest = x.shape
    return x.reshape(b, n, parts * t, *rest)


def attend(request: Request, local: Callable[..., Any]) -> Any:
    """Computes the request with `local` in place of `attention.core`."""
    return attention.attend(request, partial(spread, local, np.dtype(request.query.dtype)))
