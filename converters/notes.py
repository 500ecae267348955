"""What no tensor says of a conversion, in words for its user."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxmha.converters import keymaps
from jaxmha.converters.blocks import Block, natural
from jaxmha.converters.modules import Module
from jaxmha.converters.neighbours import Convention

NO_ATTENTION = "no block of attention was found: what is converted are the layers beside it"


def listed(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" * (len(names) > most)
    return separator.join(names[:most]) + more


def epsilons(
    layers: Sequence[Module],
    convention: Convention | None,
    found: Sequence[Block],
    configured: Mapping[str, float],
) -> Iterator[str]:
    """What norms add to the variance, where the target's own default is another."""
    families_there = {block.family[0] for block in found if block.family}
    keys = {k.epsilon for k in keymaps.KEYMAPS if k.family in families_there and k.epsilon}
    said = {key: value for key, value in configured.items() if key in keys or not keys}
    counts = Counter((x.kind, x.convention) for x in layers if x.kind in ("norm", "rmsnorm"))
    for (kind, source), count in counts.items():
        if convention is None:
            continue
        theirs = convention.epsilon[kind if kind in convention.kinds else "norm"]
        key, ours = next(iter(said.items()), ("", source.epsilon.get(kind, theirs)))
        if ours != theirs:
            where = f"config.json: {key}" if key else f"the default of {source.name}"
            yield (
                f"{count} x {kind}: epsilon is {ours:.3g} ({where}), and {theirs:.3g} by default in "
                f"{convention.name}: no tensor holds it, so give it to the layers"
            )


def order_of_creation(layers: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Which layer of the source, given with its group in a .weights.h5 file, comes first."""
    groups: dict[str, list[str]] = {}
    for source, target in sorted(layers, key=lambda layer: natural(layer[1])):
        group = re.sub(r"_\d+$", "", target.rpartition("/")[2])
        groups.setdefault(group, []).append(source or "(top)")
    several = {group: names for group, names in groups.items() if len(names) > 1}
    if several:
        shown = "; ".join(f"{group}: {listed(names, 4)}" for group, names in several.items())
        yield (
            "Keras pairs the groups of a .weights.h5 file with layers of their class in the order in "
            f"which the model creates these; here they are in the order {shown}: check that the "
            "model creates its layers so"
        )


def told_by_name(layers: Sequence[Module]) -> Iterator[str]:
    """Layers whose kind nothing but the name says."""
    if shown := [f"{x.prefix} ({x.kind})" for x in layers if x.confidence == "by name"]:
        yield (
            f"what only the name tells: {listed(shown)}; where that is wrong, write a plan and name "
            "the kind"
        )


def not_back(
    layers: Sequence[Module], becomes: Iterable[str], mistakable: Sequence[str], to: str
) -> Iterator[str]:
    """Layers and names that the same conversion back would not give as they were."""
    shown = [
        x.prefix for x, kind in zip(layers, becomes, strict=True) if kind != x.kind == "conv1d"
    ]
    if shown:
        yield (
            f"{len(shown)} x conv1d, whose kernel is (Di Do), written as a linear layer: converted back "
            f"to another layout than gpt2 they are Linear, (Do Di): {listed(shown, 3)}"
        )
    if mistakable:
        yield (
            f"carried over under names that {to} gives to layers: {listed(mistakable)}; converted back "
            "they would be renamed: name their kinds in a plan"
        )


def carried_norms(why: Mapping[str, str], unlike: Iterable[str]) -> Iterator[str]:
    """Norms that are left as they are: `why` is of every tensor, `unlike` of norms alone."""
    counts = Counter(reason for reason in why.values() if reason in set(unlike))
    for reason, count in counts.items():
        yield f"{count} x a tensor of a norm, carried over as it is: {reason}"
