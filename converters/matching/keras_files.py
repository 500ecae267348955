"""Makes paths of arrays in a Keras file, of the user's layer names and inferred weight names."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from jaxmha.checkpoint import Checkpoint
from jaxmha.converters.discovery.user_names import dotted

_GROUP, _LISTED = "/vars/", "layers/"
_NORM = ("gamma", "beta", "moving_mean", "moving_variance")


def paths(file: Checkpoint) -> dict[str, tuple[tuple[str, ...], str]]:
    """Maps array names to (path, form); "no" is for layers that other frameworks store otherwise.

    The file only numbers the weights of a layer: their names are inferred from the group, and from
    the number and ranks of the weights.
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


def counted(found: Mapping[str, tuple[tuple[str, ...], str]]) -> Iterator[tuple[str, ...]]:
    """Yields the paths of the layers that a model has numbered itself, from the `paths` of a file.

    The numbers of other layers are those of a list.
    """
    for name, (path, _) in found.items():
        if name.rpartition(_GROUP)[0].split("/")[-2:-1] == ["layers"]:
            yield path[:-1]


def _shown(group: str, names: Mapping[str, str]) -> str:
    """Returns the group with the user's layer names, without a leading `layers/`."""
    if not group.startswith(_LISTED):
        return group
    return dotted(group, "/", names).replace(".", "/").removeprefix(_LISTED)


def _keys(group: str, shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """Infers the names of the weights of one layer from its group and their shapes."""
    ranks = [len(shape) for shape in shapes]
    last = group.rpartition("/")[2]
    if ranks[0] > 1 and len(ranks) == 1 and "embed" in last:
        return ["embeddings"]
    if ranks[0] > 1 and len(ranks) <= 2:
        return ["kernel", "bias"][: len(ranks)]
    if set(ranks) == {1} and len(ranks) in (1, 2, 4):
        return list(_NORM[: len(ranks)])
    return [str(number) for number in range(len(ranks))]
