"""Casting while writing, what it loses, and memory."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxmha import checkpoint
from jaxmha.checkpoint import casting
from jaxmha.checkpoint.tensor import blocks, contiguous

ROOT = Path(__file__).parents[2]
VALUES = np.array([1.0, 1 / 3, 70000.0, -1e-9, 0.0, np.inf, np.nan, -65504.0])


def test_what_is_lost_is_reported() -> None:
    half, loss = checkpoint.cast(VALUES, np.dtype("float16"))
    assert half[2] == np.inf
    assert (loss.overflowed, loss.underflowed) == (1, 1)
    assert loss.max_relative_error == abs(float(half[1]) - 1 / 3) * 3
    assert not loss.exact
    assert checkpoint.cast(VALUES.astype("f4"), np.dtype("float64"))[1].exact
    assert checkpoint.cast(np.array([448.0, 500.0]), np.dtype(ml_dtypes.float8_e4m3fn))[1] == (
        checkpoint.Loss("float64", "float8_e4m3fn", 0.0, 1, 0)
    )
    assert checkpoint.cast(np.array([2**53 + 1]), np.dtype("float64"))[1].max_relative_error > 0


@pytest.mark.parametrize(
    ("before", "kept", "beyond", "after"),
    [
        ("float32", [127.5, -128.5], [300.0, -129.0, np.nan, np.inf], "int8"),
        ("float64", [-(2.0**63), 2.0**62], [2.0**63, -(2.0**64)], "int64"),
        ("int64", [2**31 - 1, -(2**31)], [2**40, 2**31, -(2**63)], "int32"),
        ("uint64", [2**63 - 1], [2**63, 2**64 - 1], "int64"),
        ("int8", [127], [-1], "uint64"),
    ],
)
def test_integers_that_wrap_around_are_an_overflow(
    before: str, kept: list[float], beyond: list[float], after: str
) -> None:
    loss = checkpoint.cast(np.array([*kept, *beyond], before), np.dtype(after))[1]
    assert (loss.overflowed, loss.underflowed) == (len(beyond), 0)


@given(hnp.arrays(np.float32, st.integers(0, 9), elements=st.floats(width=32)))
@settings(max_examples=30, deadline=None)
def test_losses_element_by_element(array: np.ndarray) -> None:
    """The same by Python's own floats."""
    half, loss = checkpoint.cast(array, np.dtype(ml_dtypes.bfloat16))
    pairs = [(float(a), float(b)) for a, b in zip(array, half, strict=True)]
    finite = [(a, b) for a, b in pairs if np.isfinite(a)]
    assert loss.overflowed == sum(not np.isfinite(b) for _, b in finite)
    assert loss.underflowed == sum(a != 0 and b == 0 for a, b in finite)
    errors = [abs(a - b) / abs(a) for a, b in finite if a and b and np.isfinite(b)]
    assert loss.max_relative_error == max(errors, default=0.0)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".weights.h5", ".orbax"])
def test_floats_are_cast_and_the_rest_is_not(suffix: str, tmp_path: Path) -> None:
    tensors = {"w": np.linspace(0, 1, 21).reshape(3, 7), "n": np.arange(4), "b": np.ones(2, bool)}
    done = checkpoint.write(tmp_path / f"m{suffix}", tensors, dtype="bfloat16")
    assert set(done.losses) == {"w"}
    assert 0 < done.losses["w"].max_relative_error <= 2**-8
    with checkpoint.open(tmp_path / f"m{suffix}") as file:
        assert [str(file[n].dtype) for n in ("w", "n", "b")] == ["bfloat16", "int64", "bool"]
        assert file["w"].tobytes() == tensors["w"].astype(ml_dtypes.bfloat16).tobytes()
        assert file.digests["w"] == checkpoint.digest(file["w"]) == done.digests["w"]


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt", ".weights.h5", ".orbax"])
def test_overflow_is_counted_or_refused(suffix: str, tmp_path: Path) -> None:
    """Infinity is no overflow; an error leaves the old file."""
    path, tensors = tmp_path / f"m{suffix}", {"a": np.array([1.0, np.inf]), "w": np.full(5, -7e4)}
    assert checkpoint.write(path, tensors, dtype="float16").losses["w"].overflowed == 5
    with pytest.raises(
        checkpoint.UnsupportedDtype, match="w': values from -70000 to -70000 do not"
    ):
        checkpoint.write(path, tensors, dtype="float16", overflow="refuse", force=True)
    with checkpoint.open(path) as file:
        assert file["w"].dtype == np.float16
    tensors["w"][:] = 65504
    checkpoint.write(path, tensors, dtype="float16", overflow="refuse", force=True)


