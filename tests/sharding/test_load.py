"""Checkpoints loaded by slices."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jaxmha
from jaxmha import checkpoint, sharding
from jaxmha.converters import linear, torch
from jaxmha.converters.migrate.lazy_slices import Slices
from jaxmha.converters.sharded import distributed
from tests import drawn, tolerance
from tests.sharding.devices import mesh, put

N, H = 4, 5
P: Any = PartitionSpec


def layer() -> jaxmha.MHAParams:
    return drawn.params(num_heads=N, features=N * H)


@pytest.mark.parametrize("suffix", ["safetensors", "npz", "pt"])
def test_layers(tmp_path: Path, suffix: str) -> None:
    """A layer of torch comes out as `import_params` has it, spread as `specs` says."""
    path = tmp_path / f"model.{suffix}"
    state = torch.export_params(layer(), layout="torch", prefix="h.0.attn")
    checkpoint.write(path, {**state, "h.0.mlp": np.ones((3, 3), np.float32)})
    expected, semantics = torch.import_params(state, num_heads=N, prefix="h.0.attn")
    devices = mesh(fsdp=2, tensor=4)
    specs = partial(sharding.specs, mesh=devices, fsdp="fsdp", tensor="tensor")
    params, found = distributed.load_sharded(
        path, devices, specs, layout="torch", num_heads=N, prefix="h.0.attn"
    )
    assert found == semantics
    placed: Any = params.query.kernel
    assert placed.sharding.spec == P("fsdp", "tensor", None)
    for name, x in jaxmha.params.leaves(params).items():
        tolerance.assert_same(x, jaxmha.params.leaves(expected)[name], name)


@pytest.mark.parametrize("layout", ["falcon", "x-transformers"])
@pytest.mark.parametrize("compressed", [False, True])
def test_heads_that_no_view_can_order(tmp_path: Path, layout: str, compressed: bool) -> None:
    params = drawn.params(num_heads=N, num_kv_heads=2, features=N * H, use_bias=False)
    state = linear.export_params(params, layout=layout, prefix="a")
    save = np.savez_compressed if compressed else np.savez
    save(tmp_path / "a.npz", allow_pickle=False, **state)
    found, _ = distributed.load_sharded(
        tmp_path / "a.npz", mesh(tensor=8), partial(jax.tree.map, lambda _: P()), layout=layout,
        num_heads=N, prefix="a",
    )  # fmt: skip
    for name, x in jaxmha.params.leaves(found).items():
        tolerance.assert_same(x, jaxmha.params.leaves(params)[name], name)


def test_half_precision_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    weight = np.asarray(jax.random.normal(jax.random.key(0), (8, 3), "bfloat16"))
    checkpoint.write(path, {"a": weight, "b": np.zeros((0, 3), np.float32)})
    found = distributed.load_sharded(path, mesh(data=8), {"a": P("data")})
    placed: Any = found["a"]
    assert placed.sharding.spec == P("data")
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
    distributed.load_sharded(path, devices, specs, layout="torch", num_heads=N)
    assert sum(read) == sum(x.nbytes for x in state.values())


RNG = np.random.default_rng(0)
TENSORS: dict[str, Any] = {
    "a": RNG.standard_normal((7, 5, 6)).astype(np.float32),
    "b": np.asfortranarray(RNG.standard_normal((12, 8)).astype(np.float16)),
    "c": RNG.random((3, 5)) < 0.5,
    "step": np.asarray(41, np.int32),
    "flag": np.asarray(True),
}
FORMATS = ["safetensors", "safetensors.index.json", "npz", "pt", "weights.h5", "orbax", "zip"]


def written(folder: Path, suffix: str) -> Path:
    """TENSORS in a file; "zip": an .npz file that is compressed."""
    if suffix != "zip":
        path = folder / f"model.{suffix}"
        checkpoint.write(path, TENSORS)
        return path
    path = folder / "compressed.npz"
    np.savez_compressed(path, allow_pickle=False, **TENSORS)
    return path


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_tensor_of_every_format(tmp_path: Path, suffix: str) -> None:
    """Scalars too."""
    path = written(tmp_path, suffix)
    found = distributed.load_sharded(path, mesh(data=4, tensor=2), {"b": P("data", "tensor")})
    assert found.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        assert isinstance(found[name], jax.Array)
        tolerance.assert_same(found[name], expected, name)


def test_saved_and_loaded(tmp_path: Path) -> None:
    devices = mesh(data=8)
    weight = put(devices, np.arange(16, dtype=np.float32).reshape(8, 2), "data")
    scalars = {"n": jnp.int32(41), "flag": jnp.array(True), "loss": np.float32(7)}
    saved = {"block/weight": weight, **scalars}
    distributed.save_sharded(tmp_path / "step", saved)
    found = distributed.load_sharded(tmp_path / "step", devices, {"block/weight": P("data")})
    assert found.keys() == saved.keys()
    for name, expected in saved.items():
        tolerance.assert_same(found[name], np.asarray(expected), name)


@pytest.mark.parametrize("suffix", FORMATS)
def test_views_are_read_as_they_lie(tmp_path: Path, suffix: str) -> None:
    """Cut, transposed and split axes, by the map and by boxes; also across the end of a row."""
    with checkpoint.open(written(tmp_path, suffix), mmap=True) as file:
        slices = Slices(file, list(TENSORS))
        a, b, c, step, flag = (slices.views[name] for name in TENSORS)
        assert slices.is_mapped(a) == (suffix not in ("orbax", "zip"))
        x, y, z, number, truth = TENSORS.values()
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
            (step, number),
            (flag[...], truth),
            (a[1, 2, 3, ...], x[1, 2, 3, ...]),
        ):
            tolerance.assert_same(slices.read(ours), theirs)
        with pytest.raises(TypeError, match="int32"):
            slices.read(step[()])


def test_large_parts_go_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "PIECE", 100)
    monkeypatch.setattr("jaxmha.converters.migrate.lazy_slices.SPAN", 64)
    path = tmp_path / "model.npz"
    checkpoint.write(path, TENSORS)
    found = distributed.load_sharded(path, mesh(data=8), {"b": P(None, "data")})
    for name, expected in TENSORS.items():
        tolerance.assert_same(found[name], expected)


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    checkpoint.write(path, {"a": np.ones((7, 3))})
    devices = mesh(data=8)
    with pytest.raises(TypeError, match="a is float64, which JAX would round"):
        distributed.load_sharded(path, devices, {})
    with pytest.raises(ValueError, match="the checkpoint has no b"):
        distributed.load_sharded(path, devices, {"b": P("data")})
    with pytest.raises(ValueError, match="unknown layout 'pytorch'"):
        distributed.load_sharded(path, devices, {}, layout="pytorch")
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, {"a": np.ones((7, 3), np.float32)})
    distributed.load_sharded(path, devices, {}, prefix="a")
    with pytest.raises(ValueError, match=r"no tensor's name starts with 'zzz': they start with a$"):
        distributed.load_sharded(path, devices, {}, prefix="zzz")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P("data"), r"^a: .*7"),
        (P(None, None, "data"), r"^a: P\(None, None, 'data'\) has 3 axes, .* shape \(7, 3\)"),
        (P("dat"), r"^a: .*dat .*not found in mesh: \('data',\)"),
        (P("data", "data"), r"^a: P\('data', 'data'\) names data twice"),
        ("data", r"^a: expected a PartitionSpec, got 'data'"),
    ],
    ids=["indivisible", "rank", "unknown", "twice", "type"],
)
def test_specs_that_do_not_fit(
    tmp_path: Path, spec: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are named by their tensor, and nothing has been read."""
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, {"A": np.ones(3, np.float32), "a": np.ones((7, 3), np.float32)})
    monkeypatch.setattr(Slices, "read", None)
    with pytest.raises(TypeError if isinstance(spec, str) else ValueError, match=message):
        distributed.load_sharded(path, mesh(data=8), {"a": spec})


ONES = np.ones(3, np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "there are no arrays to save"),
        ({"a/b": ONES, "a": ONES}, r"a is both a tensor and a folder \(of a/b\)"),
        ({"a//b": ONES}, "'a//b': a name is keys"),
        ({"a": ONES, "b": np.ones(3)}, "b is float64, which JAX would round"),
        ({"a": 3}, "a: expected an array, got int"),
        ({"a": ONES[:0]}, r"a has shape \(0,\): orbax saves no empty arrays"),
    ],
    ids=["nothing", "clash", "name", "float64", "number", "empty"],
)
def test_nothing_is_saved_that_could_not_be_loaded(
    tmp_path: Path, arrays: Any, message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        distributed.save_sharded(tmp_path / "step", arrays)
    assert not list(tmp_path.iterdir())
