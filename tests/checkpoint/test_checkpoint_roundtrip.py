"""Written tensors come back bit for bit, in every format and dtype."""

import string
import sys
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxmha import checkpoint
from jaxmha.checkpoint.formats import keras_h5, npz, safetensors, zarr
from jaxmha.checkpoint.formats.torch import records

HELD: dict[str, frozenset[np.dtype]] = {
    ".safetensors": frozenset(safetensors.CODES),
    ".pt": frozenset((*records.STORAGES.values(), *records.UNTYPED.values())),
    ".weights.h5": frozenset(keras_h5.DTYPES),
    ".npz": frozenset(npz.DTYPES),
}
# Other formats hold the dtypes in DTYPES of the module that writes them, or all if it has no DTYPES.
ALL_DTYPES: list[np.dtype] = sorted(frozenset().union(*HELD.values()), key=str)
HELD |= {
    format.suffixes[0]: frozenset(
        getattr(sys.modules[format.write.__module__], "DTYPES", ALL_DTYPES)
    )
    for format in checkpoint.FORMATS
    if format.write and not (format.folder or format.sharded or HELD.keys() & {*format.suffixes})
}
EVERY = HELD | {
    ".orbax": frozenset(zarr.NAMES),
    ".safetensors.index.json": HELD[".safetensors"],
    ".bin.index.json": HELD[".pt"],
}
SHAPES: list[tuple[int, ...]] = [(), (1,), (5,), (2, 3), (0,), (3, 0, 2), (1, 1, 1, 2)]


def sample(shape: tuple[int, ...], dtype: np.dtype, seed: int = 0) -> np.ndarray:
    """Every bit pattern is possible, NaN payloads included."""
    raw = np.random.default_rng(seed).integers(
        0, 2 if dtype == np.bool_ else 256, (int(np.prod(shape)) * dtype.itemsize,), np.uint8
    )
    return raw.view(dtype).reshape(shape)


def assert_same(path: Path, expected: Mapping[str, np.ndarray]) -> None:
    with checkpoint.open(path) as file:
        assert set(file) == set(expected)
        assert len(file) == len(expected)
        for name, array in expected.items():
            got = file[name]
            assert type(got) is np.ndarray
            assert got.flags.c_contiguous
            assert got.flags.writeable
            assert got.flags.owndata or got.base is not None
            assert got.dtype.isnative
            assert file.info[name] == (array.shape, got.dtype)
            assert (got.shape, got.dtype) == (array.shape, array.dtype.newbyteorder("="))
            assert got.tobytes() == array.astype(got.dtype).tobytes()
            assert not np.shares_memory(got, file[name])
            part = file.part(name, ())
            assert (part.shape, part.dtype, part.tobytes()) == (got.shape, got.dtype, got.tobytes())


@pytest.mark.everyday(suffix=HELD)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("suffix", EVERY)
def test_every_dtype_and_shape(suffix: str, dtype: np.dtype, tmp_path: Path) -> None:
    path = tmp_path / f"m{suffix}"
    tensors = {f"t/{i}.w": sample(shape, dtype, i) for i, shape in enumerate(SHAPES)}
    if dtype not in EVERY[suffix]:
        with pytest.raises(checkpoint.UnsupportedDtype, match="t/0"):
            checkpoint.write(path, tensors)
        assert not list(tmp_path.iterdir())
        return
    checkpoint.write(path, tensors)
    assert_same(path, tensors)


@pytest.mark.parametrize("suffix", HELD)
def test_layouts_in_memory(suffix: str, tmp_path: Path) -> None:
    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    readonly = base.copy()
    readonly.flags.writeable = False
    tensors: dict[str, np.ndarray] = {
        "transposed": base.T,
        "strided": base[:, ::2, ::-3],
        "broadcast": np.broadcast_to(np.float32(7), (3, 4)),
        "fortran": np.asfortranarray(base),
        "big_endian": base.astype(">f4"),
        "readonly": readonly,
    }
    path = tmp_path / f"m{suffix}"
    checkpoint.write(path, tensors)
    assert_same(path, tensors)


