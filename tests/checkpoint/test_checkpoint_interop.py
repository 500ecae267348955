"""Files pass between jaxmha and the libraries that own the formats, both ways."""

import os
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxmha import checkpoint

os.environ.setdefault("KERAS_BACKEND", "jax")
torch = pytest.importorskip("torch")
st_numpy = pytest.importorskip("safetensors.numpy")
st_torch = pytest.importorskip("safetensors.torch")
keras = pytest.importorskip("keras")

# Keras' variables on the JAX backend have an __array__ of before NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

NUMERIC = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
    "complex64", "complex128",
]  # fmt: skip


def _arrays() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    made = {f"block.{name}": random.integers(0, 2, (3, 4)).astype(name) for name in NUMERIC}
    return made | {"scalar": np.array(3.5, np.float32), "empty": np.zeros((0, 3), np.float32)}


def _bits(tensor: Any) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def _assert_equal(path: Path, tensors: dict[str, Any]) -> None:
    with checkpoint.open(path) as file:
        assert set(file) == set(tensors)
        for name, tensor in tensors.items():
            got = file[name]
            assert got.shape == tuple(tensor.shape)
            assert str(got.dtype) == str(tensor.dtype).removeprefix("torch.")
            assert got.tobytes() == _bits(tensor)


# --- torch -------------------------------------------------------------------------------------


def test_safetensors_is_byte_identical(tmp_path: Path) -> None:
    arrays = {k: v for k, v in _arrays().items() if v.dtype != np.complex128}
    arrays["é"] = np.arange(3, dtype=np.uint16)
    arrays["bf16"] = np.arange(4).astype(ml_dtypes.bfloat16)
    for metadata in (None, {"format": "pt"}):
        st_numpy.save_file(arrays, tmp_path / "theirs.safetensors", metadata)
        checkpoint.write(
            tmp_path / "ours.safetensors", arrays, metadata=metadata, digest=None, force=True
        )
        ours = (tmp_path / "ours.safetensors").read_bytes()
        assert ours == (tmp_path / "theirs.safetensors").read_bytes()


def test_safetensors_both_ways(tmp_path: Path) -> None:
    tensors = {
        "w": torch.randn(3, 4),
        "bf16": torch.randn(3).bfloat16(),
        "f8": torch.randn(3).to(torch.float8_e4m3fn),
        "f8b": torch.randn(3).to(torch.float8_e5m2),
        "c": torch.randn(2, dtype=torch.complex64),
        "flag": torch.tensor([True, False]),
    }
    st_torch.save_file(tensors, tmp_path / "a.safetensors")
    _assert_equal(tmp_path / "a.safetensors", tensors)
    with checkpoint.open(tmp_path / "a.safetensors") as file:
        checkpoint.write(tmp_path / "b.safetensors", file)
    back = st_torch.load_file(tmp_path / "b.safetensors")
    assert {name: (t.dtype, _bits(t)) for name, t in back.items()} == {
        name: (t.dtype, _bits(t)) for name, t in tensors.items()
    }


# --- NumPy -------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_both_ways(save: Any, tmp_path: Path) -> None:
    arrays = _arrays() | {
        "layers/0/kernel": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big_endian": np.arange(5, dtype=">i4"),
        "zeros": np.zeros((500, 500)),
        "ü": np.ones(2),
    }
    save(tmp_path / "theirs.npz", **arrays)
    with checkpoint.open(tmp_path / "theirs.npz") as file:
        assert set(file) == set(arrays)
        for name, array in arrays.items():
            assert file[name].flags.c_contiguous
            assert file[name].dtype.isnative
            np.testing.assert_array_equal(file[name], array)
        checkpoint.write(tmp_path / "ours.npz", file)
    with np.load(tmp_path / "ours.npz", allow_pickle=False) as ours:
        assert set(ours) == set(arrays)
        for name, array in arrays.items():
            assert ours[name].dtype == array.dtype.newbyteorder("=")
            np.testing.assert_array_equal(ours[name], array)


