"""Sharding of attention over a mesh: PartitionSpecs of arrays, and the mesh axes of B, N, T and S.

`specs` and `activations` shard the arrays; `use` gives the same mesh axes to attention, which then
runs on each device's own batch rows and heads:

    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    names = {"data": "data", "tensor": "tensor"}
    params = jax.device_put(params, sharding.named(mesh, sharding.specs(params, **names)))
    with sharding.use(mesh, **names):
        out = jax.jit(jaxmha.multi_head_attention)(params, x)

On a mesh of explicit axes (`jax.sharding.AxisType.Explicit`) the types of the arrays carry their
sharding, and `use` is not needed.
"""

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmha.arrays import Array
from jaxmha.checks import require_type
from jaxmha.integers import require_sizes
from jaxmha.params import CANONICAL, MHAParams, check, leaves

__all__ = ["activations", "named", "specs", "unzigzag", "use", "zigzag", "zigzag_order"]

Names: TypeAlias = str | tuple[str, ...] | None
Specs = TypeVar("Specs")  # a pytree of partition specs


@dataclass(frozen=True)
class Axes:
    """The mesh axes over which attention is sharded.

    Attributes:
      mesh: the mesh, concrete or abstract.
      batch: mesh axes of B.
      heads: mesh axes of N, and of K where they divide it.
      context: the mesh axis of T and S, or None.
      zigzag: whether positions are in the order of `zigzag`.
    """

    mesh: Mesh | AbstractMesh
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    context: str | None = None
    zigzag: bool = False

    def size(self, names: tuple[str, ...]) -> int:
        """Number of devices along mesh axes."""
        return _devices(self.mesh, names)


# The axes of `use`. User contexts are part of the keys of JAX's compilation cache, so that each set
# of axes has its own program.
AXES: Any = jax.make_user_context(None)  # type: ignore[no-untyped-call]


def use(
    mesh: Mesh | AbstractMesh,
    *,
    data: Names = None,
    fsdp: Names = None,
    tensor: Names = None,
    context: Names = None,
    zigzag: bool = False,
) -> AbstractContextManager[None]:
    """In this context, attention runs on each device's own batch rows, heads and positions.

    The context does not change results. In it, devices exchange no scores, heads or batch rows, and
    kernels compute the part of one device instead of the whole on every device.

    Args:
      mesh: mesh of the arrays; must equal the mesh of `jax.set_mesh`, if one is set.
      data: mesh axes of the batch.
      fsdp: mesh axes of the batch that shard the features of parameters too.
      tensor: mesh axes of the heads.
      context: the mesh axis of the positions T and S, for `implementation="ring"` or
        `"allgather"`.
      zigzag: the positions of inputs and outputs are in the order of `zigzag`, which balances
        causal work over the devices of `context`. Masks, lengths, windows and dropout still refer
        to true positions: give segment ids and padding in natural order, not through `zigzag`,
        since ids in another order are other documents, without an error.

    Raises:
      ValueError: the mesh has no such axis, one is named twice, or several are given as `context`.

    >>> import jax
    >>> with use(jax.make_mesh((1,), ("data",)), data="data"):
    ...     current().batch
    ('data',)
    """
    positions = names_of(context)
    if len(positions) > 1:
        raise ValueError(f"context must be one mesh axis, got {positions}")
    batch, only = (*names_of(data), *names_of(fsdp)), positions[0] if positions else None
    axes = Axes(mesh, batch, names_of(tensor), only, zigzag)
    named = (*axes.batch, *axes.heads, *positions)
    for name in named:
        if name not in mesh.shape:
            raise ValueError(f"the mesh has axes {tuple(mesh.shape)}, not {name!r}")
    if len(set(named)) < len(named):
        raise ValueError(f"each mesh axis may be given once, got {named}")
    if zigzag and not positions:
        raise ValueError("zigzag needs context, the mesh axis of the positions")
    entered: AbstractContextManager[None] = AXES(axes)
    return entered


