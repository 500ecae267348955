"""Groups repeated layers of a tree into templates."""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxmha.converters.matching import repeats
from jaxmha.converters.matching.layers import MAIN, Layer, layers, signature
from jaxmha.converters.matching.terms import (
    AUTOMATIC,
    CANONICAL,
    IN_MLP,
    LISTS,
    ORDER,
    meaning,
    snake,
    terms,
)
from jaxmha.converters.matching.trees import Tree

GAPS = "the numbers of the blocks have gaps"
BRANCHES = "their numbers count parallel branches"
AS_MADE = "Keras has numbered them as they were made, which may not be the order of the calls"
NO_GRAPH = "a file or dict does not show whether their numbers are an order: match the live model"


@dataclass(frozen=True)
class Template:
    """Layers whose paths differ only in the numbers of repeated blocks.

    Attributes:
      path: the common path, with "#" for each number that differs.
      layers: a tuple with the rank of the number at each "#" -> layer.
      terms: canonical terms of the path, and of the role of the layer in its block (`roles`).
      irregular: why its blocks cannot be paired by number, such as gaps; "" if they can.
      placed: how the order of its layers was inferred if they are siblings, not a list (`rolled`).
      automatic: True if Keras or Haiku has given the last part of its name.
      unordered: why the last number of its path does not tell its position; "" if it may.
      halves: True if its output is twice as wide as the next layer reads, as if a gate and the values
        that it multiplies were packed in it, in an order that no name tells.
    """

    path: tuple[str, ...]
    layers: Mapping[tuple[int, ...], Layer]
    terms: frozenset[str] = frozenset()
    irregular: str = ""
    unordered: str = ""
    placed: str = ""
    automatic: bool = False
    halves: bool = False

    @property
    def first(self) -> Layer:
        """The layer with the lowest ranks."""
        return self.layers[min(self.layers)]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of different values of each "#"."""
        return tuple(len(set(column)) for column in zip(*self.layers, strict=True))

    @property
    def ranks(self) -> frozenset[tuple[int, ...]]:
        """The ranks of all layers."""
        return frozenset(self.layers)

    @property
    def lists(self) -> list[frozenset[str]]:
        """For each "#" in the path: the terms of the list that it numbers, such as {"layer"}."""
        found = []
        for n, part in enumerate(self.path):
            if "#" in part:
                named = terms(part) or terms(self.path[n - 1] if n else "")
                found.append(
                    frozenset(LISTS.get(w.removesuffix("s"), w.removesuffix("s")) for w in named)
                )
        return found


def templates(tree: Tree) -> list[Template]:
    """Returns the templates of a tree; a layer that is not repeated is a template by itself."""
    every = layers(tree)
    shapes = [layer.slots[MAIN].shape for layer in every]
    known = [(layer.path, shape) for layer, shape in zip(every, shapes, strict=True)]
    found = dict(zip(repeats.comparable_paths(known, tree.depends_on), every, strict=True))
    of_shape = {path: layer.slots[MAIN].shape for path, layer in found.items()}
    given = {  # path of a block or layer -> the path in the tree
        path[: len(path) - n]: layer.path[: len(layer.path) - n]
        for path, layer in found.items()
        for n in range(len(path))
    }
    marks, gaps = repeats.repeated(of_shape, tree.depends_on)
    irregular = dict.fromkeys(gaps, GAPS)
    lists: dict[tuple[repeats.Path, str], list[tuple[int, repeats.Path]]] = defaultdict(list)
    for path, (mark, rank) in marks.items():
        lists[path[:-1], mark].append((rank, path))
    for several in lists.values():
        blocks = [path for _, path in sorted(several)]
        if why := _order_unknown([given[path] for path in blocks], tree):
            irregular |= dict.fromkeys(blocks, why)
    groups: dict[tuple[tuple[str, ...], object], dict[tuple[int, ...], Layer]] = defaultdict(dict)
    for path, layer in found.items():
        marked = tuple(marks.get(path[: n + 1], (part, 0))[0] for n, part in enumerate(path))
        ranks = tuple(marks[path[: n + 1]][1] for n in range(len(path)) if path[: n + 1] in marks)
        groups[(marked, signature(layer))][ranks] = layer
    where = {id(layer): path for path, layer in found.items()}
    made = []
    for (marked, _), members in groups.items():
        paths = [where[id(layer)] for layer in members.values()]
        starts = (path[: n + 1] for path in paths for n in range(len(path)))
        reason = next((irregular[start] for start in starts if start in irregular), "")
        made.append(_template(marked, members, where[id(members[min(members)])], reason))
    unordered = _unordered(made, tree)
    return [
        replace(t, unordered=unordered.get(i, ""), automatic=t.first.path in tree.depends_on)
        for i, t in enumerate(made)
    ]


def _unordered(templates: Sequence[Template], tree: Tree) -> dict[int, str]:
    """Maps the index of each template whose last number does not tell its position to the reason."""
    classes: dict[object, list[tuple[int, int]]] = defaultdict(list)
    for i, template in enumerate(templates):
        if template.first.path in tree.depends_on:
            stem, number = repeats.class_and_number(template.path[-1])
            key = (template.path[:-1], stem, signature(template.first))
            classes[key].append((number, i))
    found: dict[int, str] = {}
    for members in classes.values():
        if why := _order_unknown([templates[i].first.path for _, i in sorted(members)], tree):
            found |= {i: why for _, i in members}
    return found


def _order_unknown(paths: Sequence[repeats.Path], tree: Tree) -> str:
    """Returns why the numbers of layers may not be their order; "" if each needs the one before it.

    Names that a user has given, which are not in `Tree.depends_on`, are trusted.
    """
    sets = [tree.depends_on[path] for path in paths if path in tree.depends_on]
    if len(paths) < 2 or not sets:
        return ""
    if None in sets:
        return AS_MADE if tree.kind == "keras" else NO_GRAPH
    if len(sets) < len(paths):
        return ""
    in_series = all(
        a in (sets[n + 1] or ()) and b not in (sets[n] or ())
        for n, (a, b) in enumerate(itertools.pairwise(paths))
    )
    return "" if in_series else BRANCHES


def _template(
    marked: tuple[str, ...],
    members: Mapping[tuple[int, ...], Layer],
    own: tuple[str, ...],
    irregular: str,
) -> Template:
    """Makes a template of `members`; a "#" with one value gets its number from the path `own`."""
    keep = [len(set(column)) > 1 for column in zip(*members, strict=True)]
    flags, path = iter(keep), []
    for part, mine in zip(marked, own, strict=True):
        path.append(part if "#" not in part or next(flags) else mine)
    kept = {
        tuple(r for r, k in zip(ranks, keep, strict=True) if k): x for ranks, x in members.items()
    }
    return Template(tuple(path), kept, meaning(path), irregular if any(keep) else "")


def ordinal(template: Template) -> tuple[tuple[str, ...], int] | None:
    """Returns the path without its last number or ordinal ("second"), and the number; or None.

    >>> ordinal(Template(("a", "fc2"), {}))
    (('a', 'fc'), 2)
    """
    path = template.path
    for n in range(len(path) - 1, -1, -1):
        if "#" in path[n]:
            return None
        parts = terms(path[n])
        for i in range(len(parts) - 1, -1, -1):
            if parts[i].isdigit():
                rest = "_".join([*parts[:i], *parts[i + 1 :]])
                return (*path[:n], rest, *path[n + 1 :]), int(parts[i])
        of_mlp = IN_MLP if "mlp" in template.terms else {}
        named = [of_mlp.get(w, CANONICAL.get(w, w)) for w in parts]
        known = [(i, ORDER[w]) for i, w in enumerate(named) if w in ORDER]
        if len(known) == 1:
            rest = "_".join(w for i, w in enumerate(parts) if i != known[0][0])
            return (*path[:n], rest, *path[n + 1 :]), known[0][1]
    return None


def by_number(several: Sequence[Template]) -> list[int] | None:
    """Returns indices, sorted by the one number in which the names differ; None if there is none.

    An automatic name without a number is the first: `dense`, `dense_1`.

    >>> names = "dense_9", "dense_10", "dense"
    >>> by_number([Template((name,), {}, automatic=True) for name in names])
    [2, 0, 1]
    """
    if any(t.unordered for t in several):
        return None
    keys = [ordinal(t) for t in several]
    for common in dict.fromkeys(key[0] for key in keys if key):
        numbers = [
            key[1]
            if key and key[0] == common
            else 0
            if t.automatic and _unnumbered(t.path, common)
            else -1
            for key, t in zip(keys, several, strict=True)
        ]
        if -1 not in numbers and len(set(numbers)) == len(numbers):
            return sorted(range(len(several)), key=numbers.__getitem__)
    return None


def _unnumbered(path: tuple[str, ...], common: tuple[str, ...]) -> bool:
    """True if a path is `common` but for the spelling of a class, as `LayerNorm` for `layer_norm`."""
    return any(
        snake(part) in AUTOMATIC and (*path[:n], "_".join(terms(part)), *path[n + 1 :]) == common
        for n, part in enumerate(path)
    )
