"""Reads layer settings that no array holds from the config.json inside a .keras archive."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxmha.converters.discovery import hf_config

WHERE = "the archive's config.json"
# Settings that equal the size of an array: class -> setting -> (array, axis).
_SIZES: dict[str, dict[str, tuple[str, int]]] = {
    "Dense": {"units": ("vars/0", 1)},
    "Embedding": {"input_dim": ("vars/0", 0), "output_dim": ("vars/0", 1)},
    "MultiHeadAttention": {
        "num_heads": ("query_dense/vars/0", 1),
        "key_dim": ("query_dense/vars/0", 2),
    },
    "GroupQueryAttention": {
        "num_query_heads": ("_query_dense/vars/0", 1),
        "num_key_value_heads": ("_key_dense/vars/0", 1),
        "head_dim": ("_query_dense/vars/0", 2),
    },
}


def layers(content: Mapping[str, Any]) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Class and settings of every layer by its name; omits names that several layers share."""
    found: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for _, value in hf_config.search(dict(content), ["layers"]):
        for one in value if isinstance(value, list) else []:
            if not isinstance(one, dict):
                continue
            settings = one.get("config")
            if isinstance(settings, dict) and isinstance(name := settings.get("name"), str):
                found.setdefault(name, []).append((str(one.get("class_name")), settings))
    return {name: both[0] for name, both in found.items() if len(both) == 1}


def epsilons(content: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """The epsilon of every layer that has one, by the group of the layer in the file."""
    known = layers(content)
    settings = {group: known[name][1] for group, name in _once(names) if name in known}
    return {
        group: float(one["epsilon"])
        for group, one in settings.items()
        if type(one.get("epsilon")) in (int, float)
    }


def contradictions(
    content: Mapping[str, Any], names: Mapping[str, str], shapes: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """Describes layer settings that differ from the sizes of the arrays in the file."""
    known = layers(content)
    for group, name in _once(names):
        kind, settings = known.get(name, ("", {}))
        for setting, (array, axis) in _SIZES.get(kind, {}).items():
            shape = tuple(shapes.get(f"{group}/{array}", ()))
            stated = settings.get(setting)
            if type(stated) is int and len(shape) > axis and shape[axis] != stated:
                yield f"{setting} of {name} is {stated}, and {group}/{array} has shape {shape}"


def _once(names: Mapping[str, str]) -> list[tuple[str, str]]:
    every = list(names.values())
    return [(group, name) for group, name in names.items() if every.count(name) == 1]
