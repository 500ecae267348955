"""Finds numbered siblings in paths: the repeated blocks of a model."""

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from jaxmha.converters.matching.terms import AUTOMATIC, ORDER

Path = tuple[str, ...]
Marks = dict[Path, tuple[str, int]]
SHARED = 0.6  # blocks are repetitions if they share this fraction of layers of the smaller block
_NUMBERED = re.compile(r"^(?P<stem>.*?)(?P<number>\d+)$")
_WITHIN = re.compile(r"^(?P<block>[A-Za-z_]*\d+)_(?P<rest>.+)$")
_ORDINALS = {word: n for word, n in ORDER.items() if n and word not in ("in", "out")}
# COUNTER separates class and number: Keras and Haiku name layers `dense`, `dense_1`, `dense_2`.
COUNTER = "_"
_KEYS = ("kernel", "gamma", "beta", "moving_mean", "moving_variance", "embeddings")


def numbered(part: str) -> tuple[str, int] | None:
    """Returns the stem and the number of a part of a path; None if it has no number or ordinal.

    >>> numbered("block_3"), numbered("ff_second"), numbered("norm")
    (('block_', 3), ('ff_', 2), None)
    """
    if match := _NUMBERED.match(part):
        return match["stem"], int(match["number"])
    stem, _, last = part.rpartition(COUNTER)
    if stem and last in _ORDINALS:
        return f"{stem}{COUNTER}", _ORDINALS[last]
    return None


def class_and_number(part: str) -> tuple[str, int]:
    """Returns class and number of a name that a framework has given; 0 if the name has no number.

    >>> class_and_number("dense"), class_and_number("LayerNorm_2")
    (('dense', 0), ('LayerNorm', 2))
    """
    stem, _, number = part.rpartition(COUNTER)
    return (stem, int(number)) if stem and number.isdecimal() else (part, 0)


def counted_by_keras(paths: Collection[Path]) -> set[Path]:
    """Returns the paths of layers in a dict or file that Keras or Haiku may have numbered.

    Keras numbers the layers of a class as they were made, which need not be the order in which they
    are called. A class with a layer `<class>_0` has been numbered by the user, or by linen.

    >>> names = "norm", "norm_1", "block_0", "block_1", "head"
    >>> sorted(counted_by_keras([(name, "scale") for name in names]))
    [('norm',), ('norm_1',)]
    """
    families: dict[tuple[Path, str], set[Path]] = defaultdict(set)
    for path in paths:
        for n, part in enumerate(path[:-1]):
            families[path[:n], class_and_number(part)[0]].add(path[: n + 1])
    numbered_otherwise = {
        (parent, stem)
        for (parent, stem), several in families.items()
        if (*parent, f"{stem}{COUNTER}0") in several or stem[-1:].isdigit()
    }
    of_class = {
        path
        for path in paths
        for n, part in enumerate(path[:-1])
        if (name := class_and_number(part))[1] > 0
        and name[0] in AUTOMATIC
        and (path[:n], name[0]) not in numbered_otherwise
    }
    of_keras = any(path[-1] in _KEYS for path in of_class)
    found = set()
    for (parent, stem), several in families.items():
        bare = len(several) > 1 and (*parent, stem) in several
        if (of_keras or bare) and (parent, stem) not in numbered_otherwise:
            found |= several
    return found


def siblings(
    parts: Collection[str], automatic: Collection[str]
) -> dict[str, list[tuple[int, str]]]:
    """Maps each stem to (number, part) of all parts with this stem, sorted by number.

    A part without a number is the first of the siblings `<part>_<number>` if it is `automatic`:
    in names that a user has given, it may be the last.

    >>> names = {"dense", "dense_2", "dense_10", "dense_1", "norm"}
    >>> siblings(names, names)
    {'dense_': [(0, 'dense'), (1, 'dense_1'), (2, 'dense_2'), (10, 'dense_10')]}
    """
    lists: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for part in parts:
        if found := numbered(part):
            lists[found[0]].append((found[1], part))
    for stem, several in lists.items():
        bare, lowest = stem.removesuffix(COUNTER), min(several)[0]
        if bare != stem and bare in parts and bare in automatic and lowest > 0:
            several.append((0, bare))
        several.sort()
    return dict(lists)


def comparable_paths(
    shapes: Sequence[tuple[Path, object]], automatic: Collection[Path]
) -> list[Path]:
    """Returns the paths, in the same order, rewritten so that repeated blocks have equal contents.

    `block0_norm` becomes two parts if, say, `block1_mlp` exists. Layers that are counted through the
    whole model are counted from 0 in each block.
    """
    given = [path for path, _ in shapes]
    cut = _split(given)
    made = [tuple(map(_literal, path)) for path in cut]
    new = dict(zip(made, (shape for _, shape in shapes), strict=True))
    return _counted_anew(new, made, automatic)


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


