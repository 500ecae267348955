"""Names the arrays of `nnx.State` in orbax folders as the model does.

Flax saves a variable as a tree with one leaf `value`, so that names end in `/value`.
"""

import re
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from jaxmha.checkpoint import optimizer_state
from jaxmha.checkpoint.plan import Contents
from jaxmha.checkpoint.tensor import TensorInfo

ENDING = "/value"
Value = TypeVar("Value")


def find(info: Mapping[str, TensorInfo]) -> frozenset[str]:
    """The values of variables: names with the ending and nothing else at their level or below.

    One value among other weights is a parameter `value` of another tree, and is not returned.
    """
    apart = {*optimizer_state.find(info)}
    weights = {
        name
        for name, one in info.items()
        if name not in apart and one.shape and one.dtype != np.dtype(np.uint32)
    }
    inside = Counter(name[: at.start()] for name in info for at in re.finditer("/", name))
    ended = {name for name in info if name.endswith(ENDING)}
    alone = frozenset(name for name in ended if inside[name.removesuffix(ENDING)] == 1)
    others = weights - alone
    return alone if alone & weights and (len(alone & weights) > 1 or not others) else frozenset()


def boxed(arrays: Mapping[str, Value], but: Container[str] = ()) -> dict[str, Value]:
    """Arrays, or facts about them, by the names with the ending, from which Flax restores a state.

    `but`: names of arrays that are no values of variables, and keep their names.
    """
    return {name if name in but else f"{name}{ENDING}": one for name, one in arrays.items()}


def unboxed(contents: Contents) -> Contents:
    """Returns contents whose values of variables have names without the ending."""
    values = find(contents.info)
    shorter = {n: n.removesuffix(ENDING) if n in values else n for n in contents.info}
    if not values or len({*shorter.values()}) < len(shorter):
        return contents
    stored = {short: name for name, short in shorter.items()}
    part, stream = contents.part, contents.stream
    return replace(
        contents,
        unboxed=frozenset(shorter[name] for name in values),
        info={short: contents.info[name] for short, name in stored.items()},
        load=lambda name: contents.load(stored[name]),
        digests={shorter[name]: digest for name, digest in contents.digests.items()},
        places={shorter[name]: places for name, places in contents.places.items()},
        part=None if part is None else lambda name, box: part(stored[name], box),
        stream=None if stream is None else lambda name: stream(stored[name]),
    )
