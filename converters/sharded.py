"""Checkpoints larger than one machine: every process reads what its devices hold.

Tensors of .safetensors and uncompressed .npz files are mapped into memory and never read whole;
of other files one tensor is read at a time.
"""

import json
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmha import MHAParams
from jaxmha.converters import checkpoint, engine, layouts
from jaxmha.converters.arrays import NDArray

Specs = Callable[[Any], Any] | Any


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
    by views of the file, which read nothing.

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
      ValueError: keys or shapes do not fit the layout, or an axis of the mesh does not divide one
        of an array.
      TypeError: float64 without x64 enabled, which JAX would round.

    >>> import tempfile
    >>> mesh = jax.make_mesh((1,), ("tensor",))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = checkpoint.write(f"{folder}/a.npz", {"weight": np.ones((4, 3), "float32")})
    ...     load_sharded(f"{folder}/a.npz", mesh, {"weight": PartitionSpec("tensor")})["weight"].shape
    (4, 3)
    """
    with checkpoint.open(path) as file:
        names = [name for name in file if name.startswith(prefix)]
        state = _views(file, names)
        if layout is None:
            return _placed(mesh, state, specs)
        known = layouts()
        if layout not in known:
            raise ValueError(f"unknown layout {layout!r}: known are {', '.join(known)}")
        params, semantics = engine.import_params(
            [known[layout]], state, num_heads=num_heads, prefix=prefix, take=lambda view: view
        )
        return _placed_params(mesh, params, specs), semantics


def _placed(mesh: Mesh, state: Mapping[str, NDArray], specs: Specs) -> dict[str, jax.Array]:
    found: Mapping[str, Any] = specs(state) if callable(specs) else specs
    if unknown := sorted(found.keys() - state.keys()):
        raise ValueError(f"specs: the checkpoint has no {', '.join(unknown)}")
    return {name: _spread(name, view, mesh, found.get(name)) for name, view in state.items()}


def _placed_params(mesh: Mesh, params: MHAParams, specs: Specs) -> MHAParams:
    found = specs(params) if callable(specs) else specs
    tree: Any
    views, tree = jax.tree_util.tree_flatten_with_path(params)
    places = tree.flatten_up_to(found)
    arrays = [
        _spread(f"params{jax.tree_util.keystr(path)}", view, mesh, spec)
        for (path, view), spec in zip(views, places, strict=True)
    ]
    placed: MHAParams = jax.tree.unflatten(tree, arrays)
    return placed


def _spread(name: str, view: NDArray, mesh: Mesh, spec: PartitionSpec | None) -> jax.Array:
    """The array of a view; every part is read once, however many devices hold it."""
    if jax.dtypes.canonicalize_dtype(view.dtype) != view.dtype:
        raise TypeError(
            f"{name} is {view.dtype}, which JAX would round: enable x64 "
            '(jax.config.update("jax_enable_x64", True)) or convert the checkpoint'
        )
    empty: Any = PartitionSpec
    sharding = NamedSharding(mesh, empty() if spec is None else spec)
    try:
        sharding.shard_shape(view.shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    read: dict[tuple[Any, ...], NDArray] = {}

    def part(index: tuple[slice, ...] | None) -> NDArray:
        index = index or ()
        place = tuple((axis.start, axis.stop) for axis in index)
        if place not in read:
            read[place] = _read(view[index])
        return read[place]

    return jax.make_array_from_callback(view.shape, sharding, part)


def _read(part: NDArray) -> NDArray:
    return np.array(part, order="C", copy=True)


def _views(file: checkpoint.Checkpoint, names: list[str]) -> dict[str, NDArray]:
    """Tensors that are read where they are looked at, if the format allows it."""
    starts: dict[str, int] = {}
    if sys.byteorder == "little":
        find = {"safetensors": _in_safetensors, "npz": _in_npz}.get(file.format)
        starts = {} if find is None else find(file.path)
    views: dict[str, NDArray] = {}
    for name in names:
        info = file.info[name]
        if name in starts and info.size:
            views[name] = np.memmap(file.path, info.dtype, "r", starts[name], info.shape)
        else:
            views[name] = file[name]
    return views


def _in_safetensors(path: Path) -> dict[str, int]:
    """Where each tensor begins; `checkpoint.open` has checked the header."""
    with path.open("rb") as raw:
        (length,) = struct.unpack("<Q", raw.read(8))
        header = json.loads(raw.read(length))
    header.pop("__metadata__", None)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}


def _in_npz(path: Path) -> dict[str, int]:
    """Where each array begins that is little-endian, row-major and not compressed."""
    starts = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as raw:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                continue
            raw.seek(member.header_offset + 26)
            name, extra = struct.unpack("<HH", raw.read(4))
            raw.seek(name + extra, os.SEEK_CUR)
            read = np.lib.format.read_array_header_1_0
            if np.lib.format.read_magic(raw) != (1, 0):
                continue
            _, fortran, dtype = read(raw)
            if not fortran and dtype.newbyteorder("<") == dtype:
                starts[member.filename.removesuffix(".npy")] = raw.tell()
    return starts
