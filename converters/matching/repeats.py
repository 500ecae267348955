"""Finds numbered siblings in paths: the repeated blocks of a model."""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxmha.converters.matching.terms import ORDER

Path = tuple[str, ...]
Marks = dict[Path, tuple[str, int]]
SHARED = 0.6  # blocks are repetitions if they share this fraction of layers of the smaller block
_NUMBERED = re.compile(r"^(?P<stem>.*?)(?P<number>\d+)$")
_WITHIN = re.compile(r"^(?P<block>[A-Za-z_]*\d+)_(?P<rest>.+)$")
_ORDINALS = {word: n for word, n in ORDER.items() if n and word not in ("in", "out")}
# Keras and Haiku count the layers of a class as `dense`, `dense_1`, `dense_2`.
COUNTER = "_"


def numbered(part: str) -> tuple[str, int] | None:
    """Stem and number of a part, such as ("block_", 3).

    >>> numbered("block_3"), numbered("ff_second"), numbered("norm")
    (('block_', 3), ('ff_', 2), None)
    """
    if match := _NUMBERED.match(part):
        return match["stem"], int(match["number"])
    stem, _, last = part.rpartition(COUNTER)
    if stem and last in _ORDINALS:
        return f"{stem}{COUNTER}", _ORDINALS[last]
    return None


def counted(part: str) -> tuple[str, int]:
    """The class and number of an automatic name.

    >>> counted("dense"), counted("LayerNorm_2")
    (('dense', 0), ('LayerNorm', 2))
    """
    stem, _, number = part.rpartition(COUNTER)
    return (stem, int(number)) if stem and number.isdecimal() else (part, 0)


def siblings(parts: Collection[str]) -> dict[str, list[tuple[int, str]]]:
    """Maps each stem to its (number, part), sorted by number.

    A part without a number is the first of the siblings `<part>_<number>`.

    >>> siblings({"dense", "dense_2", "dense_10", "dense_1", "norm"})
    {'dense_': [(0, 'dense'), (1, 'dense_1'), (2, 'dense_2'), (10, 'dense_10')]}
    """
    lists: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for part in parts:
        if found := numbered(part):
            lists[found[0]].append((found[1], part))
    for stem, several in lists.items():
        bare, lowest = stem.removesuffix(COUNTER), min(several)[0]
        if bare != stem and bare in parts and lowest > 0:
            several.append((1 if lowest == 2 else 0, bare))  # `norm`, `norm_2` counts from 1
        several.sort()
    return dict(lists)


def paths(shapes: Sequence[tuple[Path, object]]) -> list[Path]:
    """Returns the paths, in the same order, in the form in which repeated blocks are found.

    `block0_norm` counts as two parts if, say, `block1_mlp` exists. In blocks whose layers are
    counted through the whole model, the layers are counted anew in each block.
    """
    given = [path for path, _ in shapes]
    cut = _split(given)
    made = [tuple(map(_literal, path)) for path in cut]
    return _counted_anew(dict(zip(made, (shape for _, shape in shapes), strict=True)), made)


def _split(given: Sequence[Path]) -> list[Path]:
    within: dict[tuple[Path, str], set[str]] = defaultdict(set)
    for one in given:
        for n, part in enumerate(one):
            if match := _WITHIN.match(part):
                stem = re.sub(r"\d+$", "", match["block"])
                within[one[:n], stem].add(f"{match['block']} {match['rest']}")
    split_at = {
        key
        for key, names in within.items()
        if len({x.split()[0] for x in names}) > 1 and len({x.split()[1] for x in names}) > 1
    }
    made = []
    for one in given:
        path: list[str] = []
        for n, part in enumerate(one):
            match = _WITHIN.match(part)
            if match and (one[:n], re.sub(r"\d+$", "", match["block"])) in split_at:
                path += [match["block"], match["rest"]]
            else:
                path.append(part)
        made.append(tuple(path))
    return made


def _literal(part: str) -> str:
    """Escapes "#" in a part of a path, because templates use it for numbers."""
    return part.replace("\\", "\\\\").replace("#", "\\.")


