"""Assigns a group of a .weights.h5 file to each layer: from the source, or from a template file.

Keras pairs the groups of a class, in the order of their numbers, with the layers of this class, in
the order in which the model creates them. Names in other formats do not give this order.
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
from jaxmha.converters.migrate.plans import Step

_IN_FILE = {layout.name for layout, _ in keras.IN_FILE.values()}
Groups = dict[str, tuple[str, str]]
_SHOWN = 8
NOT_KNOWN = (
    "the order in which the Keras model creates layers of one class and shape is in no tensor: "
    "see the note, and name a file that the model saved (--like)"
)


def kept(file: Tensors, steps: Iterable[Step]) -> Groups:
    """Maps source prefixes to (group, name), from a .weights.h5 source or from metadata.

    Returns {} unless the groups of all layers are known.
    """
    in_metadata = keras_groups.from_metadata(file.metadata)
    found: Groups = {}
    for step in steps:
        if step.kind == "other":
            continue
        if step.layout in _IN_FILE:
            found[step.source] = step.source, file.names.get(step.source, "")
        elif step.source in in_metadata:
            found[step.source] = in_metadata[step.source]
        else:
            return {}
    return found


def to_metadata(groups: Groups, steps: Iterable[Step]) -> dict[str, str]:
    """Returns metadata with the groups, keyed by destination prefix; {} without groups."""
    matching = {step.target: groups[step.source] for step in steps if step.source in groups}
    return {keras_groups.METADATA: json.dumps(matching, separators=(",", ":"))} if matching else {}


def placed(steps: Sequence[Step], groups: Groups) -> tuple[Step, ...]:
    """Returns the planned layers of a .weights.h5 file with their groups as targets."""
    return tuple(
        replace(step, target=groups[step.source][0], name=groups[step.source][1])
        if step.source in groups
        else step
        for step in steps
    )


def like(steps: Sequence[Step], source: Tensors, template: Tensors) -> tuple[Step, ...]:
    """Returns the planned layers with the groups of a template, matched by name or path.

    The numbers that Keras appends to default names are ignored, because they depend on the models
    created before.

    Raises:
      ValueError: a layer has no counterpart; the message lists the names in both files.
    """
    groups: dict[str, list[str]] = {}
    for group in _layers(template):
        groups.setdefault(_called(group, template.names), []).append(group)
    known, found, left = kept(source, steps), Groups(), dict[str, str]()
    for step in (step for step in steps if step.kind != "other"):
        group, name = known.get(step.source, (step.source, ""))
        called = _called(group, {group: name} if name else {})
        if len(matching := groups.get(called, [])) == 1:
            found[step.source] = matching[0], template.names.get(matching[0], "")
        else:
            left[step.source] = called
    taken = {group for group, _ in found.values()}
    free = [group for several in groups.values() for group in several if group not in taken]
    if len(left) == len(free) == 1:  # a single layer and a single group remain
        found |= {source: (free[0], template.names.get(free[0], "")) for source in left}
    elif left:
        called = next(iter(left.values()))
        had = ", ".join(sorted(groups)[:_SHOWN]) + ", ..." * (len(groups) > _SHOWN)
        what = "has several layers" if called in groups else "has no layer"
        raise ValueError(
            f"--like: the file {what} named {called or '(top)'!r}; its layers are {had}: name the "
            "layers of the model so, or write a plan and set `to` of every module"
        )
    return placed(steps, found)


def _called(group: str, names: Mapping[str, str]) -> str:
    """Returns the user's name of a layer, or its path, with dots instead of slashes."""
    return dotted(group, "/", names).replace("/", ".")


def _layers(template: Tensors) -> Iterator[str]:
    """Yields the groups of layers that hold arrays; an attention block counts as one layer."""
    found = attention_blocks.find({name: tuple(one.shape) for name, one in template.info.items()})
    taken = {name for block in found for name in block.keys.values()}
    yield from (block.prefix for block in found)
    rest = [name for name in template.info if name not in taken]
    yield from dict.fromkeys(name.rpartition("/vars/")[0] for name in rest if "/vars/" in name)


def refuse_unlike(made: Mapping[str, Any], template: Tensors) -> None:
    """Raises ValueError if the destination has other arrays or shapes than the template."""
    ours = {name: tuple(one.info.shape) for name, one in made.items()}
    theirs = {name: tuple(one.shape) for name, one in template.info.items()}
    for name in {**theirs, **ours}:
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"--like: {name} is {theirs.get(name, 'not there')} in that file, and would be "
                f"{ours.get(name, 'absent')}: it is of another model"
            )


def order_is_evident(steps: Sequence[Step], info: Mapping[str, Any]) -> bool:
    """True if all layers of a class differ in shape, so that no two can be exchanged unnoticed."""
    alike = Counter(
        (
            re.sub(r"_\d+$", "", step.target),
            tuple(sorted(tuple(info[name].shape) for name in step.tensors)),
        )
        for step in steps
        if step.kind != "other"
    )
    return all(count == 1 for count in alike.values())
