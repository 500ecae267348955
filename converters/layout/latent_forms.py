"""Latent attention in files, in two forms: DeepSeek's keys, and the leaves of `LatentParams`.

A form says which leaves an array holds; converting between the forms moves numbers and changes none.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import numpy as np

from jaxmha.converters.layout import latent
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.layout.base import Layout

# Without entries: converting a block of `MHAParams` to this layout raises an error that names it.
DEEPSEEK = Layout(
    "deepseek",
    (),
    ties={},
    about="latent attention of DeepSeek-V2, DeepSeek-V3 and models like them",
)
FORMS = (DEEPSEEK.name, "jaxmha")
_ENDS = {"weight": "kernel", "bias": "bias"}

Shapes = Mapping[str, Sequence[int]]


class Held(NamedTuple):
    """One array of a form: its leaves, and functions between it and them.

    `shape` returns the shape of the array from the shapes of its leaves.
    """

    leaves: tuple[str, ...]
    split: Callable[[NDArray], Mapping[str, NDArray]]
    join: Callable[[Sequence[NDArray]], NDArray]
    shape: Callable[[Sequence[Sequence[int]]], tuple[int, ...]]


def own_keys() -> dict[str, Held]:
    """Maps the key of every leaf of `LatentParams` in layout jaxmha to its array, which is the leaf."""
    return {key: _alone(leaf) for leaf, key in latent.OWN.items()}


def deepseek_keys(sizes: Mapping[str, int], low_rank: bool) -> dict[str, Held]:
    """Maps every key of DeepSeek's layout to its array.

    `low_rank`: True if queries are projected from latents.
    """
    found = {key: _alone(leaf) for key, leaf in latent.NORMS.items()}
    for linear in latent.linears_of(low_rank):
        for end, leaf in _ENDS.items():
            leaves = tuple(f"{name}.{leaf}" for name in linear.leaves)
            split = partial(latent.split, linear, end, sizes=sizes)
            found[f"{linear.name}.{end}"] = Held(
                leaves, split, partial(_joined, linear, end), partial(_shape, linear, end)
            )
    return found


def sizes_of(shapes: Shapes) -> dict[str, int]:
    """The sizes of a block from its shapes by DeepSeek's keys; ValueError if they do not fit."""
    return latent.sizes_of({key: _placeholder(shape) for key, shape in shapes.items()})


def leaf_shapes(held: Mapping[str, Held], shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The shape of every leaf in the arrays of a block."""
    return {
        leaf: part.shape
        for key, shape in shapes.items()
        for leaf, part in held[key].split(_placeholder(shape)).items()
    }


def _placeholder(shape: Sequence[int]) -> NDArray:
    return np.broadcast_to(np.zeros(()), tuple(shape))


def _alone(leaf: str) -> Held:
    return Held(
        (leaf,),
        lambda array: {leaf: array},
        lambda parts: parts[0],
        lambda shapes: tuple(shapes[0]),
    )


def _joined(linear: latent.Linear, end: str, parts: Sequence[NDArray]) -> NDArray:
    return np.ascontiguousarray(latent.joined(linear, end, list(parts)))


def _shape(linear: latent.Linear, end: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    first, width = tuple(shapes[0]), sum(shape[-1] for shape in shapes)
    whole = prod(first[:-1]) * width
    if end == "bias":
        return (whole,)
    inputs = first[0] * first[1] if linear.name == "o_proj" else first[0]
    return whole // inputs, inputs