def test_npz_bfloat16_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.UnsupportedDtype, match=r"safetensors"):
        checkpoint.write(tmp_path / "m.npz", {"w": np.ones(2, ml_dtypes.bfloat16)})
    np.savez(tmp_path / "theirs.npz", w=np.ones(2, ml_dtypes.bfloat16))
    with pytest.raises(checkpoint.UnsupportedDtype, match=r"safetensors"):
        checkpoint.open(tmp_path / "theirs.npz")


# --- Keras -------------------------------------------------------------------------------------


def _model(dtype: str = "float32", seed: int = 0) -> Any:
    keras.utils.set_random_seed(seed)
    x = keras.Input((5, 8))
    attention = keras.layers.MultiHeadAttention(2, 4, name="attn_one", dtype=dtype)
    second = keras.layers.MultiHeadAttention(2, 4, name="multi_head_attention", dtype=dtype)
    normal = keras.layers.BatchNormalization(name="norm", dtype=dtype)
    return keras.Model(x, keras.layers.Dense(3, dtype=dtype)(normal(second(attention(x, x), x))))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keras_both_ways(dtype: str, tmp_path: Path) -> None:
    model, other = _model(dtype), _model(dtype, seed=1)
    model.save_weights(tmp_path / "a.weights.h5")
    with checkpoint.open(tmp_path / "a.weights.h5") as file:
        assert file.names["layers/multi_head_attention"] == "attn_one"
        assert file.names["layers/multi_head_attention_1"] == "multi_head_attention"
        assert file.names["layers/multi_head_attention/query_dense"] == "query"
        kernel = file["layers/multi_head_attention/query_dense/vars/0"]
        assert kernel.shape == (8, 2, 4)
        assert str(kernel.dtype) == dtype
        expected = np.asarray(model.get_layer("attn_one").query_dense.kernel)
        assert kernel.tobytes() == expected.tobytes()
        assert len(file) == len(model.weights)
        checkpoint.write(tmp_path / "b.weights.h5", file, names=file.names)
        checkpoint.write(tmp_path / "c.safetensors", file)
        names = file.names
    with checkpoint.open(tmp_path / "c.safetensors") as file:
        checkpoint.write(tmp_path / "d.weights.h5", file, names=names)
    for name in ("b.weights.h5", "d.weights.h5"):
        other.load_weights(tmp_path / name)
        for ours, theirs in zip(other.weights, model.weights, strict=True):
            assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
            ours.assign(np.zeros(ours.shape))
    with checkpoint.open(tmp_path / "b.weights.h5") as file:
        assert dict(file.names) == dict(names)


def test_keras_legacy_and_sharded_are_refused(tmp_path: Path) -> None:
    model = _model()
    model.save(tmp_path / "old.h5")
    with pytest.raises(checkpoint.UnsupportedFormat, match="save_weights"):
        checkpoint.open(tmp_path / "old.h5")
    model.save_weights(tmp_path / "m.weights.json", max_shard_size=0.0000005)
    with pytest.raises(checkpoint.UnsupportedFormat, match="shard"):
        checkpoint.open(tmp_path / "m.weights.json")
    shards = sorted(tmp_path.glob("m_*.weights.h5"))
    assert len(shards) > 1
    found = 0
    for shard in shards:
        with checkpoint.open(shard) as file:
            found += len(file)
    assert found == len(model.weights)


def test_flax_msgpack_line_converts(tmp_path: Path) -> None:
    serialization = pytest.importorskip("flax.serialization")
    path = tmp_path / "m.msgpack"
    path.write_bytes(serialization.msgpack_serialize({"attn": {"kernel": np.ones((2, 3))}}))
    with pytest.raises(checkpoint.UnsupportedFormat, match="msgpack_restore") as caught:
        checkpoint.open(path)
    code = caught.value.remedy.removeprefix("convert it: ")
    code = code.replace("OLD", str(path)).replace("NEW", str(tmp_path / "new"))
    code = f"import pathlib, flax.traverse_util, flax.serialization, safetensors.numpy; {code}"
    exec(code)  # noqa: S102
    with checkpoint.open(tmp_path / "new.safetensors") as file:
        assert file["attn/kernel"].shape == (2, 3)


