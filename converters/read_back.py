"""Checks, before a destination is written, that it would be read back as the same layers."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jaxmha.converters import blocks, families, keymaps, modules, moves, neighbours
from jaxmha.converters.blocks import Block
from jaxmha.converters.checkpoint.errors import printable
from jaxmha.converters.layout import Layout
from jaxmha.converters.modules import Module
from jaxmha.converters.moves import Made, Tensors
from jaxmha.converters.neighbours import Convention


def like_attention(
    layers: Sequence[Module],
    targets: Iterable[tuple[str, str]],
    convention: Convention,
    file: Tensors,
) -> dict[str, str]:
    """Tensors of layers that would have names of attention in a convention, and why.

    They are the projections of attention that no layout describes. `targets` are the prefix and the
    kind of every layer there.
    """
    there, owner = {}, {}
    for layer, (target, kind) in zip(layers, targets, strict=True):
        for name, one in moves.neighbour(layer, file.info, file, convention, kind, target).items():
            there[name], owner[name] = one.info.shape, layer
    found = blocks.find(there)
    wrong = {block.prefix for block in found} | blocks.damaged_at(there, found).keys()
    start = tuple(f"{prefix}{convention.separator}" for prefix in wrong)
    return {
        tensor: f"a projection of attention of another form: as {name} it would be read as a part "
        "of a block"
        for name, layer in owner.items()
        if "" in wrong or name.startswith(start)
        for tensor in layer.keys.values()
    }


def mistakable(
    info: Mapping[str, Any], names: Iterable[str], found: Sequence[Block], to: Layout
) -> list[str]:
    """Names of no layer in the source that a file of a layout would have for one.

    >>> import numpy as np
    >>> mistakable({"n/gamma": np.zeros(3)}, ["n/gamma"], [], blocks.named("keras"))
    ['n/gamma']
    """
    convention = neighbours.beside(to.name)
    if convention is None:
        return []
    other = convention not in {neighbours.beside(block.layout.name) for block in found}
    families_there = {family.name for family in families.FAMILIES if family.layout == to.name}
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        prefix, separator, key = modules.split(name)
        if separator == convention.separator:
            groups.setdefault(prefix, {})[key] = name
    mistaken: dict[str, None] = {}
    for prefix, keys in groups.items():
        placed = keymaps.kind_at(prefix, families_there)
        for one in neighbours.CONVENTIONS if placed else [convention] if other else []:
            for kind in one.kinds:
                with suppress(ValueError):
                    modules.as_kind(prefix, kind, one, keys, info)
                    mistaken |= dict.fromkeys(keys.values())
    return list(mistaken)


def refuse(
    made: Mapping[str, Made],
    prefixes: set[str],
    target: Layout,
    source: Mapping[str, Sequence[int]],
) -> None:
    """Raises ValueError where a destination could not be read back as the same layers.

    `prefixes` are those of its blocks, `source` the shapes of the source, whose damage is its own.
    """
    shapes = {name: one.info.shape for name, one in made.items()}
    there = blocks.find(shapes, [target])
    for block in there:
        if block.prefix in prefixes and block.unknown:
            raise ValueError(
                f"block {block.prefix or '(top)'} could not be read back: layout {target.name} has "
                f"no {printable(', '.join(block.unknown))}, which the source has in this block: "
                "name another layout"
            )
    if missing := prefixes - {block.prefix for block in there}:
        raise ValueError(
            f"block {min(missing)} could not be read back as layout {target.name}: name another "
            "layout"
        )
    broken = blocks.damaged_at(shapes, blocks.find(shapes))
    if new := broken.keys() - blocks.damaged_at(source, blocks.find(source)).keys():
        raise ValueError(
            f"could not be read back: {printable(broken[min(new)])}, since other layers would get "
            'the names of its arrays: carry them over in a plan (kind = "other")'
        )
