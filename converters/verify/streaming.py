"""Streaming comparison of layers in files, leaf by leaf, with one tensor in memory at a time."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from jaxmha import Semantics, checkpoint
from jaxmha.checkpoint.digests import hasher
from jaxmha.checkpoint.tensor import blocks as blocks_of
from jaxmha.checkpoint.tensor import to_bytes
from jaxmha.converters.discovery import latent_blocks, layer_layouts
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.other_layers import Module
from jaxmha.converters.layout import fill, fold, transform
from jaxmha.converters.layout.arrays import NDArray, cast
from jaxmha.converters.layout.base import Entry, Layout
from jaxmha.converters.migrate import lazy_tensors
from jaxmha.converters.migrate.lazy_slices import Slices
from jaxmha.converters.migrate.pipeline import DIGEST
from jaxmha.params import leaves

_AT_ONCE = 4 << 20  # bytes of a leaf compared at once

# Function that splits a tensor into leaves, as views where NumPy can make them.
Unpack = Callable[[NDArray], Mapping[str, NDArray]]


class File(NamedTuple):
    """A checkpoint, opened twice: to read whole tensors, and memory-mapped to read parts of them.

    Attributes:
      digests: name -> digest of each tensor read so far.
    """

    whole: checkpoint.Checkpoint
    mapped: checkpoint.Checkpoint
    digests: dict[str, str]


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[File]:
    """Opens a checkpoint as a `File`; raises as `checkpoint.open` does."""
    with (
        checkpoint.open(path, dequantise=True, unbox=True) as whole,
        checkpoint.open(path, mmap=True, dequantise=True, unbox=True) as mapped,
    ):
        yield File(whole, mapped, {})


class FileLayer(NamedTuple):
    """One layer in a file.

    Attributes:
      tensors: name -> function that splits this tensor into its leaves.
      dtype: dtype to which floating leaves are cast before the comparison.
      semantics: behaviour of an attention block.
      factors: leaf -> factor that multiplies it before the cast (`fold`).
      zeros: leaf -> zeros of its shape, for biases that no tensor holds (`fill`).
    """

    file: File
    tensors: Mapping[str, Unpack]
    dtype: str | None = None
    semantics: Semantics = Semantics()
    factors: Mapping[str, float] = MappingProxyType({})
    zeros: Mapping[str, NDArray] = MappingProxyType({})


def attention(
    file: File,
    block: Block,
    num_heads: int | None,
    names: Iterable[str],
    scaled_for: Layout | None = None,
    filled_for: Layout | None = None,
) -> tuple[FileLayer, int]:
    """Returns an attention block as a `FileLayer`, and its head count.

    Tensors in `names` outside the block are read without leaves. `scaled_for`: a layout for whose
    logit scale the queries are multiplied. `filled_for`: a layout whose required biases become
    zeros if no tensor holds them.
    """
    params, semantics, sizes = lazy_tensors.meta(block, file.whole.info, num_heads)
    by = 1.0
    if scaled_for is not None:
        by = fold.factor(semantics, scaled_for, sizes["H"])
        semantics = replace(semantics, scale=scaled_for.semantics.scale)
    factors = dict.fromkeys(fold.which(leaves(params)), by) if by != 1.0 else {}
    tensors = dict.fromkeys(names, _nothing)
    for entry in block.layout.entries:
        if entry.key in block.keys:
            tensors[block.keys[entry.key]] = partial(_unpack, block.layout, entry, sizes)
    zeros = {} if filled_for is None else fill.missing(filled_for, leaves(params))
    layer = FileLayer(file, tensors, semantics=semantics, factors=factors, zeros=zeros)
    return layer, np.shape(params.query.kernel)[-2]


def _unpack(
    layout: Layout, entry: Entry, sizes: Mapping[str, int], array: NDArray
) -> Mapping[str, NDArray]:
    return transform.unpack(layout, entry, array, sizes)


def other_layer(file: File, module: Module) -> FileLayer:
    """Returns a layer other than attention as a `FileLayer`."""
    entries = module.entries.items()
    tensors = {module.keys[entry.key]: partial(_leaf_of, leaf, entry) for leaf, entry in entries}
    return FileLayer(file, dict[str, Unpack](tensors))


def latent(file: File, prefix: str) -> FileLayer:
    """Returns the latent attention at `prefix` as a `FileLayer`; ValueError if there is none."""
    blocks = latent_blocks.find(file.whole, known=False, at=prefix)
    if not blocks:
        raise ValueError(f"no latent attention is at {prefix or '(top)'}")
    (block,) = blocks
    return FileLayer(file, {name: block.held[key].split for key, name in block.keys.items()})


def _leaf_of(leaf: str, entry: Entry, array: NDArray) -> Mapping[str, NDArray]:
    return {leaf: layer_layouts.unpack(entry, array)}


def whole(file: File, name: str) -> FileLayer:
    """Returns a tensor that was copied unchanged as a `FileLayer` with a single leaf."""
    return FileLayer(file, {name: lambda array: {"": array}})


def unread(file: File, names: Iterable[str]) -> FileLayer:
    """Returns tensors of unknown leaves as a `FileLayer` without leaves: only digests are made."""
    return FileLayer(file, dict.fromkeys(names, _nothing))


def _nothing(_: NDArray) -> Mapping[str, NDArray]:
    return {}


class Views:
    """The leaves of a layer as lazy views; data is read part by part.

    Attributes:
      leaves: views of the file, for shapes and slicing only.
    """

    def __init__(self, layer: FileLayer) -> None:
        self.layer, self._slices = layer, Slices(layer.file.mapped, list(layer.tensors))
        self.leaves: dict[str, NDArray] = {**layer.zeros}
        for name, unpack in layer.tensors.items():
            found = unpack(self._slices.views[name])
            if self._slices.copied(found.values()):  # a view cannot undo this packing
                found = unpack(layer.file.whole[name])
            self.leaves |= found

    def read(self, leaf: str, index: tuple[int | slice, ...]) -> NDArray:
        """Reads a part of a leaf, applies its factor, and casts it."""
        if leaf in self.layer.zeros:
            return cast(np.array(self.leaves[leaf][(*index, ...)]), self.layer.dtype)
        array = self._slices.read(self.leaves[leaf][(*index, ...)])
        return cast(fold.times(array, self.layer.factors.get(leaf, 1.0), leaf), self.layer.dtype)


class _Seen(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype
    digest: str


def differences(a: FileLayer, b: FileLayer) -> list[str]:
    """Describes leaves that are not bit-identical, and records the digest of every tensor."""
    ours, theirs = _seen(a), _seen(b)
    found = []
    for leaf in {**ours, **theirs}:
        x, y = ours.get(leaf), theirs.get(leaf)
        if x is not None and y is None and _is_zero_bias(leaf, x):
            continue  # `fill` drops biases of zeros that the target layout cannot store
        if x is None or y is None:
            found.append(f"{leaf} is only in the {'target' if x is None else 'source'}")
        elif x[:2] != y[:2]:
            found.append(f"{leaf} is {x.dtype} {x.shape}, and {y.dtype} {y.shape} in the target")
        elif x.digest != y.digest:
            differing = _differing(Views(a), Views(b), leaf, ())
            text = f"{leaf}: {differing} of {math.prod(x.shape)} elements differ"
            found.append(text.removeprefix(": "))
    return found


def _is_zero_bias(leaf: str, seen: _Seen) -> bool:
    return leaf.endswith(".bias") and seen.digest == digest(np.zeros(seen.shape, seen.dtype))


def _seen(layer: FileLayer) -> dict[str, _Seen]:
    found: dict[str, _Seen] = {}
    for name in layer.tensors:
        found |= _leaves_seen(layer, name)
    for leaf, array in layer.zeros.items():
        dtype = cast(np.empty(0, array.dtype), layer.dtype).dtype
        found[leaf] = _Seen(array.shape, dtype, digest(np.array(array), layer.dtype))
    return found


def _leaves_seen(layer: FileLayer, name: str) -> dict[str, _Seen]:
    array, known = layer.file.whole[name], layer.file.digests
    known[name] = digest(array)
    found = {}
    for leaf, unpacked in layer.tensors[name](array).items():
        part = fold.times(unpacked, layer.factors.get(leaf, 1.0), leaf)
        alike = known[name] if part is array and not layer.dtype else digest(part, layer.dtype)
        dtype = cast(np.empty(0, part.dtype), layer.dtype).dtype
        found[leaf] = _Seen(part.shape, dtype, alike)
    return found


def _differing(a: Views, b: Views, leaf: str, index: tuple[int | slice, ...]) -> int:
    """Counts elements of a leaf that are not bit-identical, reading it piece by piece."""
    view = a.leaves[leaf][(*index, ...)]
    if view.nbytes <= _AT_ONCE or not view.ndim:
        bits = (x.read(leaf, index).reshape(-1, 1).view(np.uint8) for x in (a, b))
        return int(np.not_equal(*bits).any(axis=-1).sum())
    step = max(1, _AT_ONCE * len(view) // view.nbytes)
    pieces = (i if step == 1 else slice(i, i + step) for i in range(0, len(view), step))
    return sum(_differing(a, b, leaf, (*index, piece)) for piece in pieces)


def digest(array: NDArray, dtype: str | None = None) -> str:
    """Computes `checkpoint.digest` of the array after a cast to `dtype`."""
    state = hasher(DIGEST, "")
    for block in blocks_of(array):
        state.update(to_bytes(cast(block, dtype)).data)
    return f"{DIGEST}:{state.hexdigest()}"
