"""A source model and a target model of one architecture, written apart, and how to run both."""

# mypy: ignore-errors
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmha.converters.matching.plan import Packing


def run_torch(model: Any, *inputs: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(*map(torch.as_tensor, inputs)).numpy()


def run_jax(model: Any, *inputs: Any) -> Any:
    """By one program: an eager call compiles every operation."""
    import jax

    return np.asarray(jax.jit(lambda *given: model(*given))(*map(jax.numpy.asarray, inputs)))


@dataclass(frozen=True)
class Pair:
    """`source()` and `target()` build the models, `inputs(rng)` draws the arguments of both."""

    source: Callable[[], Any]
    target: Callable[[], Any]
    inputs: Callable[[np.random.Generator], tuple[Any, ...]]
    run_source: Callable[..., Any] = run_torch
    run_target: Callable[..., Any] = run_jax
    packing: Packing = "ask"


def floats(*shape: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    return lambda rng: (rng.normal(size=shape).astype("float32"),)


def tokens(high: int, *shape: int) -> Callable[[np.random.Generator], tuple[Any, ...]]:
    return lambda rng: (rng.integers(0, high, shape),)
