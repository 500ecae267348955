"""Layers that frameworks store otherwise are copied between equal ones, and asked about between others."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import keras
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import save_file

from jaxmha.converters import match
from jaxmha.converters import torch as convert


def network(*layers: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.ModuleDict({f"up{n}": layer for n, layer in enumerate(layers)})


def of_torch() -> torch.nn.Module:
    sizes = ((5, 3), (4, 4))
    convolutions = (torch.nn.ConvTranspose2d(*some, 2, bias=False) for some in sizes)
    return network(*convolutions, torch.nn.Bilinear(3, 3, 3))


@pytest.mark.parametrize("stored", ["live", "state", "pt", "safetensors"])
def test_transposed_convolutions_of_torch_are_copied_to_those_of_their_names(
    stored: str, tmp_path: Path
) -> None:
    source, path = of_torch(), tmp_path / f"model.{stored}"
    state = source.state_dict()
    if stored == "pt":
        torch.save(state, path)
    elif stored == "safetensors":
        save_file(state, path, metadata={"format": "pt"})
    given = {"live": source, "state": state}.get(stored, path)
    made = convert.load_into(of_torch(), given).state_dict()
    assert all(torch.equal(x, made[name]) for name, x in state.items())
    known = {line.confidence for line in match(given, of_torch()).lines}
    assert known == {"certain" if stored == "live" else "by name"}


def of_nnx(**more: Any) -> Any:
    return nnx.Dict(up=nnx.ConvTranspose(4, 4, (2, 2), rngs=nnx.Rngs(0), **more))


def of_equinox() -> Any:
    return {"up": eqx.nn.ConvTranspose2d(4, 4, 2, key=jax.random.key(0))}


def of_keras() -> Any:
    layers = (keras.layers.Conv2DTranspose(3, 2), keras.layers.DepthwiseConv2D(2))
    return keras.Sequential([keras.Input((4, 4, 3)), *layers])


@pytest.mark.parametrize("make", [of_nnx, of_equinox, of_keras])
def test_other_convolutions_of_one_class_are_copied(make: Any) -> None:
    assert not match(make(), make()).questions


SQUARE = torch.nn.ConvTranspose2d(4, 4, 2, bias=False)
OTHERS: dict[str, tuple[Any, Any]] = {
    "a bare tree": ({"up0.weight": np.ones((4, 4, 2, 2), "f")}, network(SQUARE)),
    "other axes in Flax": (of_nnx(), of_nnx(transpose_kernel=True)),
    "another class": (network(SQUARE), network(torch.nn.Conv2d(4, 4, 2, bias=False))),
    "another library": (network(SQUARE), {"up0": of_equinox()["up"]}),
    "another name": (network(SQUARE).state_dict(), torch.nn.ModuleDict({"other": SQUARE})),
}


@pytest.mark.parametrize("which", OTHERS)
def test_other_transposed_convolutions_are_asked_about(which: str) -> None:
    assert match(*OTHERS[which]).questions
