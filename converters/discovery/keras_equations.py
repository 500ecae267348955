"""The einsum equations and softmax axes by which Keras' attention layers compute.

`build` stores them in attributes of the layer, where an assignment may change them.
"""

from collections.abc import Iterator
from string import ascii_lowercase
from typing import Any

from jaxmha.converters.discovery.own_forward import Settings, refuse_settings


def refuse_equations(layer: Any, instead: str) -> None:
    """Raises ValueError if a built layer has other equations than `build` stores."""
    for name, settings in _expected(layer):
        owner = getattr(layer, name) if name else layer
        for attribute, values in settings.items():
            if _renamed(getattr(owner, attribute)) not in map(_renamed, values):
                refuse_settings(owner, {attribute: values}, instead, name or "layer")


def _expected(layer: Any) -> Iterator[tuple[str, Settings]]:
    """Yields the name of a sublayer, and the values that `build` may have stored in its attributes.

    The name "" stands for the layer itself.
    """
    grouped = hasattr(layer, "num_query_heads")
    rank = 3 if grouped else len(layer._query_dense.equation.partition(",")[0])
    attended = (1,) if grouped else layer._attention_axes
    for name in ("_query_dense", "_key_dense", "_value_dense", "_gate_dense"):
        if getattr(layer, name, None) is not None:
            yield name, {"equation": (_projection(rank - 1, 1, 2),)}
    outputs = 1 if grouped else max(1, len(layer._output_shape or ()))
    yield "_output_dense", {"equation": (_projection(rank - 1, 2, outputs),)}
    query = ascii_lowercase[: rank + 1]
    new = dict(zip(attended, ascii_lowercase[rank + 1 :], strict=False))
    key = "".join(new.get(axis, letter) for axis, letter in enumerate(query))
    others = "".join(query[axis] for axis in range(rank) if axis not in attended)
    scores = others + "".join(query[axis] for axis in attended) + "".join(new.values())
    operands = f"{query},{key}" if grouped else f"{key},{query}"
    equations = {
        "dot_product": f"{operands}->{scores}",
        "combine": f"{scores},{key}->{query}",
    }
    yield "", {f"_{name}_equation": (equation,) for name, equation in equations.items()}
    last = tuple(range(-len(new), 0))
    same: tuple[Any, ...] = (tuple(len(scores) + axis for axis in last), last)
    yield "_softmax", {"axis": (*same, *(axis for (axis,) in same)) if len(new) == 1 else same}


def _projection(free: int, summed: int, made: int) -> str:
    letters = ascii_lowercase
    kept, inner, new = letters[:free], letters[free : free + summed], letters[free + summed :]
    return f"{kept}{inner},{inner}{new[:made]}->{kept}{new[:made]}"


def _renamed(value: Any) -> Any:
    """An equation with its letters renamed to a, b, ... in order, to compare it with others.

    Lists become tuples; any other value is returned as it is.
    """
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list | tuple) else value
    letters = dict.fromkeys(x for x in value if x.isalpha())
    renamed = dict(zip(letters, ascii_lowercase, strict=False))
    return "".join(renamed.get(x, x) for x in value)
