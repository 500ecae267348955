"""Names the arrays of `nnx.State` in orbax folders as the model does.

Flax saves a variable as a tree with one leaf `value`, so that names end in `/value`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from jaxmha.checkpoint import optimizer_state
from jaxmha.checkpoint.plan import Contents
from jaxmha.checkpoint.tensor import TensorInfo

ENDING = "/value"
Value = TypeVar("Value")


def are_in(info: Mapping[str, TensorInfo]) -> bool:
    """True if all weights are the values of variables.

    An optimizer, counters and raw PRNG keys next to them may be stored otherwise.
    """
    apart = {*optimizer_state.find(info)}
    weights = [
        name
        for name, one in info.items()
        if name not in apart and one.shape and one.dtype != np.dtype(np.uint32)
    ]
    return bool(weights) and all(name.endswith(ENDING) for name in weights)


def boxed(arrays: Mapping[str, Value]) -> dict[str, Value]:
    """Arrays, or facts about them, by the names with the ending, from which Flax restores a state."""
    return {f"{name}{ENDING}": one for name, one in arrays.items()}


def unboxed(contents: Contents) -> Contents:
    """Returns contents whose names lack the ending, if `are_in` says so; else unchanged."""
    shorter = {name: name.removesuffix(ENDING) for name in contents.info}
    if not are_in(contents.info) or len({*shorter.values()}) < len(shorter):
        return contents
    stored = {short: name for name, short in shorter.items()}
    part, stream = contents.part, contents.stream
    return replace(
        contents,
        unboxed=True,
        info={short: contents.info[name] for short, name in stored.items()},
        load=lambda name: contents.load(stored[name]),
        digests={shorter[name]: digest for name, digest in contents.digests.items()},
        places={shorter[name]: places for name, places in contents.places.items()},
        part=None if part is None else lambda name, box: part(stored[name], box),
        stream=None if stream is None else lambda name: stream(stored[name]),
    )
