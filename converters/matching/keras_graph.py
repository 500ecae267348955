"""Reads from live Keras models which layers depend on which.

This decides if the numbers in names that Keras gave, such as `dense_1`, are the order of layers.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from jaxmha.converters.discovery.live_model import LiveModel


def dependencies(live: LiveModel) -> dict[str, set[str] | None]:
    """Maps the path of each layer that Keras has numbered to those of the layers it depends on.

    Keras numbers the layers of a functional model by their distance from its outputs: this is the
    order of computation, except in parallel branches. A layer in a list depends on those before it.
    A path maps to None where nothing shows that: the layers of a subclassed model are numbered as
    they were made, those of a dict as they were put into it.
    """
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for path, layer in live.layers.items():
        parent = path.rpartition("/")[0]
        if parent and (parent not in live.layers or parent.rpartition("/")[2] == "layers"):
            groups[parent][path] = layer
    found: dict[str, set[str] | None] = {}
    for parent, inside in groups.items():
        above, _, attribute = parent.rpartition("/")
        needs = _needs(live.layers.get(above), attribute)
        names = {id(layer): path for path, layer in inside.items()}
        for layer, path in names.items():
            known = None if needs is None else needs[layer]
            found[path] = None if known is None else {names[n] for n in known if n in names}
    return found


def in_order(layers: Mapping[str, Any]) -> bool:
    """True if `layers` are in the order of computation: of a functional or sequential model.

    Parallel branches are in any order. A subclassed model has its layers in the order of the names
    of its attributes.
    """
    kinds = {base.__name__ for base in type(layers[""]).__mro__}
    return bool(kinds & {"Functional", "Sequential"})


def channels_first(layers: Mapping[str, Any]) -> set[int]:
    """The ids of the convolutions whose features still have the channels first when flattened.

    These are all with `data_format="channels_first"`, unless a `Flatten` with this format, or a
    `Permute` after the convolution, puts the channels last.
    """
    found: set[int] = set()
    for layer in layers.values():
        kinds = {base.__name__ for base in type(layer).__mro__}
        first = getattr(layer, "data_format", "") == "channels_first"
        if first and "Flatten" in kinds:
            return set()
        if "Permute" in kinds:
            found.clear()
        if first and "BaseConv" in kinds:
            found.add(id(layer))
    return found


def _needs(holder: object, attribute: str) -> dict[int, set[int]] | None:
    """Maps the id of each layer in an attribute of `holder` to ids of all it needs; None if unknown."""
    kinds = {base.__name__ for base in type(holder).__mro__}
    several = getattr(holder, attribute, None)
    if attribute == "layers" and "Functional" in kinds:
        return _of_graph(holder)
    if attribute == "layers" and "Model" in kinds and "Sequential" not in kinds:
        return None
    return _of_list(several) if isinstance(several, list | tuple) else None


def _of_list(layers: Iterable[object]) -> dict[int, set[int]]:
    """Maps the id of each layer of a list to the ids of the layers before it."""
    every = [id(layer) for layer in layers]
    return defaultdict(set, {one: set(every[:n]) for n, one in enumerate(every)})


def _of_graph(model: Any) -> dict[int, set[int]]:
    """Maps the id of each operation of a functional model, a layer or not, to ids of all it needs."""
    found: dict[int, set[int]] = defaultdict(set)
    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            for tensor in node.input_tensors:
                one = id(tensor._keras_history.operation)
                found[id(node.operation)] |= {one} | found[one]
    return found
