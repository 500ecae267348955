"""Reads shardings from the types of arrays on a mesh of explicit axes (`AxisType.Explicit`)."""

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jaxmha.arrays import Array
from jaxmha.params import Projection
from jaxmha.sharding import AXES, Axes, Names, named, names_of, spec

P = ParamSpec("P")
Out = TypeVar("Out")


class TypeSharding(NamedTuple):
    """Sharding read from the types of arrays on a mesh of explicit axes.

    Attributes:
      axes: mesh axes of attention; `axes.batch` shards the first batch axis.
      features: spec of `(*B, T, D)`.
      heads: spec of `(*B, T, N, H)`.
      scores: spec of `(*B, N, T, S)`, and of `(*B, N, T)`.
    """

    axes: Axes
    features: PartitionSpec
    heads: PartitionSpec
    scores: PartitionSpec


def sharding_of_features(x: Array, projection: Projection) -> TypeSharding | None:
    """The sharding of features `(*B, T, D)`, and of the heads that a kernel `(D, N, H)` makes of them.

    None: the mesh has no explicit axes.

    Raises:
      ValueError: a mesh axis shards both the heads and another axis.
    """
    kernel = getattr(projection, "kernel", None)
    if not _is_explicit(x) or x.ndim < 2 or kernel is None or kernel.ndim != 3:
        return None  # wrong shapes and types are reported by the checks of parameters
    *rows, _ = spec_of(x)
    return _sharding(x, rows, spec_of(kernel)[1])


class HasQuery(Protocol):
    """Parameters of any layer with a query projection."""

    @property
    def query(self) -> Projection: ...


def layer_specs(
    params: HasQuery, x: Array, *_: object, return_weights: object, **__: object
) -> tuple[Axes, object] | None:
    """The argument `specs` of `by_types` for a layer: for its output, and its weights if returned."""
    found = sharding_of_features(x, params.query)
    if found is None:
        return None
    return found.axes, (found.features, found.scores) if return_weights else found.features


def step_specs(
    params: HasQuery, x: Array, cache: object, *_: object, **__: object
) -> tuple[Axes, object] | None:
    """The argument `specs` of `by_types` for a decoding step: the cache keeps its sharding."""
    found = sharding_of_features(x, params.query)
    return found and (found.axes, (found.features, specs_of_leaves(cache)))


def specs_of_leaves(tree: object) -> object:
    """The explicit partition spec of every array of a pytree."""
    return jax.tree.map(lambda part: spec(*spec_of(part)), tree)


def sharding_of_heads(x: Array) -> TypeSharding | None:
    """The sharding of heads `(*B, T, N, H)`; None: the mesh has no explicit axes."""
    if not _is_explicit(x) or x.ndim < 3:
        return None
    *rows, heads, _ = spec_of(x)
    return _sharding(x, rows, heads)


def _sharding(x: Array, rows: Sequence[Names], heads: Names) -> TypeSharding:
    *batch, t = rows
    for letter, names in (*(("B", b) for b in batch), ("T", t)):
        for name in {*names_of(names)} & {*names_of(heads)}:
            raise ValueError(
                f"{letter} and heads are both sharded over axis {name!r} of the mesh: make {letter} "
                "of the features replicated with jax.sharding.reshard, or shard the heads of the "
                "parameters over another axis"
            )
    chosen: Axes | None = AXES.value
    along = names_of(t)
    if chosen is not None and chosen.zigzag and len(along) != 1 and x.shape[len(batch)] > 1:
        raise ValueError(
            f"T={x.shape[len(batch)]} positions in zig-zag order are sharded over {along} by their "
            f"types: shard them over the axis {chosen.context!r}"
        )
    axes = Axes(
        jax.typeof(x).sharding.mesh,
        names_of(batch[0]) if batch else (),
        names_of(heads),
        along[0] if len(along) == 1 else None,
        chosen is not None and chosen.zigzag,
    )
    return TypeSharding(axes, spec(*rows), spec(*rows, heads), spec(*batch, heads, t))


def by_types(
    specs: Callable[..., tuple[Axes, object] | None],
) -> Callable[[Callable[P, Out]], Callable[P, Out]]:
    """Decorator for a function of arrays: on explicit mesh axes, the function runs in
    `jax.sharding.auto_axes`, with the mesh axes of attention in `AXES`.

    Args:
      specs: returns, from the arguments of the function, the mesh axes of attention and the
        partition specs of the outputs; None if the mesh has no explicit axes. Keyword arguments are
        static.
    """

    def decorate(function: Callable[P, Out]) -> Callable[P, Out]:
        @wraps(function)
        def sharded(*arguments: P.args, **static: P.kwargs) -> Out:
            found = specs(*arguments, **static)
            if found is None:
                return function(*arguments, **static)
            axes, out_specs = found
            arrays, tree = jax.tree.flatten(arguments)

            def inside(*arrays: jax.Array) -> Out:
                with AXES(axes):
                    return function(*jax.tree.unflatten(tree, arrays), **static)

            auto: Any = jax.sharding.auto_axes
            out: Out = auto(inside, out_sharding=named(axes.mesh, out_specs))(*arrays)
            return out

        return sharded

    return decorate


def in_auto_axes(function: Callable[..., Out], specs: object, *arrays: object) -> Out:
    """`function(*arrays)`, in `jax.sharding.auto_axes` if an array has explicit mesh axes: JAX
    cannot infer the sharding of every gather and scatter.

    Args:
      function: a function of pytrees.
      specs: partition specs of its outputs.
      arrays: its arguments. All checks of known values come first: inside, values are traced.
    """
    leaves, tree = jax.tree.flatten(arrays)
    meshes = [jax.typeof(x).sharding.mesh for x in leaves if _is_explicit(x)]
    if not meshes:
        return function(*arrays)

    def inside(*leaves: jax.Array) -> Out:
        return function(*jax.tree.unflatten(tree, leaves))

    auto: Any = jax.sharding.auto_axes
    out: Out = auto(inside, out_sharding=named(meshes[0], specs))(*leaves)
    return out


def spec_of(x: Array) -> tuple[Names, ...]:
    """The explicit partition spec of an array, one entry per axis; None: the axis is replicated."""
    spec = tuple(jax.typeof(x).sharding.spec) if _is_explicit(x) else ()
    return (*spec, *(None,) * (x.ndim - len(spec)))


def full_like(x: Array, value: int) -> jax.Array:
    """int32 numbers `value` in the shape of `x`, sharded as `x` on explicit mesh axes."""
    if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
        return jnp.full_like(x, value, np.int32)
    # An explicit transfer, which `jax.transfer_guard` allows.
    values = np.full(x.shape, value, np.int32)
    placed: jax.Array = jax.device_put(values, x.sharding if x.committed else None)
    return placed


def like(x: Array, rows: int) -> jax.sharding.NamedSharding | None:
    """The sharding of `x` for an array with another number of `rows` on the first axis, replicated if
    the mesh does not divide them; None: `x` is not on explicit mesh axes."""
    if not _is_explicit(x):
        return None
    mesh, (first, *others) = jax.typeof(x).sharding.mesh, spec_of(x)
    parts = math.prod(mesh.shape[name] for name in names_of(first))
    return named(mesh, spec(None if rows % parts else first, *others))  # type: ignore[return-value]


def _is_explicit(x: object) -> bool:
    if not isinstance(x, jax.Array):
        return False
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
