"""Lazy tensors of the destination; each is computed from the source on demand."""

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxmha import MHAParams, Semantics
from jaxmha.checkpoint import Lazy, TensorInfo
from jaxmha.checkpoint.formats import nnx_values, orbax
from jaxmha.converters.discovery import layer_layouts
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.layer_layouts import Convention
from jaxmha.converters.discovery.other_layers import Module
from jaxmha.converters.layout import alternatives, fill, fold, transform, uneven, validation
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.layout.base import Entry, Layout
from jaxmha.converters.layout.validation import refuse_arrays, refuse_keys, refuse_mixed
from jaxmha.converters.migrate import of_optimizers
from jaxmha.dims import parse
from jaxmha.params import CANONICAL, from_leaves, leaves

_EXTRA_ROOM = 64 << 20  # bytes cached in addition to the size of the largest array


@runtime_checkable
class Arrays(Protocol):
    """Anything that returns tensors by name."""

    def __getitem__(self, name: str) -> NDArray: ...


@runtime_checkable
class Tensors(Arrays, Protocol):
    """The source of a plan: an open checkpoint, or a state in memory."""

    info: Mapping[str, Any]
    metadata: Mapping[str, str]
    names: Mapping[str, str]
    others: tuple[str, ...]


class Made(NamedTuple):
    """One lazy tensor of the destination.

    Attributes:
      info: shape and dtype. load: function that computes the tensor.
      sources: names of the source tensors. arrow: their axes -> the axes of this tensor, in
        jaxmha's axis letters; "" if they are the same.
    """

    info: TensorInfo
    load: Callable[[], NDArray]
    sources: tuple[str, ...]
    arrow: str = ""


def lazy(made: Mapping[str, Made]) -> Lazy:
    """Wraps tensors for `checkpoint.write`, which reads all sizes first, then tensor by tensor."""
    return Lazy({name: one.info for name, one in made.items()}, lambda name: made[name].load())


def renamed(
    made: Mapping[str, Made], unboxed: frozenset[str], destination: str | os.PathLike[str]
) -> Mapping[str, Made]:
    """Tensors by the names from which Flax restores a state: in an orbax destination, values of nnx
    variables get their ending again. `unboxed`: names of the source that were read without it."""
    if not unboxed or Path(destination).suffix != orbax.SUFFIX:
        return made
    return nnx_values.boxed(
        made, but={name for name, one in made.items() if not unboxed.issuperset(one.sources)}
    )


class Parts:
    """Reads the arrays of a source, and the leaves of packed arrays.

    Callers request the leaves of a packed array one by one, with other arrays in between. A packed
    array is cached until its last leaf is requested, as long as all cached arrays fit into the size
    of the largest array plus `_EXTRA_ROOM` bytes.
    """

    def __init__(self, file: Tensors) -> None:
        self.file = file
        self._room = max((one.nbytes for one in file.info.values()), default=0) + _EXTRA_ROOM
        self._kept: OrderedDict[str, dict[str, NDArray]] = OrderedDict()

    def __getitem__(self, name: str) -> NDArray:
        """Reads a whole array, after dropping least recently used arrays from the cache for it."""
        wanted = self.file.info[name].nbytes
        while self._kept and wanted + self._held() > self._room:
            self._kept.popitem(last=False)
        return np.asarray(self.file[name])

    def _held(self) -> int:
        return sum(self.file.info[name].nbytes for name in self._kept)

    def leaf(
        self, name: str, leaf: str, unpack: Callable[[NDArray], dict[str, NDArray]]
    ) -> NDArray:
        """Returns one leaf of the array `name`; `unpack` splits the array into its leaves."""
        if leaf not in self._kept.get(name, {}):
            self._kept.pop(name, None)
            self._kept[name] = unpack(self[name])
        leaves = self._kept[name]
        self._kept.move_to_end(name)
        found = leaves.pop(leaf)
        if not leaves:
            del self._kept[name]
        return found


def meta(
    block: Block, info: Mapping[str, Any], num_heads: int | None
) -> tuple[MHAParams, Semantics, dict[str, int]]:
    """Returns parameters and semantics as `block.read` does, and the size of each axis letter.

    The arrays are placeholders that use no memory. Raises ValueError as `block.read` does.
    """
    block.refuse()
    layout = block.layout
    arrays = {key: info[name] for key, name in block.keys.items()}
    refuse_keys(layout, arrays, block.prefix)
    refuse_arrays(layout, arrays, block.prefix)
    shapes = {key: tuple(one.shape) for key, one in arrays.items()}
    sizes = transform.bind_shapes(layout, shapes, num_heads, block.prefix)
    found = {}
    for entry in layout.entries:
        if entry.key in arrays:
            lead = shapes[entry.key][: len(shapes[entry.key]) - len(parse(entry.axes))]
            for leaf in entry.leaves:
                shape = (*lead, *(sizes[a] for a in layout.tied(CANONICAL[leaf]).split()))
                nothing = np.zeros((), arrays[entry.key].dtype)
                found[leaf] = np.broadcast_to(nothing, shape)
    params = from_leaves(dict(found))
    return params, transform.behaviour(layout, found), sizes


