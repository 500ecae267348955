"""Notes for the user on facts that no tensor holds, and on uncertain readings."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from jaxmha.checkpoint.errors import listed
from jaxmha.converters.discovery import family_keymaps
from jaxmha.converters.discovery.attention_blocks import Block, natural
from jaxmha.converters.discovery.flattening import Item, next_to_convolutions
from jaxmha.converters.discovery.layer_layouts import TORCH, Convention
from jaxmha.converters.discovery.other_layers import OF_GROUPS, Module
from jaxmha.converters.layout import parametrized

CREATES = "check that the model creates its layers so"
# Layout that only a configuration distinguishes from another -> note on files in this layout.
NEEDS = {
    "starcoder-heads": "layout starcoder-heads is read as starcoder, in another order, unless a "
    "config.json of gpt_bigcode with multi_query false is next to the file"
}
NO_ATTENTION = (
    "no attention block was found: only other layers are converted (`jaxmha match` fills a model of "
    "your own with all tensors)"
)


def counted(prefixes: Sequence[str]) -> str:
    """The number of prefixes, and the first of them with one `{i}` for all numbers.

    >>> counted(["encoder.0.attn", "encoder.1.attn", ""])
    '3 x encoder.{i}.attn, (top)'
    """
    places = dict.fromkeys(re.sub(r"\d+", "{i}", prefix) or "(top)" for prefix in prefixes)
    return f"{len(prefixes)} x {listed(list(places), 3)}"


class Epsilons(NamedTuple):
    """Epsilons of norms: by key from config.json, or by layer prefix from a .keras archive."""

    by_key: Mapping[str, Sequence[float]] = MappingProxyType({})
    by_prefix: Mapping[str, float] = MappingProxyType({})


def epsilons(
    layers: Sequence[Module],
    convention: Convention | None,
    found: Sequence[Block],
    read: Epsilons,
) -> Iterator[str]:
    """Yields notes on norms whose epsilon is unknown or differs from the target's default."""
    if convention is None:
        return
    families = {block.family[0] for block in found if block.family}
    keys = {k.epsilon for k in family_keymaps.KEYMAPS if k.family in families and k.epsilon}
    by_key = {key: values for key, values in read.by_key.items() if key in keys or not keys}
    of_all = tuple(dict.fromkeys(value for values in by_key.values() for value in values))
    counts = Counter(
        (
            x.kind,
            x.confidence == "ambiguous",
            x.convention,
            (read.by_prefix[x.prefix],) if x.prefix in read.by_prefix else of_all,
            "the archive's config.json"
            if x.prefix in read.by_prefix
            else f"config.json: {', '.join(by_key)}",
        )
        for x in layers
        if x.kind in ("norm", "rmsnorm")
    )
    for (kind, unsure, source, values, where), count in counts.items():
        shown_kind = f"{kind} (LayerNorm or RMSNorm: no tensor tells)" if unsure else kind
        theirs = convention.epsilon[kind if kind in convention.kinds else "norm"]
        default = f"{theirs:.3g} by default in {convention.name}"
        if not values and source.name != convention.name:
            usual = source.epsilon.get(kind, theirs)
            yield (
                f"{count} x {shown_kind}: epsilon is not known: neither a tensor nor a configuration has "
                f"it. It is {usual:.3g} if it is the default of {source.name}, and {default}: look "
                "it up in the source model and give it to the layers"
            )
        elif values and values != (theirs,):
            shown = " or ".join(f"{value:.3g}" for value in values)
            which = " (each part of the model has its own)" * (len(values) > 1)
            yield (
                f"{count} x {shown_kind}: epsilon is {shown} ({where}){which}, and {default}: no tensor "
                "holds it, so give it to the layers"
            )


