"""Layers that no name, class or shape decides are questions, whose lines answer them."""

# mypy: disable-error-code="misc"
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import torch
from flax import nnx

from jaxmha.converters import match
from jaxmha.converters.matching import arrows

D, F = 5, 3


class Own(torch.nn.Module):
    """A class that multiplies from the left, next to torch's own, which transposes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(D, D))
        self.fc = torch.nn.Linear(D, F)


class OwnEquinox(eqx.Module):
    weight: jax.Array
    fc: eqx.nn.Linear


class Mine(nnx.Module):
    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.zeros((D, D)))
        self.fc = nnx.Linear(D, F, rngs=nnx.Rngs(0))


OWN: dict[str, Any] = {
    "torch": Own,
    "equinox": lambda: OwnEquinox(jnp.zeros((D, D)), eqx.nn.Linear(D, F, key=jax.random.key(0))),
}


@pytest.mark.parametrize("name", OWN)
def test_a_class_of_the_users_has_no_axes_of_another_class(name: str) -> None:
    asked = {q.target: q.reason for q in match(OWN[name](), Mine()).questions}
    assert asked["kernel"] == arrows.UNDECIDED
