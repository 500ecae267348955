"""Compares all tensors outside attention, layer by layer.

Linear layers, norms, embeddings and convolutions are read by the conventions of their frameworks,
and all other tensors by name. Memory holds one tensor of each source at a time.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxmha import checkpoint
from jaxmha.checkpoint.errors import listed
from jaxmha.converters.discovery import layer_layouts, other_layers
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.latent_blocks import LatentBlock
from jaxmha.converters.discovery.other_layers import Module
from jaxmha.converters.discovery.user_names import dotted
from jaxmha.converters.layout.arrays import NDArray, cast, to_numpy
from jaxmha.converters.layout.base import Entry
from jaxmha.converters.verify import latent_comparison
from jaxmha.converters.verify.weights import How, Relation, of_types

_ROWS = 4 << 20  # bytes of each tensor compared at once

Load = Callable[[str], NDArray | None]


class Source(NamedTuple):
    """The tensors of one source.

    Attributes:
      source: a path, or a flat dict of arrays.
      info: name -> object with shape and dtype, for all tensors including attention.
      found: the attention blocks. taken: names of the tensors in these blocks.
      names: prefix -> name of a Keras layer. groups: prefix -> (group in a .weights.h5 file, name).
      paths: prefix -> path under which a layer is compared, if it differs from its own path.
      latents: blocks of latent attention; `taken` includes their tensors.
      ordered: False for a Keras file in which the order of layers is a guess.
      dtype: dtype to which floating tensors are rounded before a comparison; None: none.
      tied: another name of a tensor -> its name in `info`.
    """

    source: Any
    info: Mapping[str, Any]
    found: tuple[Block, ...] = ()
    taken: frozenset[str] = frozenset()
    names: Mapping[str, str] = {}
    groups: Mapping[str, tuple[str, str]] = {}
    paths: Mapping[str, str] = {}
    latents: tuple[LatentBlock, ...] = ()
    ordered: bool = True
    dtype: str | None = None
    tied: Mapping[str, str] = {}


EMPTY = Source({}, {})


@dataclass(frozen=True)
class Left:
    """A tensor that was not compared: its name, its source ("first", "second"), and the reason."""

    name: str
    source: str
    why: str

    def __str__(self) -> str:
        return f"{self.name}, of the {self.source}: {self.why}"


class Outside(NamedTuple):
    """The result of comparing all tensors outside attention.

    Attributes:
      differing: name in the first source, or the name that differs in a tie -> the difference.
      left: tensors that could not be compared.
      notes: remarks on tensors that count as the same.
      relations: name -> how two tensors of different dtypes are related, if that is known.
      unlike: the names in each source of the tensors that differ.
    """

    differing: dict[str, str]
    left: tuple[Left, ...]
    notes: tuple[str, ...]
    relations: Mapping[str, Relation] = MappingProxyType({})
    unlike: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


NOTHING = Outside({}, (), ())


class _Group(NamedTuple):
    """One layer: its tensors as key -> name, and its `Module` if the kind of layer is known."""

    names: dict[str, str]
    module: Module | None


class _Pair(NamedTuple):
    """The names of two tensors to compare, and their layout entries if both layers are known.

    `reported`: the name in the report if a tie pairs the tensors; None: the name in the first source.
    """

    names: tuple[str, str]
    entries: tuple[Entry, Entry] | None
    transposed: bool  # True if one tensor may be the transpose of the other
    reported: str | None = None

    @property
    def name(self) -> str:
        return self.reported or self.names[0]


def compare(a: Source, b: Source) -> Outside:
    """Compares all tensors outside attention, and the weights of latent attention.

    Layers are paired by path ("/" equals "."), and their arrays by leaf.
    """
    groups = _groups(a), _groups(b)
    conv1d = [any(block.layout.name == "gpt2" for block in source.found) for source in (a, b)]
    pairs: list[_Pair] = []
    alone: list[dict[str, str]] = [{}, {}]  # tensors without a counterpart: name -> key
    harmless: list[tuple[int, str]] = []
    for path in (path for path in groups[0] if path in groups[1]):
        x, y = groups[0][path], groups[1][path]
        read = _as_one_kind(x, y, a, b)
        # GPT-2's Conv1D stores the transpose of an ordinary linear kernel.
        may_turn = conv1d[0] != conv1d[1] and not _both_certain(x, y)
        if read is None:
            common = [key for key in x.names if key in y.names]
            pairs += [_Pair((x.names[k], y.names[k]), None, may_turn) for k in common]
            for number, group in enumerate((x, y)):
                alone[number] |= {n: k for k, n in group.names.items() if k not in common}
            continue
        entries = read[0].entries, read[1].entries
        for leaf in {**entries[0], **entries[1]}:
            holders = [number for number in (0, 1) if leaf in entries[number]]
            own = [read[number].keys[entries[number][leaf].key] for number in holders]
            if len(holders) == 2:
                of_leaf = entries[0][leaf], entries[1][leaf]
                turns = may_turn and leaf == "linear.kernel"
                pairs.append(_Pair((own[0], own[1]), of_leaf, turns))
            elif leaf in ("linear.bias", "convolution.bias"):
                harmless.append((holders[0], own[0]))
            else:
                alone[holders[0]][own[0]] = leaf
    for number in (0, 1):
        for path in (path for path in groups[number] if path not in groups[1 - number]):
            alone[number] |= {name: key for key, name in groups[number][path].names.items()}
    for number, blocks in enumerate(latent_comparison.pairs(a.latents, b.latents)[1:]):
        alone[number] |= {name: key for block in blocks for key, name in block.keys.items()}
    pairs += _of_ties((a, b), alone)
    return _compared((a, b), pairs, alone, harmless)


def _of_ties(operands: tuple[Source, Source], alone: list[dict[str, str]]) -> Iterator[_Pair]:
    """Pairs tensors in `alone` that the other source has under a tied name; removes them there."""
    for number in (0, 1):
        own, other = operands[number], operands[1 - number]
        for name in list(alone[number]):
            aliases = [alias for alias, kept in own.tied.items() if kept == name]
            kept_as = {x: x for x in aliases if x in other.info} | {
                x: other.tied[x] for x in (name, *aliases) if x in other.tied
            }
            for alias, found in list(kept_as.items())[:1]:
                del alone[number][name]
                alone[1 - number].pop(found, None)
                names = (name, found)[:: 1 - 2 * number]
                yield _Pair((names[0], names[1]), None, False, alias)


def _compared(
    operands: tuple[Source, Source],
    pairs: list[_Pair],
    alone: list[dict[str, str]],
    harmless: list[tuple[int, str]],
) -> Outside:
    differing: dict[str, How] = {}
    unlike: list[latent_comparison.Names] = []
    left: list[Left] = []
    turned: list[str] = []
    zero: list[str] = []
    order = {name: i for source in operands for i, name in enumerate(source.info)}
    with _opened(operands[0]) as load_a, _opened(operands[1]) as load_b:
        loads = load_a, load_b
        latents = latent_comparison.pairs(operands[0].latents, operands[1].latents)[0]
        for one in latents:
            for leaf, text, names in latent_comparison.differences(one, loads, _difference):
                differing[leaf] = text
                unlike.append(names)
        for number, name in harmless:
            array = loads[number](name)
            if array is not None and not array.any():
                zero.append(name)
            else:
                alone[number][name] = "bias"
        for pair in sorted(pairs, key=lambda pair: order[pair.names[0]]):
            arrays = [load(name) for load, name in zip(loads, pair.names, strict=True)]
            if arrays[0] is None or arrays[1] is None:
                which = ("first", "second")
                left += [
                    Left(n, w, "it is no dense array of numbers")
                    for n, w, x in zip(pair.names, which, arrays, strict=True)
                    if x is None
                ]
                continue
            how = _difference(arrays[0], arrays[1], pair.entries)
            if how and pair.transposed and not _difference(arrays[0].T, arrays[1]):
                turned.append(pair.name)
            elif how:
                differing[pair.name] = how
                unlike.append(pair.names)
    for number, own in enumerate(("first", "second")):
        for name in sorted(alone[number], key=order.__getitem__):
            other = ("second", "first")[number]
            left.append(Left(name, own, f"no tensor of the {other} has this name"))
    notes = []
    if latents:
        count = len(latents)
        notes.append(f"latent attention, {count} blocks: weights compared, no output computed")
    if turned:
        notes.append(f"stored transposed, and otherwise the same: {listed(turned)}")
    if zero:
        notes.append(f"biases of zeros in only one source, which change nothing: {listed(zero)}")
    relations = {name: how.relation for name, how in differing.items() if how.relation}
    texts = {name: how.text for name, how in differing.items()}
    first, second = (tuple(dict.fromkeys(filter(None, (x[i] for x in unlike)))) for i in (0, 1))
    return Outside(texts, tuple(left), tuple(notes), relations, (first, second))


def _groups(source: Source) -> dict[str, _Group]:
    """Maps each path, with dots as separators, to the tensors of its layer."""
    info = {
        name: one
        for name, one in source.info.items()
        if hasattr(one, "shape") and hasattr(one, "dtype")
    }
    found, _ = other_layers.find(info, source.found)
    by_prefix = {module.prefix: module for module in found}
    groups: dict[str, _Group] = {}
    for name in source.info:
        if name in source.taken:
            continue
        prefix, separator, key = other_layers.split(name)
        path = source.paths.get(prefix) or dotted(prefix, separator, source.names)
        module = by_prefix.get(prefix)
        if module is not None and name not in module.keys.values():
            module = None
        group = groups.setdefault(path, _Group({}, module))
        if key in group.names:  # two names have the same path, such as a/b.c and a.b.c
            groups[name] = _Group({key: name}, None)
        else:
            group.names[key] = name
    return groups


def _as_one_kind(x: _Group, y: _Group, a: Source, b: Source) -> tuple[Module, Module] | None:
    """Reads both layers as one kind; None if their arrays must be paired by key, as stored."""
    if x.module and y.module and _alike(x.module, y.module):
        both = {x.module.kind, y.module.kind}
        # Two sources of one framework store a layer the same way, so Linear in one and Conv1D in
        # the other means a wrongly transposed kernel: compare the arrays as stored.
        of_gpt2 = [any(block.layout.name == "gpt2" for block in source.found) for source in (a, b)]
        alike = x.module.convention == y.module.convention and of_gpt2[0] == of_gpt2[1]
        if len(both) == 2 and "conv1d" in both and alike:
            return None
        return x.module, y.module
    if x.names.keys() == y.names.keys():
        return None
    for known, other, info, first in ((x, y, b.info, True), (y, x, a.info, False)):
        if known.module is None:
            continue
        either = [known.module.kind, layer_layouts.INSTEAD.get(known.module.kind, "")]
        for kind in filter(None, either):
            for convention in layer_layouts.CONVENTIONS:
                prefix = other_layers.split(next(iter(other.names.values())))[0]
                try:
                    read = other_layers.as_kind(prefix, kind, convention, other.names, info)
                except (ValueError, AttributeError):
                    continue
                return (known.module, read) if first else (read, known.module)
    return None


def _alike(x: Module, y: Module) -> bool:
    kinds = [layer_layouts.INSTEAD.get(module.kind, module.kind) for module in (x, y)]
    return kinds[0] == kinds[1]


def _both_certain(x: _Group, y: _Group) -> bool:
    return all(g.module is not None and g.module.confidence == "certain" for g in (x, y))


@contextmanager
def _opened(given: Source) -> Iterator[Load]:
    """Yields a function that reads a tensor and rounds it, or returns None as `_dense` does."""

    def load(tensors: Mapping[str, Any], name: str) -> NDArray | None:
        array = _dense(tensors[name])
        return array if array is None else rounded(name, array, given.dtype)

    if isinstance(given.source, str | os.PathLike):
        with checkpoint.open(given.source, dequantise=True, unbox=True) as file:
            yield partial(load, file)
    else:
        yield partial(load, given.source)


def rounded(name: str, array: NDArray, dtype: str | None) -> NDArray:
    """A floating tensor in another dtype, as `convert --dtype` casts it.

    Raises ValueError if a finite value does not fit: a conversion refuses it.
    """
    found = cast(array, dtype)
    if found is not array and (np.isfinite(array) & ~np.isfinite(found)).any():
        raise ValueError(
            f"values of {name} do not fit into {dtype}, and a conversion refuses them: choose a "
            "dtype with a wider range, such as bfloat16"
        )
    return found


def _dense(value: Any) -> NDArray | None:
    """The tensor; None if it is not a dense array of numbers."""
    if isinstance(value, np.ndarray):
        return None if value.dtype == object else value
    try:
        array = to_numpy(value)
    except (TypeError, ValueError, RuntimeError):  # sparse tensors, among others
        return None
    return None if array.dtype == object else array


def _difference(x: NDArray, y: NDArray, entries: tuple[Entry, Entry] | None = None) -> How | None:
    """Describes how two tensors differ; None if every bit is the same."""
    if entries is not None:
        x, y = (layer_layouts.unpack(e, z) for e, z in zip(entries, (x, y), strict=True))
    if x.dtype != y.dtype or x.shape != y.shape:
        return of_types(x, y)
    count = _differing(x, y)
    return How(f"{count} of {x.size} elements differ") if count else None


def _differing(x: NDArray, y: NDArray) -> int:
    """Number of elements whose bits differ, including NaN with different bits."""
    if x.ndim and x.nbytes > _ROWS and len(x) > 1:
        step = max(1, _ROWS * len(x) // x.nbytes)
        return sum(_differing(x[i : i + step], y[i : i + step]) for i in range(0, len(x), step))
    if x.itemsize in (1, 2, 4, 8):  # NumPy can view integers of these sizes for all strides
        bits = f"u{x.itemsize}"
        return int(np.count_nonzero(x.view(bits) != y.view(bits)))
    parts = (np.ascontiguousarray(z).reshape(-1, 1).view(np.uint64) for z in (x, y))
    return int(np.not_equal(*parts).any(axis=-1).sum())
