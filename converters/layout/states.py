"""Makes the flat dict of arrays that a layout reads from a nested tree."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxmha.converters.layout.arrays import framework_of


def flat(state: object, separator: str) -> Mapping[str, Any]:
    """The arrays by key, where a nested tree or tuples as keys are joined by the separator.

    Raises TypeError if the state is no mapping, or a key is neither a string nor a number.

    >>> flat({"query": {"kernel": 1}, ("key", "kernel"): 2}, "/")
    {'query/kernel': 1, 'key/kernel': 2}
    """
    if not isinstance(state, Mapping):
        instead = (
            "for a live layer call from_module(layer) of jaxmha.converters.torch, .keras or .flax"
        )
        if isinstance(state, str | Path):
            instead = "for a file pass dict(file) of `with jaxmha.checkpoint.open(path) as file`"
        raise TypeError(
            f"state: expected a dict of arrays by key, got {type(state).__name__}: {instead}"
        )
    # Other mappings, such as an open checkpoint, are flat, and may read an array for each value.
    values = state.values() if isinstance(state, dict) or framework_of(state) else ()
    nested = any(isinstance(value, Mapping) for value in values)
    if not nested and all(isinstance(name, str) for name in state):
        return state
    return dict(_joined(state, separator))


def _joined(state: Mapping[Any, Any], separator: str) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        parts = name if isinstance(name, tuple) else (name,)
        if wrong := [part for part in parts if not isinstance(part, str | int)]:
            raise TypeError(
                f"state: expected keys that are strings, or tuples of them, got {wrong[0]!r}"
            )
        start = separator.join(map(str, parts))
        if isinstance(value, Mapping):
            for key, array in _joined(value, separator):
                yield f"{start}{separator}{key}", array
        else:
            yield start, value.get_value() if hasattr(value, "get_value") else value  # of nnx
