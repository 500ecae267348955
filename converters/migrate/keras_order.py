"""The layer that every group of a .weights.h5 file holds: kept, or taken from another file.

Keras pairs groups with layers of their class by the number at their end, in the order in which the
model creates them; no name in another format says that order.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxmha.converters import keras
from jaxmha.converters.discovery import attention_blocks, keras_groups
from jaxmha.converters.discovery.user_names import dotted
from jaxmha.converters.migrate.lazy_tensors import Tensors
from jaxmha.converters.migrate.plans import Move

_IN_FILE = {layout.name for layout, _ in keras.IN_FILE.values()}
Groups = dict[str, tuple[str, str]]
_SHOWN = 8
NOT_KNOWN = (
    "the order in which the Keras model creates layers of one class and shape is in no tensor: "
    "see the note, and name a file that the model saved (--like)"
)


def kept(file: Tensors, moves: Iterable[Move]) -> Groups:
    """Group and name by the prefix in the source, from such a file itself or from the metadata;
    empty unless all are known."""
    told = keras_groups.told(file.metadata)
    found: Groups = {}
    for move in moves:
        if move.kind == "other":
            continue
        if move.layout in _IN_FILE:
            found[move.source] = move.source, file.names.get(move.source, "")
        elif move.source in told:
            found[move.source] = told[move.source]
        else:
            return {}
    return found


def to_metadata(groups: Groups, moves: Iterable[Move]) -> dict[str, str]:
    """The groups by the prefixes of the destination, as metadata."""
    there = {move.target: groups[move.source] for move in moves if move.source in groups}
    return {keras_groups.METADATA: json.dumps(there, separators=(",", ":"))} if there else {}


def placed(moves: Sequence[Move], groups: Groups) -> tuple[Move, ...]:
    """The moves to a .weights.h5 file, each to its own group."""
    return tuple(
        replace(move, target=groups[move.source][0], name=groups[move.source][1])
        if move.source in groups
        else move
        for move in moves
    )


def like(moves: Sequence[Move], source: Tensors, template: Tensors) -> tuple[Move, ...]:
    """The moves to the groups of a .weights.h5 file whose layers have the same names or paths.

    Keras' own counters are no names: they go on from model to model.

    Raises:
      ValueError: a layer that has no counterpart, with the names on both sides.
    """
    groups: dict[str, list[str]] = {}
    for group in _layers(template):
        groups.setdefault(_called(group, template.names), []).append(group)
    known, found, left = kept(source, moves), Groups(), dict[str, str]()
    for move in (move for move in moves if move.kind != "other"):
        group, name = known.get(move.source, (move.source, ""))
        called = _called(group, {group: name} if name else {})
        if len(there := groups.get(called, [])) == 1:
            found[move.source] = there[0], template.names.get(there[0], "")
        else:
            left[move.source] = called
    taken = {group for group, _ in found.values()}
    free = [group for several in groups.values() for group in several if group not in taken]
    if len(left) == len(free) == 1:  # whatever the two are called
        found |= {source: (free[0], template.names.get(free[0], "")) for source in left}
    elif left:
        called = next(iter(left.values()))
        had = ", ".join(sorted(groups)[:_SHOWN]) + ", ..." * (len(groups) > _SHOWN)
        what = "has several layers" if called in groups else "has no layer"
        raise ValueError(
            f"--like: the file {what} named {called or '(top)'!r}; its layers are {had}: name the "
            "layers of the model so, or write a plan and set `to` of every module"
        )
    return placed(moves, found)


def _called(group: str, names: Mapping[str, str]) -> str:
    """The name that the user gave a layer, else its path; with dots, as other files have it."""
    return dotted(group, "/", names).replace("/", ".")


def _layers(template: Tensors) -> Iterator[str]:
    """The groups of layers that hold arrays: of attention blocks as a whole, and of the rest."""
    found = attention_blocks.find({name: tuple(one.shape) for name, one in template.info.items()})
    taken = {name for block in found for name in block.keys.values()}
    yield from (block.prefix for block in found)
    rest = [name for name in template.info if name not in taken]
    yield from dict.fromkeys(name.rpartition("/vars/")[0] for name in rest if "/vars/" in name)


def refuse_unlike(made: Mapping[str, Any], template: Tensors) -> None:
    """Raises ValueError unless the file has the same arrays, of the same shapes."""
    ours = {name: tuple(one.info.shape) for name, one in made.items()}
    theirs = {name: tuple(one.shape) for name, one in template.info.items()}
    for name in {**theirs, **ours}:
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"--like: {name} is {theirs.get(name, 'not there')} in that file, and would be "
                f"{ours.get(name, 'absent')}: it is of another model"
            )


def order_is_evident(moves: Sequence[Move], info: Mapping[str, Any]) -> bool:
    """True if all layers of one class have different shapes: none could be exchanged unseen."""
    alike = Counter(
        (
            re.sub(r"_\d+$", "", move.target),
            tuple(sorted(tuple(info[name].shape) for name in move.tensors)),
        )
        for move in moves
        if move.kind != "other"
    )
    return all(count == 1 for count in alike.values())