def _counted_anew(shapes: Mapping[Path, object], given: Sequence[Path]) -> list[Path]:
    """Replaces the numbers of a class in each block by ranks, if only then the blocks are alike.

    In variable paths of Keras, the second encoder has `encoder_1/dense_2` and `encoder_1/dense_3`.
    """
    content, children = _contents(shapes), _children(shapes)
    renamed: dict[Path, Path] = {}  # path of a layer -> path with ranks
    for parent in sorted(children, key=len, reverse=True):  # the outermost blocks last
        inner = [part for part in children[parent] if (*parent, part) not in shapes]
        for several in siblings(inner).values():
            blocks = [(*parent, part) for _, part in several]
            raw = [content[block] for block in blocks]
            if (count := _count_alike(raw)) == len(blocks):
                continue
            names = [_anew([path for path, _ in one]) for one in raw]
            ranked = [{(new[p], x) for p, x in one} for new, one in zip(names, raw, strict=True)]
            if _count_alike(ranked) > count:
                for block, new in zip(blocks, names, strict=True):
                    renamed |= {(*block, *p): (*block, *q) for p, q in new.items()}
    return [renamed.get(path, path) for path in given]


def _contents(shapes: Mapping[Path, object]) -> dict[Path, set[tuple[Path, object]]]:
    """Maps each block to the paths within it, with the shape of each."""
    content: dict[Path, set[tuple[Path, object]]] = defaultdict(set)
    for path, shape in shapes.items():
        for n in range(len(path)):
            content[path[: n + 1]].add((path[n + 1 :], shape))
    return content


def _children(found: Iterable[Path]) -> dict[Path, set[str]]:
    below: dict[Path, set[str]] = defaultdict(set)
    for path in found:
        for n in range(len(path)):
            below[path[:n]].add(path[n])
    return below


def _anew(inside: Collection[Path]) -> dict[Path, Path]:
    """Maps the paths in a block to paths in which every class is counted from 0."""
    ranks: dict[Path, str] = {}
    for parent, parts in _children(inside).items():
        classes: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for part in parts:
            stem, number = counted(part)
            classes[stem].append((number, part))
        for stem, several in classes.items():
            for rank, (_, part) in enumerate(sorted(several)):
                ranks[*parent, part] = f"{stem}{COUNTER}{rank}"
    return {path: tuple(ranks[path[: n + 1]] for n in range(len(path))) for path in inside}


def _count_alike(contents: Sequence[Collection[object]]) -> int:
    """The number of blocks that are like the most frequent one; 0 if only one is."""
    chief = Counter(map(frozenset, contents)).most_common(1)[0][0]
    count = sum(_alike(chief, one) for one in contents)
    return count if count > 1 else 0


def repeated(shapes: Mapping[Path, object]) -> tuple[Marks, set[Path]]:
    """Finds repeated blocks: path -> (last part with "#", rank); and blocks in lists with gaps.

    `shapes`: path of a layer -> shape of its main array.
    """
    content = _contents(shapes)
    marks: Marks = {}
    irregular: set[Path] = set()
    for parent, parts in _children(shapes).items():
        inner = [part for part in parts if (*parent, part) not in shapes]
        for stem, several in siblings(inner).items():
            if len(several) < 2:
                continue
            kinds = Counter(frozenset(content[(*parent, part)]) for _, part in several)
            chief = kinds.most_common(1)[0][0]
            members = [(n, p) for n, p in several if _alike(chief, content[(*parent, p)])]
            if len(members) < 2:
                continue
            steps = {b[0] - a[0] for a, b in itertools.pairwise(members)}
            for rank, (_, part) in enumerate(members):
                marks[(*parent, part)] = (f"{stem}#" if stem else "#", rank)
                if len(steps) > 1:
                    irregular.add((*parent, part))
    return marks, irregular


def _alike(mine: Collection[object], theirs: Collection[object]) -> bool:
    """True if the two blocks share at least the fraction `SHARED` of the smaller one's layers."""
    common = sum(layer in mine for layer in theirs)
    return common >= SHARED * min(len(mine), len(theirs))