def _counted_anew(
    shapes: Mapping[Path, object], given: Sequence[Path], automatic: Collection[Path]
) -> list[Path]:
    """Replaces the numbers of a class in each block by ranks, if only then the blocks are alike.

    Keras numbers the layers of a class over the whole model: `encoder/dense`, `encoder/dense_1`, then
    `encoder_1/dense_2` and `encoder_1/dense_3`, which have the ranks 0 and 1 in their block.
    """
    content = _contents(shapes)
    renamed: dict[Path, Path] = {}  # path of a layer -> path with ranks
    for _, numbered_blocks in _lists_of_blocks(shapes, automatic):
        blocks = [block for _, block in numbered_blocks]
        raw = [content[block] for block in blocks]
        if (count := _repetitions(raw)) == len(blocks):
            continue
        names = [
            _anew([path for path, _ in one], block, automatic)
            for block, one in zip(blocks, raw, strict=True)
        ]
        ranked = [
            {(new[path], shape) for path, shape in one} for new, one in zip(names, raw, strict=True)
        ]
        if _repetitions(ranked) > count:
            for block, new in zip(blocks, names, strict=True):
                renamed |= {(*block, *old): (*block, *now) for old, now in new.items()}
    return [renamed.get(path, path) for path in given]


def _lists_of_blocks(
    shapes: Mapping[Path, object], automatic: Collection[Path]
) -> Iterator[tuple[str, list[tuple[int, Path]]]]:
    """Yields the stem of each list of numbered blocks, and their numbers and paths in order.

    A list in a block comes before the list of that block.
    """
    children = _children(shapes)
    for parent in sorted(children, key=len, reverse=True):
        inner = [part for part in children[parent] if (*parent, part) not in shapes]
        lists = siblings(inner, {part for part in inner if (*parent, part) in automatic})
        for stem, several in lists.items():
            yield stem, [(number, (*parent, part)) for number, part in several]


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


def _anew(inside: Collection[Path], block: Path, automatic: Collection[Path]) -> dict[Path, Path]:
    """Maps the paths in a block to paths in which every automatic name is counted from 0."""
    ranks: dict[Path, str] = {}
    for parent, parts in _children(inside).items():
        classes: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for part in parts:
            stem, number = class_and_number(part)
            if (*block, *parent, part) in automatic:
                classes[stem].append((number, part))
            else:
                ranks[*parent, part] = part
        for stem, several in classes.items():
            for rank, (_, part) in enumerate(sorted(several)):
                ranks[*parent, part] = f"{stem}{COUNTER}{rank}"
    return {path: tuple(ranks[path[: n + 1]] for n in range(len(path))) for path in inside}


def _repetitions(contents: Sequence[Collection[object]]) -> int:
    """Returns how many blocks are like the one that occurs most often; 0 if none repeats it."""
    chief = _chief(contents)
    count = sum(_alike(chief, one) for one in contents)
    return count if count > 1 else 0


def _chief(contents: Sequence[Collection[object]]) -> frozenset[object]:
    """Returns the most frequent content; of equally frequent ones the first."""
    return Counter(map(frozenset, contents)).most_common(1)[0][0]


def repeated(shapes: Mapping[Path, object], automatic: Collection[Path]) -> tuple[Marks, set[Path]]:
    """Maps the path of each repeated block to its last part with "#" for the number, and its rank.

    Returns also the paths of the blocks whose numbers have gaps, which may not pair by rank.

    `shapes`: path of a layer -> shape of its main array.
    """
    content = _contents(shapes)
    marks: Marks = {}
    irregular: set[Path] = set()
    for stem, several in _lists_of_blocks(shapes, automatic):
        chief = _chief([content[block] for _, block in several])
        members = [(number, block) for number, block in several if _alike(chief, content[block])]
        if len(members) < 2:
            continue
        steps = {b[0] - a[0] for a, b in itertools.pairwise(members)}
        for rank, (_, block) in enumerate(members):
            marks[block] = (f"{stem}#", rank)
            if len(steps) > 1:
                irregular.add(block)
    return marks, irregular


def _alike(mine: Collection[object], theirs: Collection[object]) -> bool:
    """True if the two blocks share at least the fraction `SHARED` of the smaller one's layers."""
    common = sum(layer in mine for layer in theirs)
    return common >= SHARED * min(len(mine), len(theirs))
