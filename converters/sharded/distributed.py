"""Checkpoints larger than one machine: every process reads, and writes, what its devices hold."""

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmha import MHAParams, checkpoint
from jaxmha.converters.layout import registry, transform
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.migrate.lazy_slices import Slices
from jaxmha.extras import needed

Specs = Callable[[Any], Any] | Any
PIECE = 32 << 20  # bytes that go to a device at once
SHOWN = 8  # names in a message


def load_sharded(
    path: str | os.PathLike[str],
    mesh: Mesh,
    specs: Specs,
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    prefix: str = "",
) -> Any:
    """Arrays spread over a mesh, straight from a checkpoint.

    Each process reads the parts that its own devices hold, each part once; layouts are converted
    by views of the file, which read nothing. Of .npz files that are compressed, and of big-endian
    ones, a tensor is read whole; of orbax folders and chunked HDF5, whole chunks. Digests are of
    whole tensors, and are not checked.

    Args:
      path: a checkpoint that `checkpoint.open` reads.
      mesh: of the arrays.
      specs: where they lie. With a layout, `MHAParams` of PartitionSpecs; without, a dict from
        names to PartitionSpecs (a name without one is on every device). Or a function that makes
        either from the arrays, of which shapes and dtypes may be asked:
        `functools.partial(jaxmha.sharding.specs, mesh=mesh, tensor="tensor")`.
      layout: a name of `jaxmha.converters.layouts()`: attention of one layer is converted.
      num_heads: as in `import_params` of that framework.
      prefix: of the keys.

    Returns:
      With a layout `(MHAParams, Semantics)`, else a dict of arrays by name.

    Raises:
      CheckpointError: the file cannot be read.
      ValueError: keys or shapes do not fit the layout, no key has the prefix, or a PartitionSpec
        does not fit its array and the mesh.
      TypeError: float64 without x64 enabled, which JAX would round, or a spec of another type.

    >>> import tempfile
    >>> import numpy as np
    >>> mesh = jax.make_mesh((1,), ("tensor",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = checkpoint.write(f"{folder}/a.npz", {"weight": np.ones((4, 3), "float32")})
    ...     load_sharded(f"{folder}/a.npz", mesh, {"weight": PartitionSpec("tensor")})["weight"].shape
    (4, 3)
    """
    with checkpoint.open(path, mmap=True) as file:
        slices = Slices(file, [name for name in file if name.startswith(prefix)])
        state = slices.views
        if layout is None:
            if prefix and not state:
                raise ValueError(f"no tensor's name starts with {prefix!r}: {_starts(file)}")
            return _placed(mesh, state, specs, slices)
        known = {entry.name: entry for entry in registry.LAYOUTS}
        if layout not in known:
            raise ValueError(f"unknown layout {layout!r}: known are {', '.join(known)}")
        params, semantics = transform.import_params(
            [known[layout]], state, num_heads=num_heads, prefix=prefix, take=lambda view: view
        )
        return _placed_params(mesh, params, specs, slices), semantics


def save_sharded(path: str | os.PathLike[str], arrays: Mapping[str, Any]) -> None:
    """Arrays of all processes as one folder of orbax: each process writes what its devices hold.

    Every process calls it with the same names and path, which all of them can reach. The folder
    is there, complete, once every process has written; what an interrupted call left is removed
    by the next one to the same path.

    Args:
      path: of the folder, which must not exist: keep one per step.
      arrays: of JAX or NumPy, by name as `load_sharded` gives them; "/" makes a tree of names.

    Raises:
      ValueError: the path exists, there is nothing to save or in an array, or names make no tree.
      TypeError: not an array, or a dtype that JAX would round (float64 without x64 enabled).
      ImportError: orbax is not installed: `pip install 'jaxmha[orbax]'`.

    >>> import tempfile
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_sharded(f"{folder}/step1", {"block/weight": jax.numpy.ones((4, 3))})
    ...     load_sharded(f"{folder}/step1", mesh, {})["block/weight"].shape
    (4, 3)
    """
    with needed("orbax"):
        import orbax.checkpoint as ocp

    _refuse_unsaved(arrays)
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *outer, last = name.split("/")
        branch = tree
        for key in outer:
            branch = branch.setdefault(key, {})
        branch[last] = array
    with ocp.StandardCheckpointer() as saver:
        saver.save(os.path.abspath(path), tree)