def attention(
    block: Block,
    info: Mapping[str, Any],
    parts: Parts,
    target: Layout,
    prefix: str,
    num_heads: int | None,
    fold_scale: bool = False,
    fill_bias: str | None = None,
) -> tuple[dict[str, Made], MHAParams, list[str]]:
    """Converts a block to another layout, as lazy tensors.

    Returns the lazy tensors, placeholders of the block's leaves (as `meta`), and notes on a folded
    scale and on biases of zeros that were added or dropped. Raises ValueError if the block cannot
    be read, or if the layout cannot hold it.
    """
    params, semantics, sizes = meta(block, info, num_heads)
    params, zeros = fill.filled(params, target, fill_bias)
    by, notes = 1.0, [fill.note(target, zeros)] * bool(zeros)
    source = _Source(block, parts, sizes)
    if dropped := [x for x in fill.unheld(target, leaves(params)) if not source.leaf(x).any()]:
        kept = {leaf: array for leaf, array in leaves(params).items() if leaf not in dropped}
        params = from_leaves(dict(kept))
        notes.append(fill.dropped_note(target, dropped))
    if fold_scale:
        by = fold.factor(semantics, target, sizes["H"])
        if by != 1.0:
            of_optimizers.refuse_scaling(parts.file)
            dtype = np.asarray(params.query.kernel).dtype
            notes.append(fold.note(semantics, by, dtype, sizes["H"]))
        semantics = replace(semantics, scale=target.semantics.scale)
    try:
        validation.refuse_export(target, params, semantics)
    except ValueError as error:
        raise ValueError(f"{error}{alternatives.remedy(target, params, semantics)}") from error
    present, sizes = leaves(params), sizes | _letters(params)
    folded = fold.which(present)

    def leaf(name: str) -> NDArray:
        if name in zeros:
            return np.zeros_like(zeros[name])
        found = source.leaf(name)
        return fold.times(found, by, source.key(name)) if name in folded else found

    made = {}
    for entry in target.entries:
        if entry.leaves[0] not in present:
            continue
        of = [np.asarray(present[name]) for name in entry.leaves]
        refuse_mixed(entry, of)
        read = dict.fromkeys(source.entries[x] for x in entry.leaves if x in source.entries)
        terms = [e.axes for e in read] + ["zeros"] * any(x in zeros for x in entry.leaves)
        made[target.path(prefix, entry.key)] = Made(
            TensorInfo(_packed_shape(entry, of, sizes), of[0].dtype),
            partial(transform.pack, target, entry, leaf),
            tuple(block.keys[e.key] for e in read),
            f"{' + '.join(terms)} -> {entry.axes}",
        )
    return made, params, notes


class _Source:
    """The leaves of a block, read from its file.

    Attributes:
      entries: leaf -> the entry of the block's layout with this leaf.
    """

    def __init__(self, block: Block, parts: Parts, sizes: dict[str, int]) -> None:
        self.block, self.parts, self.sizes = block, parts, sizes
        held = (entry for entry in block.layout.entries if entry.key in block.keys)
        self.entries = {leaf: entry for entry in held for leaf in entry.leaves}

    def key(self, leaf: str) -> str:
        """Returns the name of the source tensor with this leaf."""
        return self.block.keys[self.entries[leaf].key]

    def leaf(self, name: str) -> NDArray:
        """Reads a leaf in its canonical axes."""
        layout, entry = self.block.layout, self.entries[name]
        return self.parts.leaf(
            self.key(name),
            name,
            lambda array: transform.unpack(layout, entry, array=array, sizes=self.sizes),
        )


def _packed_shape(entry: Entry, held: list[NDArray], sizes: dict[str, int]) -> tuple[int, ...]:
    """Returns the shape of the tensor that packs the leaves of an entry, stacked axes first."""
    letters = sizes | uneven.letters(sizes) | dict.fromkeys(uneven.PACKED, len(held))
    lead = held[0].shape[: held[0].ndim - len(CANONICAL[entry.leaves[0]].split())]
    groups = ([int(a) if a.isdigit() else letters[a] for a in group] for group in parse(entry.axes))
    return (*lead, *(math.prod(group) for group in groups))


def _letters(params: MHAParams) -> dict[str, int]:
    """The size of every axis letter, from the shapes of the leaves; stacked axes have none."""
    found: dict[str, int] = {}
    for name, array in leaves(params).items():
        letters = CANONICAL[name].split()
        found |= dict(zip(letters, np.shape(array)[-len(letters) :], strict=True))
    return found


def other_layer(
    module: Module, info: Mapping[str, Any], file: Arrays, to: Convention, kind: str, prefix: str
) -> dict[str, Made]:
    """Returns the lazy tensors of a layer other than attention, as a `kind` in the convention `to`.

    Raises ValueError if the kind has no place for a leaf of the layer.
    """
    made = {}
    present = module.entries
    for entry in to.kinds[kind]:
        source = present.get(entry.leaves[0])
        if source is None:
            continue
        name = module.keys[source.key]
        key = f"{prefix}{to.separator}{entry.key}" if prefix else entry.key
        made[key] = Made(
            TensorInfo(layer_layouts.shape(entry, module.sizes), np.dtype(info[name].dtype)),
            partial(_other_array, file, name, source, entry),
            (name,),
            f"{source.axes} -> {entry.axes}" if source.axes != entry.axes else "",
        )
    if missing := present.keys() - {entry.leaves[0] for entry in to.kinds[kind]}:
        raise ValueError(f"{prefix}: a {kind} of {to.name} has no {', '.join(sorted(missing))}")
    return made


def _other_array(file: Arrays, name: str, source: Entry, target: Entry) -> NDArray:
    return layer_layouts.pack(target, layer_layouts.unpack(source, np.asarray(file[name])))


def other(file: Arrays, info: Mapping[str, Any], name: str) -> Made:
    """Returns the lazy tensor that copies the source tensor `name` unchanged."""
    one = info[name]
    return Made(
        TensorInfo(tuple(one.shape), np.dtype(one.dtype)), lambda: np.asarray(file[name]), (name,)
    )
