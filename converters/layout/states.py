"""Makes the flat dict of arrays that a layout reads from a nested tree."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxmha.converters.layout.arrays import framework_of


def flat(state: object, separator: str) -> Mapping[str, Any]:
    """The arrays by key, where a nested tree or tuples as keys are joined by the separator.

    A list or tuple of dicts or arrays has its indices as keys. Boxes of Flax that hold an array and
    its sharding (`nn.Partitioned`, `nnx.Param`) are unboxed.

    Raises TypeError if the state is not a mapping, or a key is neither a string nor a number.

    >>> flat({"query": {"kernel": 1}, ("key", "kernel"): 2}, "/")
    {'query/kernel': 1, 'key/kernel': 2}
    >>> flat({"layers": [{"kernel": 1}, {"kernel": 2}]}, "/")
    {'layers/0/kernel': 1, 'layers/1/kernel': 2}
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
    nested = any(_children(value) is not None or _array_of(value) is not value for value in values)
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
        children = _children(value)
        if children is None:
            yield start, _array_of(value)
            continue
        for key, array in _joined(children, separator):
            yield f"{start}{separator}{key}", array


def _children(value: object) -> Mapping[Any, Any] | None:
    """The values of a dict, or of a list or tuple with dicts or arrays, by key; None for others.

    A list of numbers is an array.
    """
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, list | tuple):
        return None
    holds = any(hasattr(_array_of(one), "shape") or _children(one) is not None for one in value)
    return dict(enumerate(value)) if holds else None


def _array_of(value: Any) -> Any:
    """The array in a box of Flax; any other value as it is."""
    if framework_of(value) != "flax":
        return value
    if hasattr(value, "get_value"):  # of nnx
        return value.get_value()
    if not hasattr(value, "unbox"):
        return value
    # `unbox` would also constrain the sharding, which needs the mesh.
    return _array_of(value.value if hasattr(value, "value") else value.unbox())