def test_another_word_for_overflow_is_refused(no_shape_hook: None, tmp_path: Path) -> None:
    with pytest.raises(checkpoint.UnsupportedFormat, match="overflow = 'ignore'"):
        checkpoint.write(tmp_path / "m.npz", {}, overflow="ignore")  # type: ignore[arg-type]


def test_a_dtype_by_name(tmp_path: Path) -> None:
    tensors = {"w": np.ones((3, 7)), "v": np.ones(5), "n": np.arange(4)}
    wanted: dict[str, str | type] = {"w": "float16", "n": np.int8}
    done = checkpoint.write(tmp_path / "m.npz", tensors, dtype=wanted)
    assert {n: str(i.dtype) for n, i in done.info.items()} == {
        "w": "float16",
        "v": "float64",
        "n": "int8",
    }
    assert all(loss.exact for loss in done.losses.values())
    for dtype in ("float17", {"absent": "float16"}, {"w": "complex64", "v": "U4"}):
        with pytest.raises(checkpoint.CheckpointError):
            checkpoint.write(tmp_path / "bad.npz", tensors, dtype=dtype)
    with pytest.raises(checkpoint.UnsupportedDtype, match="cannot become"):
        checkpoint.write(tmp_path / "bad.npz", {"z": np.ones(2, complex)}, dtype={"z": "float32"})
    for values, dtype, message in (
        ([300.0, np.nan], "int8", "300 and NaN or infinity do not .* choose a floating"),
        ([0.5, np.nan], "int8", "'w': NaN or infinity do not"),
        ([1, np.inf], "float8_e4m3fn", r"'w': NaN or infinity do not .*\(bfloat16"),
        ([-5, 200], "uint8", "values from -5 to 200 do not fit into uint8; .* or a signed one$"),
        ([1, 1e300j], "complex64", r"values from 0 to 1e\+300 do not .* choose a wider dtype$"),
    ):
        wide = {"w": np.array(values)}
        with pytest.raises(checkpoint.UnsupportedDtype, match=message):
            checkpoint.write(tmp_path / "bad.pt", wide, dtype={"w": dtype}, overflow="refuse")
    assert not list(tmp_path.glob("bad*"))


@given(
    hnp.arrays(np.int32, hnp.array_shapes(max_dims=4, max_side=7, min_side=0)),
    st.permutations(range(4)),
    st.integers(1, 300),
)
@settings(max_examples=60, deadline=None)
def test_blocks_are_the_array(array: np.ndarray, axes: list[int], most: int) -> None:
    view = array.transpose([axis for axis in axes if axis < array.ndim])
    pieces = list(blocks(view, most))
    assert b"".join(piece.tobytes() for piece in pieces) == view.tobytes()
    assert all(piece.flags.c_contiguous for piece in pieces)
    assert all(piece.nbytes <= max(most, 4) for piece in pieces)


def test_a_mapping_that_lies(tmp_path: Path) -> None:
    info = {"w": checkpoint.TensorInfo((2, 3), np.dtype("f4"))}
    for lie in (np.ones((3, 2), "f4"), np.ones((2, 3), "f8")):
        lazy = checkpoint.Lazy(info, {"w": lie}.__getitem__)
        with pytest.raises(checkpoint.WriteFailed, match="declared otherwise"):
            checkpoint.write(tmp_path / "m.npz", lazy)
    assert not list(tmp_path.iterdir())


