"""`prove` counts no output as equal, or says so, where zeros that were never trained hide other layers."""

# mypy: disallow-subclassing-any=False, disallow-untyped-decorators=False
from typing import Any

import jax
import pytest
import torch
from flax import nnx

from jaxmha.converters import flax
from jaxmha.converters.matching import Proof, prove
from tests.match.test_proof_outputs import Mine, Returns, Theirs, inputs, proof_of


def part_of_the_input(f: Any, y: Any, x: Any, p: Any) -> Any:
    """Returns a part of the input, to which a branch of zeros is added, with length before batch."""
    return (x + 0 * f)[:, 1:].swapaxes(0, 1)


@pytest.mark.parametrize(
    "returns", [lambda f, y, x, p: 0 * y, lambda f, y, x, p: x + 0 * f, part_of_the_input]
)
def test_the_remedy_for_a_layer_of_zeros_compares_the_others(returns: Returns) -> None:
    """A new head, or the last layer of a residual branch: both models return zeros, or the input."""
    with pytest.raises(
        ValueError, match=r"(?s)no numbers to compare.*random numbers .*fill .* again"
    ):
        proof_of(returns, returns)

    def untrained(activation: Any, std: float) -> Proof:
        source = Theirs(lambda f, y, x, p: y)
        torch.nn.init.zeros_(source.head.bias)
        torch.nn.init.normal_(source.head.weight, std=std)
        model = flax.load_into(Mine(lambda f, y, x, p: y, activation), source)
        return prove(source, model, inputs=inputs)

    with pytest.raises(ValueError, match="random numbers"):
        untrained(jax.nn.relu, 0)
    assert untrained(jax.nn.relu, 1).same
    assert not untrained(jax.nn.gelu, 1).same


def branch(f: Any, y: Any, x: Any, p: Any) -> Any:
    return 2.5 * x[..., :3] + y


class Jitted(Mine):
    """A model of which no layer is recorded."""

    @nnx.jit
    def __call__(self, x: jax.Array, padding: jax.Array) -> Any:
        return super().__call__(x, padding)


class Gated(Theirs):
    def __init__(self) -> None:
        super().__init__(lambda f, y, x, p: branch(f, self.alpha * y, x, p))
        self.alpha = torch.nn.Parameter(torch.zeros(()))


class GatedMine(Mine):
    def __init__(self) -> None:
        super().__init__(lambda f, y, x, p: branch(f, self.alpha[...] * y, x, p), jax.nn.gelu)
        self.alpha = nnx.Param(jax.numpy.zeros(()))


# The layer or gate of zeros, the source, and the model.
NETS: dict[str, tuple[str, Any, Any]] = {
    "layer": ("head", lambda: Theirs(branch), lambda: Mine(branch, jax.nn.gelu)),
    "jit": ("head", lambda: Theirs(branch), lambda: Jitted(branch, jax.nn.gelu)),
    "gate": ("alpha", Gated, GatedMine),
}


@pytest.mark.parametrize("std", [0, 1])
@pytest.mark.parametrize("kind", NETS)
def test_a_note_names_zeros_that_hide_a_wrong_activation(kind: str, std: float) -> None:
    """The last layer of a branch, or its gate: all outputs agree."""
    name, make, target = NETS[kind]
    source = make()
    torch.nn.init.zeros_(source.head.bias)
    torch.nn.init.normal_(getattr(source, "alpha", source.head.weight), std=std)
    proof = prove(source, flax.load_into(target(), source), inputs=inputs)
    assert proof.same == (std == 0)
    start = f"{name} of the source and the model give only zeros"
    assert [note.startswith(start) for note in proof.notes] == [True] * (std == 0)
