"""Reads from the graphs of functional Keras models which layers depend on which."""

from collections import defaultdict
from typing import Any

from jaxmha.converters.discovery.live_model import LiveModel


def dependencies(live: LiveModel) -> dict[str, set[str]]:
    """Maps the path of each layer of a functional model to those of the layers it depends on.

    Keras numbers the layers of such a model by their distance from its outputs: this is the order
    of computation, except in parallel branches.
    """
    found: dict[str, set[str]] = {}
    for path, model in live.layers.items():
        kinds = {base.__name__ for base in type(model).__mro__}
        if not kinds & {"Functional", "Sequential"}:
            continue
        start = f"{path}/layers/".removeprefix("/")
        inside = {
            id(layer): name
            for name, layer in live.layers.items()
            if name.startswith(start) and "/" not in name.removeprefix(start)
        }
        before = _earlier(model) if "Sequential" in kinds else _before(model)
        for layer, name in inside.items():
            found[name] = {inside[one] for one in before[layer] if one in inside}
    return found


def _earlier(model: Any) -> dict[int, set[int]]:
    """Maps the id of each layer of a sequential model to the ids of the layers before it."""
    every = [id(layer) for layer in model.layers]
    return defaultdict(set, {one: set(every[:n]) for n, one in enumerate(every)})


def _before(model: Any) -> dict[int, set[int]]:
    """Maps the id of each layer or operation to the ids of those that it depends on."""
    found: dict[int, set[int]] = defaultdict(set)
    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            for tensor in node.input_tensors:
                one = id(tensor._keras_history.operation)
                found[id(node.operation)] |= {one} | found[one]
    return found
