"""Checkpoints loaded by slices."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxmha
from jaxmha import sharding
from jaxmha.converters import checkpoint, sharded, torch
from tests import tolerance
from tests.sharding.devices import mesh

N, H = 4, 5
P: Any = PartitionSpec


def layer() -> jaxmha.MHAParams:
    return jaxmha.init_params(jax.random.key(0), num_heads=N, features=N * H)


@pytest.mark.parametrize("suffix", ["safetensors", "npz", "pt"])
def test_layers(tmp_path: Path, suffix: str) -> None:
    """A layer of torch comes out as `import_params` has it, spread as `specs` says."""
    path = tmp_path / f"model.{suffix}"
    state = torch.export_params(layer(), layout="torch", prefix="h.0.attn")
    checkpoint.write(path, {**state, "h.0.mlp": np.ones((3, 3), np.float32)})
    expected, semantics = torch.import_params(state, num_heads=N, prefix="h.0.attn")
    devices = mesh(fsdp=2, tensor=4)
    specs = partial(sharding.specs, mesh=devices, fsdp="fsdp", tensor="tensor")
    params, found = sharded.load_sharded(
        path, devices, specs, layout="torch", num_heads=N, prefix="h.0.attn"
    )
    assert found == semantics
    assert params.query.kernel.sharding.spec == P("fsdp", "tensor", None)
    for name, x in jaxmha.params.leaves(params).items():
        tolerance.assert_same(x, jaxmha.params.leaves(expected)[name], name)


def test_half_precision_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    weight = np.asarray(jax.random.normal(jax.random.key(0), (8, 3), "bfloat16"))
    checkpoint.write(path, {"a": weight, "b": np.zeros((0, 3), np.float32)})
    found = sharded.load_sharded(path, mesh(data=8), {"a": P("data")})
    assert found["a"].sharding.spec == P("data")
    tolerance.assert_same(found["a"], weight)
    assert found["b"].shape == (0, 3)


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_nothing_is_read_that_no_device_holds(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layouts are converted by views, and parts that devices share are read once."""
    path = tmp_path / f"model.{suffix}"
    state = torch.export_params(layer(), layout="torch")
    checkpoint.write(path, state)
    read: list[int] = []

    def counted(part: Any) -> Any:
        whole = part
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        assert isinstance(whole, np.memmap)
        read.append(part.nbytes)
        return real(part)

    real = sharded._read
    monkeypatch.setattr(sharded, "_read", counted)
    monkeypatch.setattr(checkpoint.Checkpoint, "__getitem__", None)
    devices = mesh(data=2, tensor=4)
    specs = partial(sharding.specs, mesh=devices, tensor="tensor")
    sharded.load_sharded(path, devices, specs, layout="torch", num_heads=N)
    assert sum(read) == sum(x.nbytes for x in state.values())


def test_refusals(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    checkpoint.write(path, {"a": np.ones((7, 3))})
    devices = mesh(data=8)
    with pytest.raises(TypeError, match="a is float64, which JAX would round"):
        sharded.load_sharded(path, devices, {})
    with pytest.raises(ValueError, match="the checkpoint has no b"):
        sharded.load_sharded(path, devices, {"b": P("data")})
    with pytest.raises(ValueError, match="unknown layout 'pytorch'"):
        sharded.load_sharded(path, devices, {}, layout="pytorch")
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, {"a": np.ones((7, 3), np.float32)})
    with pytest.raises(ValueError, match="a: "):
        sharded.load_sharded(path, devices, {"a": P("data")})
