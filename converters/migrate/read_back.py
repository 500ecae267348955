"""Checks, before a destination is written, that readers would find the same layers in it."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from jaxmha.checkpoint.errors import printable
from jaxmha.converters.discovery import (
    attention_blocks,
    choices,
    damaged_blocks,
    family_keymaps,
    layer_layouts,
    model_families,
    other_layers,
    places,
)
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.layer_layouts import Convention
from jaxmha.converters.discovery.other_layers import Module
from jaxmha.converters.layout.base import Layout
from jaxmha.converters.migrate import lazy_tensors
from jaxmha.converters.migrate.lazy_tensors import Made, Tensors


def like_attention(
    layers: Sequence[Module],
    targets: Iterable[tuple[str, str]],
    convention: Convention,
    file: Tensors,
) -> dict[str, str]:
    """Finds tensors of other layers that a reader of the destination would take for attention.

    Such tensors are attention projections in a form that no layout describes. `targets`: prefix and
    kind of each of `layers` in the destination. Returns source tensor -> reason.
    """
    target_blocks, owner = {}, {}
    for layer, (target, kind) in zip(layers, targets, strict=True):
        for name, one in lazy_tensors.other_layer(
            layer, file.info, file, convention, kind, target
        ).items():
            target_blocks[name], owner[name] = one.info.shape, layer
    found = attention_blocks.find(target_blocks)
    wrong = {block.prefix for block in found} | damaged_blocks.find(target_blocks, found).keys()
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
    """Returns which of `names`, tensors copied unchanged, a reader of the target takes for a layer.

    >>> import numpy as np
    >>> mistakable({"n/gamma": np.zeros(3)}, ["n/gamma"], [], attention_blocks.named("keras"))
    ['n/gamma']
    """
    convention = layer_layouts.convention_of(to.name)
    if convention is None:
        return []
    other = convention not in {layer_layouts.convention_of(block.layout.name) for block in found}
    target_families = {
        family.name for family in model_families.FAMILIES if family.layout == to.name
    }
    groups: dict[str, dict[str, str]] = {}
    for name in names:
        prefix, separator, key = other_layers.split(name)
        if separator == convention.separator:
            groups.setdefault(prefix, {})[key] = name
    mistaken: dict[str, None] = {}
    for prefix, keys in groups.items():
        placed = family_keymaps.kind_at(prefix, target_families)
        for one in layer_layouts.CONVENTIONS if placed else [convention] if other else []:
            for kind in one.kinds:
                with suppress(ValueError):
                    other_layers.as_kind(prefix, kind, one, keys, info)
                    mistaken |= dict.fromkeys(keys.values())
    return list(mistaken)


def refuse(
    made: Mapping[str, Made],
    prefixes: set[str],
    target: Layout,
    source: Mapping[str, Sequence[int]],
    configured: set[str] = frozenset(),  # type: ignore[assignment]
) -> None:
    """Raises ValueError if a reader of the destination would not find the same attention blocks.

    `prefixes`: the prefixes of its blocks. `configured`: the prefixes of blocks whose semantics
    came from the config or metadata of the source. `source`: the shapes of the source; blocks that
    are already damaged in it do not raise.
    """
    shapes = {name: one.info.shape for name, one in made.items()}
    target_blocks = attention_blocks.find(shapes, [target])
    for block in (one for one in target_blocks if one.prefix in prefixes):
        where = f"block {block.prefix or '(top)'} could not be read back: layout {target.name}"
        if block.unknown:
            raise ValueError(
                f"{where} has no {printable(', '.join(block.unknown))}, which the source has in "
                "this block: name another layout"
            )
        lacking = {e.group for e in block.layout.entries if e.key not in block.keys}
        alone = [e.key for e in block.layout.entries if e.group in lacking and e.key in block.keys]
        if alone:
            raise ValueError(
                f"{where} has a parameter of its own named {printable(', '.join(alone))}, which is "
                "carried over here: name another layout"
            )
    if missing := prefixes - {block.prefix for block in target_blocks}:
        places.refuse_prefix(target, min(missing))
        raise ValueError(
            f"block {min(missing)} could not be read back as layout {target.name}: name another "
            "layout"
        )
    elsewhere = [b.prefix for b in target_blocks if b.prefix in prefixes and not b.family]
    if elsewhere and target.name in places.NAMED:
        places.refuse_prefix(target, elsewhere[0])
    _refuse_other_families(target, prefixes, attention_blocks.find(shapes))
    known = [b._replace(configured=b.prefix in configured) for b in attention_blocks.find(shapes)]
    if not (broken := damaged_blocks.find(shapes, known)):
        return
    if new := broken.keys() - damaged_blocks.find(source, attention_blocks.find(source)).keys():
        raise ValueError(
            f"could not be read back: {printable(broken[min(new)])}, since other layers would get "
            'the names of its arrays: carry them over in a plan (kind = "other")'
        )


def _refuse_other_families(target: Layout, prefixes: set[str], found: Sequence[Block]) -> None:
    """Raises ValueError if the prefix of a block is of a family that stores its arrays otherwise."""
    meant = {entry.key: (entry.axes, entry.leaves) for entry in target.entries}
    for block in found:
        own = {entry.key: (entry.axes, entry.leaves) for entry in block.layout.entries}
        if block.prefix not in prefixes or not block.family:
            continue
        if choices.chooses(block.layout.name, target.name):
            continue
        if any(meant.get(key, own[key]) != own[key] for key in block.keys):
            raise ValueError(
                f"block {printable(block.prefix)} could not be read back: it has a prefix of "
                f"{block.family[0]}, where its rows are those of layout {block.layout.name}, not "
                f"{target.name}: name layout {block.layout.name}, or give the block another prefix "
                "in a plan"
            )
