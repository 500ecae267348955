"""Tensors of a destination, each computed from the source when it is asked for."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxmha import MHAParams, Semantics
from jaxmha.axes import parse
from jaxmha.converters import engine, neighbours
from jaxmha.converters.arrays import NDArray
from jaxmha.converters.blocks import Block
from jaxmha.converters.checkpoint import Lazy, TensorInfo
from jaxmha.converters.layout import Entry, Layout
from jaxmha.converters.modules import Module
from jaxmha.converters.neighbours import Convention
from jaxmha.converters.refusals import refuse_arrays, refuse_keys, refuse_mixed
from jaxmha.params import CANONICAL, from_leaves, leaves


@runtime_checkable
class Arrays(Protocol):
    """Tensors by name, such as an open checkpoint."""

    def __getitem__(self, name: str) -> NDArray: ...


class Made(NamedTuple):
    """One tensor of the destination.

    Attributes:
      info: shape and dtype. load: computes it.
      sources: names of the tensors that it is made of. arrow: how, in the dimension key.
    """

    info: TensorInfo
    load: Callable[[], NDArray]
    sources: tuple[str, ...]
    arrow: str = ""


def lazy(made: Mapping[str, Made]) -> Lazy:
    """The tensors as `checkpoint.write` asks for them: one by one, their sizes known before."""
    return Lazy({name: one.info for name, one in made.items()}, lambda name: made[name].load())


class Parts:
    """Leaves of source arrays, as views of them.

    The last packed arrays are kept, since they are asked for leaf by leaf: two of them, as writers
    go by dtype and name, from the kernel of a query to its bias and on to those of a value.
    """

    def __init__(self, file: Arrays, keep: int = 2) -> None:
        self._file, self._keep = file, keep
        self._last: OrderedDict[str, dict[str, NDArray]] = OrderedDict()

    def leaf(
        self,
        name: str,
        leaf: str,
        unpack: Callable[[NDArray], dict[str, NDArray]],
        packed: bool,
    ) -> NDArray:
        """One leaf of the array of that name, which holds several where it is packed."""
        if not packed:
            return unpack(np.asarray(self._file[name]))[leaf]
        if name not in self._last:
            while len(self._last) >= self._keep:  # before the next one takes its memory
                self._last.popitem(last=False)
            self._last[name] = unpack(np.asarray(self._file[name]))
        self._last.move_to_end(name)
        return self._last[name][leaf]


def meta(
    block: Block, info: Mapping[str, Any], num_heads: int | None
) -> tuple[MHAParams, Semantics, dict[str, int]]:
    """What `block.read` would give, of shapes alone (its arrays take no memory); and the sizes.

    Raises ValueError as `block.read` does.
    """
    block.refuse()
    layout = block.layout
    arrays = {key: info[name] for key, name in block.keys.items()}
    refuse_keys(layout, arrays, block.prefix)
    refuse_arrays(layout, arrays, block.prefix)
    shapes = {key: tuple(one.shape) for key, one in arrays.items()}
    sizes = engine.bind_shapes(layout, shapes, num_heads, block.prefix)
    found = {}
    for entry in layout.entries:
        if entry.key in arrays:
            lead = shapes[entry.key][: len(shapes[entry.key]) - len(parse(entry.axes))]
            for leaf in entry.leaves:
                shape = (*lead, *(sizes[a] for a in layout.tied(CANONICAL[leaf]).split()))
                nothing = np.zeros((), arrays[entry.key].dtype)
                found[leaf] = np.broadcast_to(nothing, shape)
    params = from_leaves(dict(found))
    return params, engine.behaviour(layout, found), sizes


def attention(
    block: Block,
    info: Mapping[str, Any],
    parts: Parts,
    target: Layout,
    prefix: str,
    num_heads: int | None,
) -> tuple[dict[str, Made], MHAParams]:
    """The tensors of a block in another layout, and its leaves as shapes.

    Raises ValueError where the block cannot be read, or the layout cannot hold it.
    """
    params, semantics, sizes = meta(block, info, num_heads)
    engine.refuse_export(target, params, semantics)
    there, sizes = leaves(params), sizes | _letters(params)
    holder = {leaf: e for e in block.layout.entries if e.key in block.keys for leaf in e.leaves}

    def leaf(name: str) -> NDArray:
        entry = holder[name]
        unpack = partial(engine.unpack, block.layout, entry, sizes=sizes)
        packed = len(entry.leaves) > 1
        return parts.leaf(block.keys[entry.key], name, lambda array: unpack(array=array), packed)

    def load(entry: Entry) -> NDArray:
        return engine.pack(target, entry, leaf)

    made = {}
    for entry in target.entries:
        if entry.leaves[0] not in there:
            continue
        of = [np.asarray(there[name]) for name in entry.leaves]
        refuse_mixed(entry, of)
        sources = dict.fromkeys(holder[name] for name in entry.leaves)
        letters = sizes | {"qkv": len(of), "kv": len(of)}
        lead = of[0].shape[: of[0].ndim - len(CANONICAL[entry.leaves[0]].split())]
        shape = tuple(
            int(np.prod([int(a) if a.isdigit() else letters[a] for a in group]))
            for group in parse(entry.axes)
        )
        made[target.path(prefix, entry.key)] = Made(
            TensorInfo((*lead, *shape), of[0].dtype),
            partial(load, entry),
            tuple(block.keys[e.key] for e in sources),
            f"{' + '.join(e.axes for e in sources)} -> {entry.axes}",
        )
    return made, params


def _letters(params: MHAParams) -> dict[str, int]:
    """The size of every letter of the canonical leaves."""
    found: dict[str, int] = {}
    for name, array in leaves(params).items():
        letters = CANONICAL[name].split()
        found |= dict(zip(letters, np.shape(array)[-len(letters) :], strict=True))
    return found


def neighbour(
    module: Module, info: Mapping[str, Any], file: Arrays, to: Convention, kind: str, prefix: str
) -> dict[str, Made]:
    """The tensors of a neighbour by another convention."""
    made = {}
    there = module.entries
    for entry in to.kinds[kind]:
        source = there.get(entry.leaves[0])
        if source is None:
            continue
        name = module.keys[source.key]
        key = f"{prefix}{to.separator}{entry.key}" if prefix else entry.key
        made[key] = Made(
            TensorInfo(neighbours.shape(entry, module.sizes), np.dtype(info[name].dtype)),
            partial(_neighbour, file, name, source, entry),
            (name,),
            f"{source.axes} -> {entry.axes}" if source.axes != entry.axes else "",
        )
    if missing := there.keys() - {entry.leaves[0] for entry in to.kinds[kind]}:
        raise ValueError(f"{prefix}: a {kind} of {to.name} has no {', '.join(sorted(missing))}")
    return made


def _neighbour(file: Arrays, name: str, source: Entry, target: Entry) -> NDArray:
    return neighbours.pack(target, neighbours.unpack(source, np.asarray(file[name])))


def other(file: Arrays, info: Mapping[str, Any], name: str) -> Made:
    """A tensor that is carried over as it is."""
    one = info[name]
    return Made(
        TensorInfo(tuple(one.shape), np.dtype(one.dtype)), lambda: np.asarray(file[name]), (name,)
    )