def test_hdf5_chunks_and_filters_are_read(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    data = np.arange(1000, dtype=">f4").reshape(10, 100)
    with h5py.File(tmp_path / "m.weights.h5", "w") as file:
        group = file.create_group("layer/vars")
        group.create_dataset("0", data=data, compression="gzip", shuffle=True, fletcher32=True)
        group.create_dataset("1", data=data, compression="lzf")
        group.create_dataset("2", data=data, chunks=(3, 7))
        group.create_dataset("3", data=np.zeros((2000, 2000)), compression="gzip")
    with checkpoint.open(tmp_path / "m.weights.h5") as file:
        for i in range(3):
            np.testing.assert_array_equal(file[f"layer/vars/{i}"], data)
            assert file[f"layer/vars/{i}"].dtype == np.float32
        assert not file["layer/vars/3"].any()


@pytest.mark.parametrize("libver", ["earliest", "latest", ("v108", "v108")])
def test_hdf5_attributes_of_every_version(libver: Any, tmp_path: Path) -> None:
    """Our own attribute reader agrees with h5py, whatever the layout of the object header."""
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "m.weights.h5"
    texts = {
        "none": None, "variable": "out", "fixed": np.bytes_(b"dense_1"), "unicode": "größe",
        "empty": "", "long": "x" * 500,
    }  # fmt: skip
    with h5py.File(path, "w", libver=libver, track_order=libver == "latest") as file:
        for layer, value in texts.items():
            group = file.create_group(f"{layer}/vars")
            group.attrs["before"] = np.arange(50)
            group.attrs["another"] = "text"
            if value is not None:
                group.attrs["name"] = value
            group["0"] = np.ones(3, "f4")
            for i in range(3 if layer == "variable" else 0):  # a second block of messages
                group.attrs[f"more_{i}"] = np.arange(100)
            group.attrs["after"] = "text"
        bf16 = file.create_dataset("b/vars/0", data=np.arange(3).astype(ml_dtypes.bfloat16))
        bf16.attrs["dtype"] = "bfloat16"
    with checkpoint.open(path) as checked:
        assert dict(checked.names) == {
            layer: value.decode() if isinstance(value, bytes) else value
            for layer, value in texts.items()
            if value
        }
        assert checked["b/vars/0"].dtype == ml_dtypes.bfloat16
    with h5py.File(path, "r+", libver=libver) as file:
        for i in range(40):
            file["variable/vars"].attrs[f"dense_{i}"] = i
    with checkpoint.open(path) as checked:  # densely, where the format is new
        assert checked.names["variable"] == "out"


def test_zip64_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of more than 4 GiB, with the border moved down."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 100)
    arrays: dict[str, Any] = {f"w{i}": np.arange(50.0) + i for i in range(3)}
    np.savez(tmp_path / "theirs.npz", **arrays)
    checkpoint.write(tmp_path / "ours.npz", arrays)
    checkpoint.write(tmp_path / "ours.pt", arrays)
    monkeypatch.undo()
    for name in ("theirs.npz", "ours.npz", "ours.pt"):
        assert b"PK\6\6" in (tmp_path / name).read_bytes()
        with checkpoint.open(tmp_path / name) as file:
            assert {key: file[key].tolist() for key in file} == {
                key: array.tolist() for key, array in arrays.items()
            }
    state = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert {key: t.tolist() for key, t in state.items()} == {
        k: a.tolist() for k, a in arrays.items()
    }


# --- keras archives and orbax ------------------------------------------------------------------


def test_we_read_keras_archives(tmp_path: Path) -> None:
    inputs = keras.Input((5, 12))
    layer = keras.layers.MultiHeadAttention(3, 4, name="attn_one")
    model = keras.Model(inputs, layer(inputs, inputs))
    model.save(tmp_path / "m.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    with (
        checkpoint.open(tmp_path / "m.keras") as archive,
        checkpoint.open(tmp_path / "m.weights.h5") as weights,
    ):
        assert archive.format == "keras"
        assert archive.digest() == weights.digest()
        assert archive.names == weights.names
        assert "attn_one" in archive.names.values()


ORBAX = {
    "params": {
        "attn": {"kernel": np.arange(35, dtype=np.float32).reshape(5, 7), "b.c": np.ones(3)}
    },
    "encoder.0.weight": np.ones((2, 3), ml_dtypes.bfloat16),
    "step": np.array(17),
    "list": [np.ones(2, bool), np.arange(3, dtype=np.uint8)],
}
FLAT = {
    "params/attn/kernel": ORBAX["params"]["attn"]["kernel"],  # type: ignore[index]
    "params/attn/b.c": np.ones(3),
    "encoder.0.weight": ORBAX["encoder.0.weight"],
    "step": ORBAX["step"],
    "list/0": np.ones(2, bool),
    "list/1": np.arange(3, dtype=np.uint8),
}


@pytest.mark.parametrize("kind", ["numpy", "jax", "files", "zarr3"])
def test_we_read_orbax(kind: str, tmp_path: Path) -> None:
    import jax
    import orbax.checkpoint as ocp

    tree = ORBAX
    if kind == "jax":
        with jax.enable_x64(True):
            tree = jax.tree.map(jax.numpy.asarray, ORBAX)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=kind != "files", use_zarr3=kind == "zarr3")
    with ocp.Checkpointer(handler) as writer:
        writer.save(tmp_path / "step", args=ocp.args.PyTreeSave(tree))
    with checkpoint.open(tmp_path / "step") as file:
        assert file.format == "orbax"
        assert set(file) == set(FLAT)
        for name, array in FLAT.items():
            expected = np.asarray(array)
            assert (file[name].dtype, file[name].shape) == (expected.dtype, expected.shape)
            assert file[name].tobytes() == expected.tobytes()