def order_of_creation(layers: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yields a note on the layers of a .weights.h5 file that Keras pairs by their order only.

    `layers`: pairs of a source layer and its group in the file.
    """
    groups: dict[str, list[str]] = {}
    for source, target in sorted(layers, key=lambda layer: natural(layer[1])):
        group = re.sub(r"_\d+$", "", target.rpartition("/")[2])
        groups.setdefault(group, []).append(source or "(top)")
    several = {group: names for group, names in groups.items() if len(names) > 1}
    if several:
        shown = "; ".join(f"{group}: {', '.join(names)}" for group, names in several.items())
        yield (
            "Keras pairs the groups of a .weights.h5 file with layers of their class in the order in "
            f"which the model creates these; here they are in the order {shown}: {CREATES}; where "
            "it does not, name a file that it saved (--like model.weights.h5), or write a plan "
            "(--to keras-file) and exchange the numbers in `to`"
        )


def of_groups(targets: Sequence[str]) -> str:
    """A note on which models can load a .weights.h5 file.

    `targets`: the groups of the file, which the conversion made from the names in the source.
    """
    like = "name a file that it saved (--like model.weights.h5)"
    shown = listed(targets, 3)
    if not all(targets):
        return (
            "the arrays are at the top of the file, as a model of this very class saves them; for a "
            f"model that holds the class as a layer, {like}"
        )
    if all(target.startswith("layers/") for target in targets):
        return (
            f"the groups of the file ({shown}) are those of a functional or Sequential model; for a "
            f"model that keeps its layers as attributes, {like}"
        )
    return (
        f"the groups of the file ({shown}) are those of a model that keeps its layers as attributes "
        f"of these names; for another model, {like}"
    )


def known_by_name(layers: Sequence[Module]) -> Iterator[str]:
    """Yields a note on layers whose kind only the name determines."""
    if shown := [f"{x.prefix} ({x.kind})" for x in layers if x.confidence == "by name"]:
        yield (
            f"kinds known only by name: {listed(shown)}; if one is wrong, write a plan and name its "
            "kind"
        )


def of_features(layers: Sequence[Module]) -> Iterator[str]:
    """Yields a note on norms that are read as LayerNorm only because of their keys and shapes."""
    if shown := [x.prefix for x in layers if x.why == OF_GROUPS]:
        yield (
            f"{len(shown)} x norm read as LayerNorm, whose tensors GroupNorm and InstanceNorm have as "
            f"well: {listed(shown, 3)}; where one is no LayerNorm, write a plan and set its kind to "
            "other"
        )


def not_back(
    layers: Sequence[Module], becomes: Iterable[str], mistakable: Sequence[str], to: str
) -> Iterator[str]:
    """Yields notes on layers and names that a conversion back would change."""
    shown = [
        x.prefix for x, kind in zip(layers, becomes, strict=True) if kind != x.kind == "conv1d"
    ]
    if shown:
        yield (
            f"{len(shown)} x conv1d, whose kernel is (Di Do), written as a linear layer: converted "
            f"back to another layout than gpt2 they are Linear, (Do Di): {listed(shown, 3)}"
        )
    if mistakable:
        yield (
            f"carried over under names that {to} gives to layers: {listed(mistakable)}; converted "
            "back they would be renamed: name their kinds in a plan"
        )


def carried_norms(why: Mapping[str, str], unlike: Iterable[str]) -> Iterator[str]:
    """Yields notes on the tensors of norms that are copied unchanged.

    `why`: the reason for every tensor that is copied. `unlike`: the reasons that concern norms.
    """
    counts = Counter(reason for reason in why.values() if reason in set(unlike))
    for reason, count in counts.items():
        yield f"{count} x a tensor of a norm, carried over as it is: {reason}"


def in_parts(why: Mapping[str, str]) -> Iterator[str]:
    """Yields a note on tensors that are copied because torch computes weights from them.

    `parametrized` finds these tensors. `why`: as in `carried_norms`.
    """
    found = list(dict.fromkeys(x for x in why.values() if x.startswith(parametrized.COMPUTES)))
    if found:
        more = f" (and {len(found) - 1} more)" * (len(found) > 1)
        yield f"carried over in parts, of which no other framework computes a weight: {found[0]}{more}"


def flattened(layers: Sequence[Module], to: Convention | None) -> Iterator[str]:
    """Yields a note on linear layers that may read or make a flattened image.

    torch flattens channels first, other frameworks last, so their features may have another order
    in the target. There is no note between frameworks with the same order.
    """
    convolutions = {one.convention is TORCH for one in layers if one.kind == "convolution"}
    if to is None or convolutions != {to is not TORCH}:
        return
    ranked = sorted(layers, key=lambda one: natural(one.prefix))
    items = [
        Item(
            one.prefix,
            tuple(re.split("[./]", one.prefix)),
            n,
            one.sizes.get("Di", -1),
            one.sizes.get("Do", one.sizes.get("D", -1)),
            one.kind == "convolution",
        )
        for n, one in enumerate(ranked)
        if "Do" in one.sizes or "V" in one.sizes
    ]
    norms = {n: one.sizes["D"] for n, one in enumerate(ranked) if one.sizes.keys() == {"D"}}
    found = next_to_convolutions(items, norms)
    shown = [
        f"{ranked[n].prefix} ({m} channels x {k})" for n, (_, m, k, _) in sorted(found.items())
    ]
    if shown:
        yield (
            f"next to a flattened convolution by their sizes: {listed(shown)}: torch flattens channels "
            "first, other frameworks last, and the arrays keep the order of the source: flatten in "
            "this order in the model, or match both models, which reorders it (jaxmha match)"
        )


def renamed(layers: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yields a note on layers whose path is replaced by the name that the user gave them."""
    if shown := [f"{source} -> {target}" for source, target in layers]:
        yield f"named as their user called them: {listed(shown)}"
