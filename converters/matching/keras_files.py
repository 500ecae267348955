"""Paths of the arrays in a Keras file, made of the user's layer names and of weight names."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from jaxmha.checkpoint import Checkpoint
from jaxmha.converters.discovery.user_names import dotted

_GROUP, _LISTED = "/vars/", "layers/"
_NORM = ("gamma", "beta", "moving_mean", "moving_variance")


def paths(file: Checkpoint) -> dict[str, tuple[tuple[str, ...], str]]:
    """Array name -> path and form; "no" for layers that other frameworks store differently.

    A file numbers the weights of a layer. Names are inferred from the number of weights and their
    ranks.
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for name in file.info:
        group, found, number = name.rpartition(_GROUP)
        if found and number.isdigit():
            groups[group].append(name)
    made = {}
    for group, names in groups.items():
        names.sort(key=lambda name: int(name.rpartition("/")[2]))
        keys = _keys(group, [file.info[name].shape for name in names])
        form = "no" if re.search(r"transpose|depthwise|separable|gru|lstm|rnn", group) else ""
        shown = _shown(group, file.names)
        for name, key in zip(names, keys, strict=True):
            made[name] = (*(part for part in shown.split("/") if part), key), form
    return made


def _shown(group: str, names: Mapping[str, str]) -> str:
    """The group with the user's layer names; in a functional model without leading `layers`."""
    if not group.startswith(_LISTED):
        return group
    return dotted(group, "/", names).replace(".", "/").removeprefix(_LISTED)


def _keys(group: str, shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """Names of the weights of one layer, inferred from its group and the shapes of the weights."""
    ranks = [len(shape) for shape in shapes]
    last = group.rpartition("/")[2]
    if ranks[0] > 1 and len(ranks) == 1 and "embed" in last:
        return ["embeddings"]
    if ranks[0] > 1 and len(ranks) <= 2:
        return ["kernel", "bias"][: len(ranks)]
    if set(ranks) == {1} and len(ranks) in (1, 2, 4):
        return list(_NORM[: len(ranks)])
    return [str(number) for number in range(len(ranks))]
