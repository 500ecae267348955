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
from jaxmha.converters.slices import Slices
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


@pytest.mark.parametrize("suffix", ["safetensors", "safetensors.index.json", "npz", "pt"])
def test_nothing_is_read_that_no_device_holds(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layouts are converted by views, and parts that devices share are read once."""
    path = tmp_path / f"model.{suffix}"
    state = torch.export_params(layer(), layout="torch")
    checkpoint.write(path, state)
    read: list[int] = []

    def counted(slices: Slices, part: Any) -> Any:
        assert slices.is_mapped(part)
        read.append(part.nbytes)
        return real(slices, part)

    real = Slices.read
    monkeypatch.setattr(Slices, "read", counted)
    monkeypatch.setattr(checkpoint.Checkpoint, "__getitem__", None)
    devices = mesh(data=2, tensor=4)
    specs = partial(sharding.specs, mesh=devices, tensor="tensor")
    sharded.load_sharded(path, devices, specs, layout="torch", num_heads=N)
    assert sum(read) == sum(x.nbytes for x in state.values())


RNG = np.random.default_rng(0)
TENSORS: dict[str, Any] = {
    "a": RNG.standard_normal((7, 5, 6)).astype(np.float32),
    "b": np.asfortranarray(RNG.standard_normal((12, 8)).astype(np.float16)),
    "c": RNG.random((3, 5)) < 0.5,
}


@pytest.mark.parametrize(
    "suffix", ["safetensors", "safetensors.index.json", "npz", "pt", "weights.h5", "orbax", "zip"]
)
def test_views_are_read_as_they_lie(tmp_path: Path, suffix: str) -> None:
    """Cut, transposed and split axes, by the map and by boxes; also across the end of a row."""
    path = tmp_path / f"model.{suffix}"
    if suffix == "zip":
        path = tmp_path / "compressed.npz"
        np.savez_compressed(path, allow_pickle=False, **TENSORS)
    else:
        checkpoint.write(path, TENSORS)
    with checkpoint.open(path, mmap=True) as file:
        slices = Slices(file, list(TENSORS))
        a, b, c = (slices.views[name] for name in TENSORS)
        assert slices.is_mapped(a) == (suffix not in ("orbax", "zip"))
        x, y, z = TENSORS.values()
        for ours, theirs in (
            (a, x),
            (a[2:5, :, 1:3], x[2:5, :, 1:3]),
            (a.transpose(2, 0, 1)[1:4], x.transpose(2, 0, 1)[1:4]),
            (a.reshape(7, 30)[:, 11:23], x.reshape(7, 30)[:, 11:23]),
            (a[::2, 3], x[::2, 3]),
            (b.reshape(3, 4, 8)[:, 1:3], y.reshape(3, 4, 8)[:, 1:3]),
            (b[:, 3:5].T, y[:, 3:5].T),
            (c[1:], z[1:]),
            (a[:0], x[:0]),
        ):
            tolerance.assert_same(slices.read(ours), theirs)


def test_large_parts_go_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "PIECE", 100)
    monkeypatch.setattr("jaxmha.converters.slices.SPAN", 64)
    path = tmp_path / "model.npz"
    checkpoint.write(path, TENSORS)
    found = sharded.load_sharded(path, mesh(data=8), {"b": P(None, "data")})
    for name, expected in TENSORS.items():
        tolerance.assert_same(found[name], expected)


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