def test_orbax_dtypes_without_a_layout_are_refused_with_the_remedy(tmp_path: Path) -> None:
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    ocp.PyTreeCheckpointer().save(tmp_path / "step", {"w": jnp.ones((5, 3), jnp.int4)})
    with pytest.raises(checkpoint.UnsupportedDtype, match="'int4'; convert the array to another"):
        checkpoint.open(tmp_path / "step")


def test_orbax_reads_ours(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    arrays = _arrays() | {"params/attn/kernel": np.ones((300, 5)), "bf16": np.ones(3, "bfloat16")}
    checkpoint.write(tmp_path / "m.orbax", arrays)
    restored = [ocp.PyTreeCheckpointer().restore(tmp_path / "m.orbax")]
    with ocp.StandardCheckpointer() as reader:
        restored.append(reader.restore(tmp_path / "m.orbax"))
    for tree in restored:
        tree |= {"params/attn/kernel": tree.pop("params")["attn"]["kernel"]}
        assert set(tree) == set(arrays)
        for name, array in arrays.items():
            got = np.asarray(tree[name])
            assert (got.shape, got.dtype) == (array.shape, array.dtype)
            assert got.tobytes() == array.tobytes()


def test_folders_of_orbax_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.orbax"
    checkpoint.write(path, {"w": np.ones(3)})
    path.chmod(0o750)
    with pytest.raises(checkpoint.DestinationExists):
        checkpoint.write(path, {"w": np.zeros(3)})
    checkpoint.write(path, {"w": np.zeros(5)}, force=True)
    assert checkpoint.open(path)["w"].tolist() == [0] * 5
    assert path.stat().st_mode & 0o777 == 0o750
    with checkpoint.open(path) as file, pytest.raises(checkpoint.DestinationExists, match="read"):
        checkpoint.write(path, file, force=True)
    (tmp_path / "home.orbax").mkdir()
    (tmp_path / "home.orbax" / "thesis.tex").touch()
    with pytest.raises(checkpoint.DestinationExists, match="no orbax checkpoint"):
        checkpoint.write(tmp_path / "home.orbax", {"w": np.ones(3)}, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home.orbax", "m.orbax"]


def test_what_orbax_cannot_hold(tmp_path: Path) -> None:
    for tensors in ({"a/b": np.ones(2), "a.b": np.ones(2)}, {"a": np.ones(2), "a/b": np.ones(2)}):
        with pytest.raises(checkpoint.AmbiguousFile):
            checkpoint.write(tmp_path / "m.orbax", tensors)
    with pytest.raises(checkpoint.PathEscape):
        checkpoint.write(tmp_path / "m.orbax", {"a//b": np.ones(2)})
    assert not list(tmp_path.iterdir())