def _refuse_unsaved(arrays: Mapping[str, Any]) -> None:
    """What orbax would not save, or `load_sharded` not load, is named before anything is written."""
    if not arrays:
        raise ValueError("there are no arrays to save")
    for name, array in arrays.items():
        keys = name.split("/")
        if "" in keys:
            raise ValueError(f"{name!r}: a name is keys joined by '/', and none of them is empty")
        outer = ("/".join(keys[:n]) for n in range(1, len(keys)))
        if clash := next((key for key in outer if key in arrays), None):
            raise ValueError(f"{clash} is both a tensor and a folder (of {name}): rename one")
        if not isinstance(array, jax.Array | np.ndarray | np.generic):
            raise TypeError(f"{name}: expected an array, got {type(array).__name__}")
        _refuse_rounded(name, array.dtype, "save it in another dtype")
        if not array.size:
            raise ValueError(f"{name} has shape {array.shape}: orbax saves no empty arrays")


def _refuse_rounded(name: str, dtype: Any, otherwise: str) -> None:
    if jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True) != dtype:
        raise TypeError(
            f"{name} is {dtype}, which JAX would round: enable x64 "
            f'(jax.config.update("jax_enable_x64", True)) or {otherwise}'
        )


def _starts(names: Iterable[str]) -> str:
    """The first keys of names, to choose a prefix from."""
    starts = sorted({name.replace("/", ".").split(".")[0] for name in names})
    more = f" and {len(starts) - SHOWN} more" if len(starts) > SHOWN else ""
    return f"they start with {', '.join(starts[:SHOWN])}{more}" if starts else "there are none"


def _placed(
    mesh: Mesh, state: Mapping[str, NDArray], specs: Specs, slices: Slices
) -> dict[str, jax.Array]:
    found: Mapping[str, Any] = specs(state) if callable(specs) else specs
    if unknown := sorted(found.keys() - state.keys()):
        raise ValueError(f"specs: the checkpoint has no {', '.join(unknown)}")
    places = {name: _place(name, view, mesh, found.get(name)) for name, view in state.items()}
    return {name: _spread(view, places[name], slices) for name, view in state.items()}


def _placed_params(mesh: Mesh, params: MHAParams, specs: Specs, slices: Slices) -> MHAParams:
    found = specs(params) if callable(specs) else specs
    tree: Any
    views, tree = jax.tree_util.tree_flatten_with_path(params)
    places = [
        _place(f"params{jax.tree_util.keystr(path)}", view, mesh, spec)
        for (path, view), spec in zip(views, tree.flatten_up_to(found), strict=True)
    ]
    arrays = [_spread(view, place, slices) for (_, view), place in zip(views, places, strict=True)]
    placed: MHAParams = jax.tree.unflatten(tree, arrays)
    return placed


def _place(name: str, view: NDArray, mesh: Mesh, spec: Any) -> NamedSharding:
    """Where an array lies; nothing has been read when it cannot lie there."""
    _refuse_rounded(name, view.dtype, "convert the checkpoint")
    empty: Any = PartitionSpec
    spec = empty() if spec is None else spec
    if not isinstance(spec, PartitionSpec):
        raise TypeError(f"{name}: expected a PartitionSpec, got {spec!r}")
    if len(spec) > view.ndim:
        raise ValueError(f"{name}: {spec} has {len(spec)} axes, the tensor has shape {view.shape}")
    axes = [axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,))]
    if twice := {axis for axis in axes if isinstance(axis, str) and axes.count(axis) > 1}:
        raise ValueError(f"{name}: {spec} names {', '.join(sorted(twice))} twice")
    try:
        sharding = NamedSharding(mesh, spec)
        sharding.shard_shape(view.shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return sharding


def _spread(view: NDArray, sharding: NamedSharding, slices: Slices) -> jax.Array:
    """The array of a view; every part is read once, however many devices hold it."""
    read: dict[tuple[Any, ...], jax.Array] = {}
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(view.shape).items():
        place = tuple((axis.start, axis.stop) for axis in index or ())
        if place not in read:
            part: Any = (*(index or ()), ...)  # a view where there are no axes, too
            read[place] = _on(device, view[part], slices)
        arrays.append(jax.device_put(read[place], device))
    make: Any = jax.make_array_from_single_device_arrays
    found: jax.Array = make(view.shape, sharding, arrays, dtype=view.dtype)
    return found


def _on(device: Any, view: NDArray, slices: Slices) -> jax.Array:
    """A part on a device; a large one goes there piece by piece, and is never whole beside it."""
    if view.nbytes <= PIECE or not slices.is_mapped(view):
        alone: jax.Array = jax.device_put(slices.read(view), device)
        return alone
    axis = int(np.argmax(view.shape))
    rows = max(1, PIECE * view.shape[axis] // view.nbytes)
    array = jax.numpy.zeros(view.shape, view.dtype, device=device)
    for at in range(0, view.shape[axis], rows):
        index = (*(slice(None),) * axis, slice(at, at + rows))
        array = _placed_at(array, jax.device_put(slices.read(view[index]), device), at, axis)
    return array


@partial(jax.jit, donate_argnums=0, static_argnames="axis")
def _placed_at(array: jax.Array, piece: jax.Array, at: Any, axis: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, piece, at, axis)