def current() -> Axes | None:
    """The axes set by `use` or explicit types, without axes that are manual already (`shard_map`).

    Raises:
      ValueError: `jax.set_mesh` has set another mesh.
    """
    axes: Axes | None = AXES.value
    if axes is None:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return axes
    for name in (*axes.batch, *axes.heads, *names_of(axes.context)):
        if mesh.shape.get(name) != axes.mesh.shape[name]:
            raise ValueError(
                f"sharding.use names axis {name!r} of a mesh {dict(axes.mesh.shape)}, and the mesh "
                f"that is set is {dict(mesh.shape)}: give one mesh to both jax.set_mesh and "
                "sharding.use"
            )
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    free = {name for name, kind in types.items() if kind != AxisType.Manual}
    batch, heads = (tuple(n for n in x if n in free) for x in (axes.batch, axes.heads))
    context = axes.context if axes.context in free else None
    if not (batch or heads or context):
        return None
    return Axes(mesh, batch, heads, context, axes.zigzag and context is not None)


def specs(
    params: MHAParams,
    *,
    data: Names = None,
    fsdp: Names = None,
    tensor: Names = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> MHAParams:
    """The PartitionSpec of every parameter, in the structure of `params`.

    `tensor` shards heads, `fsdp` shards features (Dq, Dk, Dv, Do of kernels). `data` has no effect,
    since parameters are replicated along it; it is accepted so that the arguments of `use` fit. An
    axis whose size the devices do not divide is replicated, such as K of grouped or multi-query
    attention if it is not a multiple of the devices along `tensor`.

    Args:
      params: arrays, or anything with shapes; leading axes (stacked layers) are replicated.
      data, fsdp, tensor: names of mesh axes, as in `use`.
      mesh: mesh that gives the axis sizes; default the mesh of `use` or `jax.set_mesh`. Without a
        mesh, every size above 1 is assumed to be divisible.

    Raises:
      ValueError: `tensor` does not divide N, or `use` rejects the mesh axes.

    >>> from jaxmha import init_params
    >>> params = init_params(jax.random.key(0), num_heads=4, num_kv_heads=1, features=8)
    >>> found = specs(params, fsdp="fsdp", tensor="tensor")
    >>> found.query.kernel, found.key.kernel
    (P('fsdp', 'tensor', None), P('fsdp', None, None))
    """
    require_type(MHAParams, params=params)
    shapes = {name: tuple(x.shape) for name, x in leaves(params).items()}
    leading = len(shapes["query.kernel"]) - 3
    sizes = check(params, leading)
    mesh = mesh or _mesh()
    heads, features = names_of(tensor), names_of(fsdp)
    used = {*names_of(data), *features, *heads}
    # Only for the errors of `use`; the context is not entered.
    use(mesh or AbstractMesh((1,) * len(used), tuple(used)), data=data, fsdp=fsdp, tensor=tensor)

    def divides(names: tuple[str, ...], size: int) -> bool:
        if mesh is None:
            return size > 1
        return size % _devices(mesh, names) == 0

    if heads and not divides(heads, sizes["N"]):
        raise ValueError(
            f"N={sizes['N']} query heads are not a multiple of the devices along {heads}"
        )
    where = {"N": heads, "K": heads, **dict.fromkeys(("Dq", "Dk", "Dv", "Do"), features)}

    def spec_of_leaf(name: str) -> PartitionSpec:
        kernel = name.endswith("kernel")
        axes: list[Names] = [None] * leading
        for letter in CANONICAL[name].split():
            names = where.get(letter, ())
            sharded = names and (kernel or letter in "NK") and divides(names, sizes[letter])
            axes.append(names if sharded else None)
        return spec(*axes)

    # The leaves of the pytree have the order of `leaves(params)`.
    found: MHAParams = jax.tree.unflatten(jax.tree.structure(params), map(spec_of_leaf, shapes))
    return found


def activations(
    *, data: Names = None, fsdp: Names = None, tensor: Names = None, context: Names = None
) -> PartitionSpec:
    """The PartitionSpec of features `(B, T, D)`.

    D is never sharded, so that `tensor` has no effect; it is accepted so that the arguments of
    `use` fit.

    >>> activations(data="data", fsdp="fsdp", tensor="tensor")
    P(('data', 'fsdp'), None, None)
    """
    del tensor
    return spec((*names_of(data), *names_of(fsdp)), names_of(context), None)


def named(mesh: Mesh | AbstractMesh, specs: Specs) -> Specs:
    """`NamedSharding` of every spec of a pytree.

    >>> named(jax.make_mesh((1,), ("data",)), [PartitionSpec("data")])[0].spec
    P('data',)
    """
    shardings: Specs = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return shardings


def zigzag(x: Array, devices: int, axis: int = 1) -> Array:
    """Reorders positions so that each of `devices` holds one early and one late part of them.

    Device r then holds parts r and `2 * devices - 1 - r` of `2 * devices`, which balances causal
    work. It is for inputs, labels and weights of a loss; the arrays of a `Mask`, such as segment
    ids, stay in natural order. Source: Zhu, "ring-flash-attention" (2024); Llama Team, "The Llama 3
    Herd of Models" (2024), section 3.3.2.

    Raises:
      ValueError: `devices` is below 1, or the axis is not a multiple of `2 * devices`.

    >>> zigzag(np.arange(8), 2, axis=0).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    return x.take(zigzag_order(x.shape[axis], devices), axis)


def unzigzag(x: Array, devices: int, axis: int = 1) -> Array:
    """Restores the natural order of positions that `zigzag` reordered.

    >>> unzigzag(zigzag(np.arange(8), 2, axis=0), 2, axis=0).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return x.take(np.argsort(zigzag_order(x.shape[axis], devices)), axis)


def zigzag_order(size: int, devices: int) -> np.ndarray[Any, np.dtype[Any]]:
    """The true position at each index of the zig-zag order."""
    require_sizes(devices=devices)
    if size % (2 * devices):
        raise ValueError(
            f"zig-zag order over {devices} devices needs a multiple of {2 * devices} positions, "
            f"got {size}"
        )
    parts = np.arange(size).reshape(2 * devices, -1)
    order = np.stack([np.arange(devices), 2 * devices - 1 - np.arange(devices)], 1)
    return parts[order.reshape(-1)].reshape(-1)


@overload
def in_order(x: None, axis: int) -> None: ...
@overload
def in_order(x: Array, axis: int) -> jax.Array: ...
def in_order(x: Array | None, axis: int) -> jax.Array | None:
    """Reorders an axis of true positions to zig-zag order if the features are in that order."""
    axes = current()
    if x is None or axes is None or not axes.zigzag or x.shape[axis] == 1:
        return x  # type: ignore[return-value]  # NumPy stays NumPy
    assert axes.context is not None
    return jnp.take(x, zigzag_order(x.shape[axis], axes.size((axes.context,))), axis)


def spec(*axes: Names) -> PartitionSpec:
    """A PartitionSpec; axes without names are replicated.

    >>> spec("data", (), ("a", "b"))
    P('data', None, ('a', 'b'))
    """
    entries = [
        names[0] if isinstance(names, tuple) and len(names) == 1 else names for names in axes
    ]
    return PartitionSpec(*(names or None for names in entries))  # type: ignore[no-untyped-call]


def _mesh() -> Mesh | AbstractMesh | None:
    axes: Axes | None = AXES.value
    if axes is not None:
        return axes.mesh
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def names_of(names: Names) -> tuple[str, ...]:
    """The names of mesh axes as a tuple."""
    found = () if names is None else (names,) if isinstance(names, str) else names
    if not isinstance(found, tuple | list):
        raise TypeError(
            f"mesh axes must be given by name, as a string, a tuple of strings or None, got "
            f"{type(names).__name__}"
        )
    return tuple(found)


def _devices(mesh: Mesh | AbstractMesh, names: tuple[str, ...]) -> int:
    return math.prod(int(mesh.shape[name]) for name in names)
