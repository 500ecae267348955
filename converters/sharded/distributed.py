"""Checkpoints larger than one machine's memory: each process handles the parts of its devices."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, overload

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmha import MHAParams, Semantics, checkpoint
from jaxmha.checkpoint.errors import listed
from jaxmha.converters.discovery import behaviours
from jaxmha.converters.layout import registry, transform
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.layout.base import Layout
from jaxmha.converters.migrate.lazy_slices import Slices
from jaxmha.extras import needed
from jaxmha.params import leaves

# Partition specs, or a function that returns them for given arrays.
Specs = Callable[[Any], Any] | MHAParams | Mapping[str, Any]
PIECE = 32 << 20  # bytes transferred to a device at once


@overload
def load_sharded(
    path: str | os.PathLike[str],
    mesh: Mesh,
    specs: Specs,
    *,
    layout: None = None,
    num_heads: int | None = None,
    prefix: str = "",
) -> dict[str, jax.Array]: ...


@overload
def load_sharded(
    path: str | os.PathLike[str],
    mesh: Mesh,
    specs: Specs,
    *,
    layout: str,
    num_heads: int | None = None,
    prefix: str = "",
) -> tuple[MHAParams, Semantics]: ...


def load_sharded(
    path: str | os.PathLike[str],
    mesh: Mesh,
    specs: Specs,
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    prefix: str = "",
) -> dict[str, jax.Array] | tuple[MHAParams, Semantics]:
    """Loads a checkpoint directly as arrays sharded over a mesh.

    Each process reads only the parts for its own devices, each part once: a conversion between
    layouts makes views of the file. Exceptions: tensors of compressed .npz files and of big-endian
    files are read whole, and orbax folders and chunked HDF5 in whole chunks. Digests cover whole
    tensors and are not checked.

    Args:
      path: a checkpoint that `checkpoint.open` reads.
      mesh: the mesh of the arrays.
      specs: the partition specs. With a layout, `MHAParams` of PartitionSpecs; without, a dict from
        names to PartitionSpecs (names without a spec are replicated). Or a function that makes
        either from the arrays, and may read their shapes and dtypes:
        `functools.partial(jaxmha.sharding.specs, mesh=mesh, tensor="tensor")`.
      layout: a name of `jaxmha.converters.layouts()`: converts the attention of one layer.
      num_heads: as in `import_params` of that framework.
      prefix: prefix of the keys to convert.

    Returns:
      With a layout `(MHAParams, Semantics)`; the metadata or the config.json of the checkpoint
      determines the semantics. Without a layout a dict of arrays by name.

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
        read = partial(
            transform.import_params,
            [_configured(file, registry.named(layout), prefix)],
            num_heads=num_heads,
            prefix=prefix,
            take=lambda view: view,
        )
        params, semantics = read(state)
        if slices.copied(
            map(np.asarray, leaves(params).values())
        ):  # no view can undo the packing of heads: read whole tensors
            params, semantics = read({name: file[name] for name in state})
        return _placed_params(mesh, params, specs, slices), semantics


def _configured(file: checkpoint.Checkpoint, layout: Layout, prefix: str) -> Layout:
    """The layout, with the semantics of the block at `prefix` if the checkpoint determines them."""
    at = prefix.rstrip("./")
    found = [b.layout.semantics for b in behaviours.blocks(file, [layout]) if b.prefix == at]
    return replace(layout, semantics=found[0]) if found else layout


def save_sharded(path: str | os.PathLike[str], arrays: Mapping[str, Any]) -> None:
    """Saves arrays of all processes as one orbax folder; each process writes its devices' parts.

    Every process calls it with the same names and the same path, which all processes can reach. The
    folder appears, complete, after every process has written. The next call with the same path
    removes the leftovers of an interrupted call.

    Args:
      path: the folder, which must not exist; use one per step.
      arrays: JAX or NumPy arrays by name, as `load_sharded` returns them; "/" makes a tree of
        names.

    Raises:
      ValueError: the path exists, there are no arrays, an array is empty, or names form no tree
        (`a` and `a/b`).
      TypeError: an entry is not an array, or has a dtype that JAX would round (float64 without
        x64).
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
    """Raises, before anything is written, if orbax cannot save an array or JAX would round it."""
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


def _refuse_rounded(name: str, dtype: np.dtype[Any], otherwise: str) -> None:
    if jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True) != dtype:
        raise TypeError(
            f"{name} is {dtype}, which JAX would round: enable x64 "
            f'(jax.config.update("jax_enable_x64", True)) or {otherwise}'
        )


def _starts(names: Iterable[str]) -> str:
    """Describes the first keys of the names, so that the user can choose a prefix."""
    starts = sorted({name.replace("/", ".").split(".")[0] for name in names})
    return f"they start with {listed(starts, 8)}" if starts else "there are none"


def _placed(
    mesh: Mesh, state: Mapping[str, NDArray], specs: Specs, slices: Slices
) -> dict[str, jax.Array]:
    found: Any = specs(state) if callable(specs) else specs
    if unknown := sorted(found.keys() - state.keys()):
        raise ValueError(f"specs: the checkpoint has no {', '.join(unknown)}")
    shardings = {
        name: _sharding_of(name, view, mesh, found.get(name)) for name, view in state.items()
    }
    return {name: _sharded(view, shardings[name], slices) for name, view in state.items()}


def _placed_params(mesh: Mesh, params: MHAParams, specs: Specs, slices: Slices) -> MHAParams:
    found = specs(params) if callable(specs) else specs
    tree: Any
    views, tree = jax.tree_util.tree_flatten_with_path(params)
    shardings = [
        _sharding_of(f"params{jax.tree_util.keystr(path)}", view, mesh, spec)
        for (path, view), spec in zip(views, tree.flatten_up_to(found), strict=True)
    ]
    arrays = [
        _sharded(view, sharding, slices)
        for (_, view), sharding in zip(views, shardings, strict=True)
    ]
    placed: MHAParams = jax.tree.unflatten(tree, arrays)
    return placed


def _sharding_of(name: str, view: NDArray, mesh: Mesh, spec: object) -> NamedSharding:
    """The sharding of an array; raises, before anything is read, if the spec does not fit."""
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


def _sharded(view: NDArray, sharding: NamedSharding, slices: Slices) -> jax.Array:
    """Makes the sharded array of a view; each part is read once, however many devices hold it."""
    read: dict[tuple[Any, ...], jax.Array] = {}
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(view.shape).items():
        box = tuple((axis.start, axis.stop) for axis in index or ())
        if box not in read:
            part: Any = (*(index or ()), ...)  # with the ellipsis, scalars give a view as well
            read[box] = _on(device, view[part], slices)
        arrays.append(jax.device_put(read[box], device))
    make: Any = jax.make_array_from_single_device_arrays
    found: jax.Array = make(view.shape, sharding, arrays, dtype=view.dtype)
    return found


def _on(device: jax.Device, view: NDArray, slices: Slices) -> jax.Array:
    """Puts a part on a device; a large part in pieces, to avoid a second copy in memory."""
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
def _placed_at(array: jax.Array, piece: jax.Array, at: int | jax.Array, axis: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, piece, at, axis)
