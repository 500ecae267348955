"""Gives the arrays of a Keras file paths that name them, such as `encoder/query/kernel`.

The file has a group for every layer, and only numbers its weights.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxmha.converters.discovery.user_names import dotted

_LISTED = "layers/"
_VARIABLE = re.compile(r"(?:(?P<group>.+)/)?vars/\d+")
_NORM = ("gamma", "beta", "moving_mean", "moving_variance")


class Named(NamedTuple):
    """An array of a Keras file: its path, its axis order (`form`), and its name in the live model."""

    path: tuple[str, ...]
    form: str
    name: str


def has_names(state: Mapping[str, object]) -> bool:
    """True if a flat dict has an array named as in a Keras file.

    >>> has_names({"layers/dense/vars/0": 1}), has_names({"vars/0": 1}), has_names({"vars": 1})
    (True, True, False)
    """
    return any(_VARIABLE.fullmatch(str(name)) for name in state)


def paths(shapes: Mapping[str, tuple[int, ...]], layers: Mapping[str, str]) -> dict[str, Named]:
    """Maps the names of arrays in a Keras file to the paths that name them.

    The file only numbers the weights of a layer: their names are inferred from the group, and from
    the number and ranks of the weights. Layers that other frameworks store otherwise get the form
    "no", which is never matched. `layers`: group -> the user's name of the layer.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in shapes:
        if found := _VARIABLE.fullmatch(name):
            groups[found["group"] or ""].append(name)
    made = {}
    for group, names in groups.items():
        names.sort(key=lambda name: int(name.rpartition("/")[2]))
        keys = _keys(group, [shapes[name] for name in names])
        form = "no" if re.search(r"transpose|depthwise|separable|gru|lstm|rnn", group) else ""
        shown = _shown(group, layers)
        for name, key in zip(names, keys, strict=True):
            path = tuple(part for part in shown.removeprefix(_LISTED).split("/") if part)
            made[name] = Named((*path, key), form, f"{shown}/{key}".removeprefix("/"))
    return made


def numbered_by_keras(found: Mapping[str, Named]) -> set[tuple[str, ...]]:
    """Returns paths of layers that Keras named (`dense_1`), whose numbers may not be their order.

    `found`: the result of `paths`.
    """
    made = set()
    for name, one in found.items():
        group, layer = name.rpartition("/vars/")[0].split("/"), one.path[:-1]
        for n, part in enumerate(group):
            left = len(layer) - (len(group) - n - 1)  # `layer[:left]` is the path up to this part
            if n and group[n - 1] == "layers" and left > 0 and layer[left - 1] == part:
                made.add(layer[:left])
    return made


def _shown(group: str, names: Mapping[str, str]) -> str:
    """Returns a group with the user's name, if there is one, for a layer that Keras only numbered."""
    if not group.startswith(_LISTED):
        return group
    return dotted(group, "/", names).replace(".", "/")


def _keys(group: str, shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """Infers the names of the weights of a layer from its group and their shapes, or numbers them."""
    ranks = [len(shape) for shape in shapes]
    last = group.rpartition("/")[2]
    if ranks[0] > 1 and len(ranks) == 1 and "embed" in last:
        return ["embeddings"]
    if ranks[0] > 1 and len(ranks) <= 2:
        return ["kernel", "bias"][: len(ranks)]
    if set(ranks) == {1} and len(ranks) in (1, 2, 4):
        return list(_NORM[: len(ranks)])
    return [str(number) for number in range(len(ranks))]