@pytest.mark.parametrize("suffix", HELD)
def test_no_tensors(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"m{suffix}"
    checkpoint.write(path, {})
    assert_same(path, {})


def test_empty_tensors_with_long_axes(tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = {
        "a/vars/0": np.zeros((0, 2**50), np.float32),
        "b": np.zeros((3, 0, 2**40), np.int8),
    }
    for suffix in ("safetensors", "npz", "pt", "weights.h5", "orbax"):
        checkpoint.write(tmp_path / f"m.{suffix}", tensors)
        assert_same(tmp_path / f"m.{suffix}", tensors)


@pytest.mark.parametrize("suffix", HELD)
def test_equal_tensors_give_equal_files(suffix: str, tmp_path: Path) -> None:
    tensors: dict[str, np.ndarray] = {
        "a/w": np.ones((2, 3), np.float32),
        "b": np.zeros(2, np.int64),
    }
    one, two, three = (tmp_path / f"{n}{suffix}" for n in ("one", "two", "three"))
    checkpoint.write(one, tensors)
    checkpoint.write(two, tensors)
    with checkpoint.open(one) as file:
        checkpoint.write(three, file)
    assert one.read_bytes() == two.read_bytes() == three.read_bytes()


@pytest.mark.parametrize("through", HELD)
@pytest.mark.parametrize("suffix", HELD)
def test_a_round_trip_gives_the_same_file(suffix: str, through: str, tmp_path: Path) -> None:
    first, other, last = (tmp_path / n for n in (f"a{suffix}", f"b{through}", f"c{suffix}"))
    tensors = {
        "attn/vars/0": np.arange(6, dtype=np.float32).reshape(2, 3),
        "attn/vars/1": np.zeros(3, np.float32),
    }
    checkpoint.write(first, tensors)
    for source, target in ((first, other), (other, last)):
        with checkpoint.open(source) as file:
            checkpoint.write(target, file)
    assert first.read_bytes() == last.read_bytes()


def test_metadata_and_names(tmp_path: Path) -> None:
    tensors = {"layers/dense/vars/0": np.ones(3, np.float32)}
    metadata = {"format": "pt", "note": 'ü "quoted" \n'}
    names = {"layers/dense": "outé", "layers/softmax": "softmax", "": "whole"}
    for suffix in ("safetensors", "npz", "pt", "orbax"):
        path = tmp_path / f"m.{suffix}"
        checkpoint.write(path, tensors, metadata=metadata)
        with checkpoint.open(path) as file:
            assert dict(file.metadata) == metadata
            assert dict(file.names) == {}
    with np.load(tmp_path / "m.npz") as file:
        assert file.files == list(tensors)
    large = {"a": "".join(map(str, np.random.default_rng(0).integers(0, 10**9, 30_000)))}
    with pytest.raises(checkpoint.UnsupportedFormat, match="too many for a zip file"):
        checkpoint.write(tmp_path / "large.npz", tensors, metadata=large)
    checkpoint.write(tmp_path / "m.weights.h5", tensors, names=names)
    with checkpoint.open(tmp_path / "m.weights.h5") as file:
        assert dict(file.names) == names
        assert dict(file.metadata) == {}
        assert list(file) == ["layers/dense/vars/0"]


def test_mapping_behaviour(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    checkpoint.write(path, {"w": np.ones(3)})
    with checkpoint.open(path) as file:
        assert (file.path, file.format, "w" in file, "v" in file) == (path, "npz", True, False)
        assert file.get("v") is None
        with pytest.raises(checkpoint.UnknownTensor, match=r"m\.npz.*'v'"):
            _ = file["v"]
        with pytest.raises(TypeError):
            file.info["v"] = file.info["w"]  # type: ignore[index]
    with pytest.raises(checkpoint.UnreadableFile, match="closed"):
        _ = file["w"]
    file.close()


def test_big_endian_machines_would_write_the_same() -> None:
    """Bytes for a file are little-endian whatever the array is."""
    from jaxmha.checkpoint.tensor import to_bytes

    array = np.arange(3, dtype=np.int32)
    assert bytes(to_bytes(array)) == bytes(to_bytes(array.astype(">i4"))) == array.tobytes()


# Unlike `st.characters`, which makes a table of all of them first.
_ANY = st.integers(32, sys.maxunicode).filter(lambda i: not 0xD800 <= i < 0xE000).map(chr)
_LETTER = st.sampled_from(string.ascii_letters + "._-0") | _ANY
_NAME = (st.lists(_LETTER, min_size=1, max_size=12).map("".join)).filter(
    lambda s: (
        not any(ord(c) < 32 or ord(c) == 127 or c in "/\\" for c in s)
        and s not in (".", "..", *keras_h5.LEGACY)
    )
)


@st.composite
def _tensors(draw: st.DrawFn, suffix: str) -> dict[str, np.ndarray]:
    names = draw(st.lists(_NAME, min_size=1, max_size=5, unique=True))
    made = {}
    for seed, name in enumerate(names):
        dtype = draw(st.sampled_from(sorted(EVERY[suffix], key=str)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
        array = sample(shape, dtype, seed)
        made[name] = array.T if draw(st.booleans()) else array
    return made


@pytest.mark.everyday(suffix=HELD)
@pytest.mark.parametrize("suffix", EVERY)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_tensors(suffix: str, tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / f"m{suffix}"
    tensors = data.draw(_tensors(suffix))
    checkpoint.write(path, tensors, force=True)
    assert_same(path, tensors)


def test_bfloat16_is_not_float16(tmp_path: Path) -> None:
    array = np.array([1.0, -2.5, 3e38], ml_dtypes.bfloat16)
    for suffix in (".safetensors", ".pt", ".weights.h5"):
        checkpoint.write(tmp_path / f"m{suffix}", {"w": array})
        with checkpoint.open(tmp_path / f"m{suffix}") as file:
            assert file["w"].dtype == ml_dtypes.bfloat16
            assert file["w"].astype(np.float32).tolist() == array.astype(np.float32).tolist()