def test_digest_of_a_checkpoint(tmp_path: Path) -> None:
    tensors = {"w": np.ones((3, 7), "f4"), "n": np.arange(4)}
    found = set()
    for suffix in (".safetensors", ".npz", ".pt", ".orbax", ".bin.index.json"):
        checkpoint.write(tmp_path / f"m{suffix}", tensors)
        with checkpoint.open(tmp_path / f"m{suffix}") as file:
            found.add(file.digest())
    assert len(found) == 1
    checkpoint.write(tmp_path / "m.npz", tensors | {"n": np.arange(1, 5)}, force=True)
    with checkpoint.open(tmp_path / "m.npz") as file:
        assert file.digest() not in found


_PEAK = """
import os, resource, sys
import numpy as np
from jaxmha.converters import checkpoint
source, target, dtype = sys.argv[1:4]
settings = {"shard_size": 200 << 20} if target.endswith(".json") else {}
if target.endswith((".h5", ".orbax")):
    import h5py, tensorstore
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with checkpoint.open(source) as file:
    flax = checkpoint.Lazy(
        {n: checkpoint.TensorInfo(i.shape[::-1], i.dtype) for n, i in file.info.items()},
        lambda name: file[name].T,
    )
    checkpoint.write(target, flax, dtype=dtype or None, **settings)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "dtype"),
    [
        (".safetensors", ""),
        (".safetensors", "bfloat16"),
        (".pt", "bfloat16"),
        (".weights.h5", "bfloat16"),
        (".npz", "float16"),
        (".safetensors.index.json", "bfloat16"),
        (".orbax", "bfloat16"),
    ],
)
def test_memory(suffix: str, dtype: str, tmp_path: Path) -> None:
    """Transposing 1 GiB takes its largest tensor of 256 MiB and less than 256 MiB more."""
    tensors = {f"layers/{i}/vars/0": (4096, 8192) for i in range(6)} | {"large": (8192, 8192)}
    info = {n: checkpoint.TensorInfo(s, np.dtype("f4")) for n, s in tensors.items()}
    source = checkpoint.Lazy(info, lambda name: np.full(tensors[name], len(name), "f4"))
    checkpoint.write(tmp_path / "source.safetensors", source)
    command = [sys.executable, "-c", _PEAK, "source.safetensors", f"m{suffix}", dtype]
    done = subprocess.run(
        command,
        check=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert int(done.stdout) < 256 + 256, done.stdout


_READ = """
import resource, sys
from jaxmha.converters import checkpoint
import tensorstore
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with checkpoint.open(sys.argv[1]) as file:
    file["large"]
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
def test_memory_of_reading_many_chunks(tmp_path: Path) -> None:
    """An array of 192 MiB that does not compress, without all its chunks in memory too."""
    large = np.random.default_rng(0).random((24, 2**20))
    checkpoint.write(tmp_path / "m.orbax", {"large": large})
    command = [sys.executable, "-c", _READ, str(tmp_path / "m.orbax")]
    done = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert int(done.stdout) < 192 + 96, done.stdout


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "float8_e5m2", "float8_e4m3fn", "bfloat16", "float64", "complex128"]
)
def test_strided_arrays_of_every_dtype_are_copied_in_order(dtype: str) -> None:
    array = np.arange(210).reshape(2, 3, 5, 7).astype(np.dtype(dtype))
    views = (array.T, array.transpose(0, 2, 1, 3), array[:, ::2].transpose(3, 1, 0, 2), array[::-1])
    for view in (*views, np.broadcast_to(array[:1], (4, 3, 5, 7)).T):
        copy = contiguous(view)
        assert copy.flags.c_contiguous
        assert copy.dtype == view.dtype
        assert (copy.astype(complex) == view.astype(complex)).all()


@pytest.mark.parametrize(
    ("dtype", "lost"), [("int32", 3), ("bool", 3), ("float8_e4m3fn", 2), ("float16", 0)]
)
def test_what_was_infinite_and_is_no_longer_is_lost(dtype: str, lost: int) -> None:
    array = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    assert casting.cast(array, casting.DTYPES[dtype])[1].overflowed == lost
