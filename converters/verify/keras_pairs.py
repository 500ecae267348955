"""Pairs layers of two Keras sources by HDF5 group instead of by name, as Keras loads weights.

In a .weights.h5 file every layer has a group, named by its class and a number. If two layers
exchange their groups, Keras loads the weights of each into the other, whatever their names are.
"""

from collections.abc import Mapping

from jaxmha.checkpoint.errors import listed
from jaxmha.converters.discovery import other_layers
from jaxmha.converters.discovery.user_names import dotted
from jaxmha.converters.verify.comparands import Comparand
from jaxmha.converters.verify.other_tensors import Source

_ORDER = (
    "the order of layers of one class and shape in the .weights.h5 file is a guess, and Keras pairs "
    "layers by it: compare the file with one that the model saved, or convert with --like"
)


def by_group(a: Comparand, b: Comparand) -> tuple[Comparand, Comparand]:
    """Renames the layers of both sources to their groups, if names would pair them differently.

    The first source then gets a note. Both are returned unchanged if neither has Keras names, or if
    their groups are unknown, differ, or agree with the names.
    """
    if not (a.source.names or b.source.names):
        return a, b
    both = _with_arrays(a.source), _with_arrays(b.source)
    if not both[0] or {x for x, _ in both[0].values()} != {x for x, _ in both[1].values()}:
        return a, b
    names = [dict(one.values()) for one in both]
    moved = [group for group in names[0] if names[0][group] != names[1][group]]
    user = [g for g in moved if any(dotted(g, "/", each) != dotted(g, "/", {}) for each in names)]
    if not user:
        return a, b
    shown = [f"{group} is {names[0][group]} and {names[1][group]}" for group in user]
    note = (
        "layers are compared by group, as Keras loads them, because their names are in other "
        f"groups: {listed(shown)}"
    )
    a, b = (_placed(comparand, groups) for comparand, groups in zip((a, b), both, strict=True))
    return a._replace(notes=(note, *a.notes)), b


def unproven(a: Source, b: Source) -> tuple[str, ...]:
    """Says that the order of layers in a Keras file is a guess, which no name proves.

    Returns () if no order is guessed, or the groups of the other source determine it.
    """
    for guess, other in ((a, b), (b, a)):
        if not guess.ordered and not other.groups:
            return (_ORDER,)
    return ()


def _with_arrays(source: Source) -> dict[str, tuple[str, str]]:
    """Maps the prefix of each layer with arrays to its (group, name).

    Layers inside an attention block belong to the group of the block.
    """
    groups: Mapping[str, tuple[str, str]] = source.groups
    own = {block.prefix for block in source.found}
    taken = {other_layers.split(name)[0] for name in source.taken}
    prefixes = own | {
        other_layers.split(name)[0] for name in source.info if name not in source.taken
    }
    return {p: groups[p] for p in prefixes if p in groups and (p in own or p not in taken)}


def _placed(comparand: Comparand, groups: Mapping[str, tuple[str, str]]) -> Comparand:
    """Returns the source with its layers named by their groups."""
    paths = {prefix: dotted(group, "/", {}) for prefix, (group, _) in groups.items()}
    blocks = [
        block._replace(name=groups[block.path][0], path=groups[block.path][0])
        if block.path in groups
        else block
        for block in comparand.blocks
    ]
    source = comparand.source._replace(names={}, paths=paths)
    return comparand._replace(blocks=blocks, source=source)
