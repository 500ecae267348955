"""Compares facts of two models that no tensor holds: positions, masks, norms and their epsilons.

The configuration next to a file gives them. A converted file also names the positions of its blocks
in its metadata.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmha import checkpoint
from jaxmha.checkpoint.errors import listed, printable
from jaxmha.converters.discovery import (
    attended,
    described,
    hf_config,
    other_layers,
    positions,
)
from jaxmha.converters.discovery.attended import Attended
from jaxmha.converters.discovery.described import Description
from jaxmha.converters.discovery.notes import counted
from jaxmha.converters.discovery.positions import Positions
from jaxmha.converters.verify import config_settings, latent_comparison
from jaxmha.converters.verify.comparands import ComparedBlock
from jaxmha.converters.verify.other_tensors import Source

Pairs = Sequence[tuple[ComparedBlock, ComparedBlock]]
Prefixes = list[tuple[str, str]]
_UNLIKE = "the {} multiply by 1 + weight, or only multiply and add, in the {} only"


class Compared(NamedTuple):
    """The facts that differ, and notes on facts that were not compared."""

    differing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class _Facts(NamedTuple):
    """The facts of one file.

    `config`: its configuration; {} if it is absent, unreadable, or does not fit the tensors.
    `unused`: the reason why the configuration gives neither positions nor masks; "" if it gives them,
    or there is none.
    `places` and `masks`: block prefix -> positions and mask. `stated`: block prefix -> positions by
    the metadata. `norms`: path of a norm -> its kind.
    """

    config: Any
    unused: str
    places: Mapping[str, Positions]
    masks: Mapping[str, Attended]
    stated: Mapping[str, str]
    norms: Mapping[str, str]
    description: Description

    @property
    def typed(self) -> bool:
        """True if the configuration names a model type, and describes the tensors."""
        return bool(self.config) and not self.unused


def compare(a: Source, b: Source, pairs: Pairs, *, only_blocks: bool = False) -> Compared:
    """Compares the facts of two files; sources other than files have none.

    Two equal configurations give equal facts. `pairs`: pairs of attention blocks. `only_blocks`:
    True compares only these blocks.

    Raises CheckpointError if a file cannot be read.
    """
    if not all(isinstance(one.source, str | os.PathLike) for one in (a, b)):
        return Compared()
    with (
        checkpoint.open(a.source, dequantise=True, unbox=True) as first,
        checkpoint.open(b.source, dequantise=True, unbox=True) as second,
    ):
        contents = [hf_config.readable(file.path) for file in (first, second)]
        if contents[0] == contents[1] != {} and first.config == second.config:
            return Compared()
        x, y = _read(first, a), _read(second, b)
    blocks = [(_prefix(one, a), _prefix(other, b)) for one, other in pairs]
    latents = latent_comparison.pairs(a.latents, b.latents)[0]
    masked = blocks + [(one.prefix, other.prefix) for one, other in latents] * (not only_blocks)
    differing = [
        *_differing("positions", blocks, lambda p, q: _places(x, y, p, q)),
        *_differing("mask", masked, lambda p, q: _masks(x.masks.get(p), y.masks.get(q))),
    ]
    notes = [
        *_not_known("positions", blocks, x.places, y.places),
        *_not_known("mask", masked, x.masks, y.masks),
    ]
    if not only_blocks:
        differing += _norms(x, y)
        found, epsilons = list[config_settings.Found](), (_epsilons(x), _epsilons(y))
        if all(epsilons) or (x.config and y.config):
            found.append(config_settings.epsilons(*epsilons))
        if x.config and y.config:
            known = all(_known(x, y, *pair) for pair in blocks)
            found.append(config_settings.compare(x.config, y.config, known))
        for differences, more in found:
            differing += differences
            notes += more
        notes += _unused(x, y, blocks)
    return Compared(tuple(map(printable, differing)), tuple(map(printable, notes)))


def _read(file: checkpoint.Checkpoint, source: Source) -> _Facts:
    description = described.of(file, source.found)
    aside = description.heads.wrong if description.heads else ""
    typed = positions.typed(file, description.heads)
    content = hf_config.readable(file.path)
    prefixes = [block.prefix for block in source.found]
    prefixes += [block.prefix for block in source.latents]
    places, masks = dict[str, Positions](), dict[str, Attended]()
    if typed:
        places = positions.of_blocks(file, source.found, description.heads)
        masks = attended.of_prefixes(file, source.found, prefixes, description.heads)
    layers, _ = other_layers.find(file.info, source.found, description.unlike, description.unbiased)
    return _Facts(
        {} if aside else content,
        "" if typed else _why_unused(file, aside),
        places,
        masks,
        positions.stated(file),
        {
            x.prefix.replace("/", "."): x.kind
            for x in layers
            if x.kind in ("norm", "rmsnorm") and x.confidence != "ambiguous"
        },
        description,
    )


_UNTYPED = "names no model_type"


def _why_unused(file: checkpoint.Checkpoint, aside: str) -> str:
    """Says why a configuration gives neither positions nor masks; "" if it is absent."""
    if aside:
        return f"was set aside ({aside})"
    return _UNTYPED if hf_config.file_of(file.path).exists() else ""


def _prefix(block: ComparedBlock, source: Source) -> str:
    """The prefix in the file of a block, or of the stack that holds it."""
    path = re.sub(r"\[[\d, ]+\]$", "", block.path)
    # The group of a Keras layer -> its prefix in the file (`keras_pairs`).
    of_group = {group: prefix for prefix, (group, _) in source.groups.items()}
    return path if path in {one.prefix for one in source.found} else of_group.get(path, path)


def _differing(
    what: str, pairs: Prefixes, differ: Callable[[str, str], tuple[str, str] | None]
) -> Iterator[str]:
    """Describes the pairs of blocks that differ, one line for all with the same difference."""
    found: dict[tuple[str, str], list[str]] = {}
    for pair in dict.fromkeys(pairs):
        if (both := differ(*pair)) is not None:
            found.setdefault(both, []).append(pair[0])
    for (first, second), prefixes in found.items():
        yield f"{what} of {counted(prefixes)}: first {first}; second {second}"


def _places(x: _Facts, y: _Facts, p: str, q: str) -> tuple[str, str] | None:
    """The positions of a pair of blocks in words if they are known and differ."""
    one, other = x.places.get(p), y.places.get(q)
    if one and other and "unknown" not in (one.scheme, other.scheme):
        if _alike(one, other):
            return None
        first, second = str(one), str(other)
        return (first, second) if first != second else (first, f"{second}, of other numbers")
    both = _as_text(x, p), _as_text(y, q)
    return None if "" in both or both[0] == both[1] else both


def _as_text(facts: _Facts, prefix: str) -> str:
    """The positions of a block in words, from its configuration or metadata; "" if unknown."""
    place = facts.places.get(prefix)
    text = facts.stated.get(prefix, "") if place is None else str(place)
    return "" if text.startswith("unknown") else text


def _alike(x: Any, y: Any) -> bool:
    """True if two parameters are equal, except arrays: these are tensors, compared on their own."""
    if isinstance(x, Positions):
        x, y = x._replace(why=""), y._replace(why="")
    if isinstance(x, tuple):
        return type(x) is type(y) and len(x) == len(y) and all(map(_alike, x, y))
    return isinstance(x, np.ndarray) or isinstance(y, np.ndarray) or bool(x == y)


def _masks(one: Attended | None, other: Attended | None) -> tuple[str, str] | None:
    if not (one and other) or "unknown" in (one.scheme, other.scheme) or one == other:
        return None
    return str(one), str(other)


def _not_known(
    what: str,
    pairs: Prefixes,
    x: Mapping[str, Positions] | Mapping[str, Attended],
    y: Mapping[str, Positions] | Mapping[str, Attended],
) -> Iterator[str]:
    """Yields notes on pairs of blocks whose facts are unknown in one, or in both for unequal reasons."""
    found: dict[str, list[str]] = {}
    for p, q in dict.fromkeys(pairs):
        one, other = x.get(p), y.get(q)
        if one is None or other is None:
            continue
        whys = [each.why if each.scheme == "unknown" else "" for each in (one, other)]
        if whys[0] != whys[1]:
            for which, why in zip(("first", "second"), whys, strict=True):
                if why:
                    found.setdefault(f"unknown in the {which} ({why})", []).append(p)
    for why, prefixes in found.items():
        yield f"not compared: {what} of {counted(prefixes)}, {why}"


def _known(x: _Facts, y: _Facts, p: str, q: str) -> bool:
    """True if both configurations give the positions and the mask of a pair of blocks."""
    found = (x.places.get(p), y.places.get(q), x.masks.get(p), y.masks.get(q))
    return all(one is not None and one.scheme != "unknown" for one in found)


def _norms(x: _Facts, y: _Facts) -> Iterator[str]:
    """Describes norms of two configured files that compute different functions."""
    if not (x.typed and y.typed):
        return
    for kind in sorted(x.description.unlike.keys() ^ y.description.unlike.keys()):
        yield _UNLIKE.format(f"{kind}s", "first" if kind in x.description.unlike else "second")
    kinds: dict[tuple[str, str], list[str]] = {}
    for path in (path for path in x.norms if path in y.norms):
        if x.norms[path] != y.norms[path]:
            kinds.setdefault((x.norms[path], y.norms[path]), []).append(path)
    for (first, second), paths in kinds.items():
        yield f"kind of {len(paths)} x {listed(paths, 3)}: first {first}; second {second}"


def _epsilons(facts: _Facts) -> dict[str, tuple[float, ...]]:
    """The epsilons of one file, by the keys that lead to them or by layer."""
    if of_layers := facts.description.epsilon.by_prefix:
        return {f"epsilon of {prefix}": (value,) for prefix, value in of_layers.items()}
    by_way = hf_config.epsilons_by_way(facts.config)
    return {config_settings.named(way): values for way, values in by_way.items()}


def _unused(x: _Facts, y: _Facts, blocks: Prefixes) -> Iterator[str]:
    """Yields a note if a configuration is absent or was not used, and the other has facts."""
    if x.typed and y.typed:
        return
    reasons = x.unused, y.unused
    if not (x.typed or y.typed) and not all(reasons) and {*reasons} <= {"", _UNTYPED}:
        return  # no file has facts to lose
    named = all(_as_text(x, p) and _as_text(y, q) for p, q in blocks)
    kinds = ["positions"] * (not named) + ["masks"]
    kinds += ["epsilons of norms"] * (not (x.config and y.config))
    what = f"{', '.join(kinds)} were not compared"
    what = " and ".join(what.rsplit(", ", 1))
    aside = [
        f"the config.json next to the {which} {why}"
        for which, why in zip(("first", "second"), reasons, strict=True)
        if why
    ]
    if aside:
        yield f"{', and '.join(aside)}: {what}; put the model's own next to the file"
        return
    which = "first" if x.typed else "second"
    yield (
        f"only the {which} has a config.json of its model next to it: {what}; put the model's own "
        "next to the other"
    )
