"""Quantised weights are dequantised bit by bit as the library that defines them does."""

import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from jaxmha import checkpoint
from jaxmha.converters import equinox, match
from jaxmha.converters.layout.arrays import to_numpy, to_torch

FP8 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
QUANTISED = Path(__file__).parent / "quantised"


def opened(path: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    checkpoint.write(path, tensors)
    with checkpoint.open(path, dequantise=True) as file:
        found = {name: file[name] for name in file}
        assert {n: (x.shape, x.dtype) for n, x in found.items()} == {
            n: (i.shape, i.dtype) for n, i in file.info.items()
        }
        assert set(file.quantised) <= set(found)
        return found


def same(a: Any, b: Any) -> None:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def numbers(rng: np.random.Generator, *shape: int) -> Any:
    """All finite FP8 numbers, drawn."""
    raw = rng.integers(0, 256, shape, dtype=np.uint8)
    raw[(raw & 127) == 127] = 1
    return raw.view(FP8)


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
@pytest.mark.parametrize(
    ("shape", "grid"),
    [((6, 10), (1, 1)), ((256, 384), (2, 3)), ((64, 96), (2, 3)), ((8, 64), (8, 2)), ((6, 10), ())],
)
def test_fp8_is_that_of_transformers(
    shape: tuple[int, ...], grid: tuple[int, ...], dtype: Any, tmp_path: Path
) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rng = np.random.default_rng(0)
    weight = numbers(rng, *shape)
    scale = (rng.normal(size=grid or (1,)) / 8).astype(dtype).reshape(grid)
    found = opened(
        tmp_path / "m.safetensors",
        {"a.weight": weight, "a.weight_scale_inv": scale, "b": np.ones(3, np.float32)},
    )
    expected = Fp8Dequantize(None)._dequantize_one(
        to_torch(weight.view(np.uint8)).view(torch.float8_e4m3fn),
        to_torch(scale.reshape(grid or (1, 1))),
    )
    assert set(found) == {"a.weight", "b"}
    same(found["a.weight"], to_numpy(expected))


def test_the_last_block_may_be_smaller(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight, scale = numbers(rng, 192, 300), rng.normal(size=(2, 3)).astype(np.float32)
    found = opened(tmp_path / "m.pt", {"weight": weight, "weight_scale_inv": scale})
    wide = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:192, :300]
    same(found["weight"], weight.astype(np.float32) * wide)


@pytest.mark.parametrize("dtype", [FP8, np.int8])
@pytest.mark.parametrize("rows", [1, 6])
def test_a_scale_per_row_is_multiplied_in_its_dtype(rows: int, dtype: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight = numbers(rng, 6, 10)
    weight = weight if dtype is FP8 else rng.integers(-128, 128, (6, 10)).astype(np.int8)
    scale = (rng.normal(size=(rows, 1)) / 8).astype(BF16)
    tensors = {"weight": weight, "weight_scale": scale, "input_scale": np.ones(1, np.float32)}
    found = opened(tmp_path / "m.safetensors", tensors)
    expected = to_torch(weight.astype(np.float32)).to(torch.bfloat16) * to_torch(scale)
    assert list(found) == ["weight"]
    same(found["weight"], to_numpy(expected))


def test_mxfp4_is_that_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 8, 16, 16), dtype=np.uint8)
    scales = np.arange(256, dtype=np.uint8).reshape(2, 8, 16)
    found = opened(tmp_path / "m.safetensors", {"e.down_blocks": blocks, "e.down_scales": scales})
    expected = to_numpy(convert_moe_packed_tensors(to_torch(blocks), to_torch(scales)))
    assert list(found) == ["e.down"]
    same(found["e.down"], expected)


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    checkpoint.write(path, {"a.qweight": np.zeros((2, 3), np.int32)})
    with pytest.raises(checkpoint.UnsupportedFormat, match="packed integers"):
        checkpoint.open(path, dequantise=True)
    assert list(checkpoint.open(path)) == ["a.qweight"]


def test_packed_floats_are_refused_by_name(tmp_path: Path) -> None:
    """As compressed-tensors writes NVFP4: without a shape, and not because a part got lost."""
    path = tmp_path / "x.safetensors"
    stored: dict[str, Any] = {
        "a.weight_packed": np.zeros((32, 16), np.uint8),
        "a.weight_scale": np.ones((32, 2), FP8),
        "a.weight_global_scale": np.ones(1, np.float32),
    }
    checkpoint.write(path, stored)
    with pytest.raises(checkpoint.UnsupportedFormat, match="NVFP4"):
        checkpoint.open(path, dequantise=True)


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        ((6, 10), (4, 1)),
        ((5, 10), (3, 1)),
        ((6, 10), (0, 0)),
        ((6,), (2, 1)),
        ((6, 10), (6, 10, 1)),
        ((6, 0), (4, 2)),
    ],
)
def test_scales_that_do_not_fit_are_refused(
    weight: tuple[int, ...], scale: tuple[int, ...], tmp_path: Path
) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {"weight": np.zeros(weight, FP8), "weight_scale_inv": np.zeros(scale, np.float32)}
    checkpoint.write(path, tensors)
    with pytest.raises(checkpoint.MalformedFile, match="does not fit"):
        checkpoint.open(path, dequantise=True)


def test_mxfp4_of_wrong_shapes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {"a_blocks": np.zeros((2, 3, 16), np.uint8), "a_scales": np.zeros((2, 3), np.uint8)}
    checkpoint.write(path, tensors)
    with pytest.raises(checkpoint.MalformedFile, match="no MXFP4"):
        checkpoint.open(path, dequantise=True)


@pytest.mark.parametrize("scale", [np.ones((1,)), np.ones((3, 1))])
def test_dequantised_weights_count_against_the_limits(scale: Any, tmp_path: Path) -> None:
    """A scale of float64 makes a weight eight times as large."""
    path = tmp_path / "m.safetensors"
    checkpoint.write(path, {"weight": np.zeros((3, 1000), np.int8), "weight_scale": scale})
    limits = checkpoint.Limits(logical_bytes=20_000)
    assert checkpoint.open(path, limits=limits).info["weight"].nbytes == 3000
    with pytest.raises(checkpoint.BudgetExceeded, match="all tensors is 24,000"):
        checkpoint.open(path, limits=limits, dequantise=True)


@pytest.mark.parametrize("kind", ["tensor", "rows", "mxfp4"])
def test_dequantising_takes_little_memory_alongside_the_result(kind: str, tmp_path: Path) -> None:
    path, one = tmp_path / "m.safetensors", np.ones((1,), np.float32)
    weight = np.ones((4096, 2048), np.int8)
    tensors: dict[str, dict[str, np.ndarray]] = {
        "tensor": {"weight": weight, "weight_scale": one},
        "rows": {"weight": weight, "weight_scale": np.ones((4096, 1), np.float32)},
        "mxfp4": {
            "a_blocks": weight.view(np.uint8).reshape(1, 4096, 128, 16),
            "a_scales": np.full((1, 4096, 128), 127, np.uint8),
        },
    }
    checkpoint.write(path, tensors[kind])
    with checkpoint.open(path, dequantise=True) as file:
        (name,) = file
        tracemalloc.start()
        try:
            made = file[name]
            assert tracemalloc.get_traced_memory()[1] < made.nbytes + weight.nbytes + (40 << 20)
        finally:
            tracemalloc.stop()


def test_a_model_is_filled_and_the_plan_says_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight, scale = numbers(rng, 6, 10), np.full((1, 1), 0.5, np.float32)
    path = tmp_path / "m.safetensors"
    checkpoint.write(path, {"fc.weight": weight, "fc.weight_scale_inv": scale})
    target = {"dense": {"kernel": np.zeros((10, 6), np.float32)}}
    assert "dequantised on reading, and are never written as quantised: 1 FP8" in str(
        match(path, target)
    )
    made = equinox.load_into(target, path)
    np.testing.assert_array_equal(made["dense"]["kernel"], weight.T.astype(np.float32) / 2)


@pytest.mark.parametrize(
    "scheme", ["bitsandbytes_4", "bitsandbytes_8", "compressed_tensors", "awq", "gptq", "gptq_v2"]
)
def test_files_of_other_libraries_are_read_as_they_read_them(scheme: str) -> None:
    with (
        checkpoint.open(QUANTISED / scheme, dequantise=True) as file,
        checkpoint.open(QUANTISED / scheme / "expected.safetensors") as expected,
    ):
        assert set(file) == set(expected)
        assert set(file.quantised) == {name for name in expected if name.endswith("weight")}
        for name in expected:
            same(file[name], expected[name])


def test_zero_points_of_gptq_need_the_config(tmp_path: Path) -> None:
    shutil.copy(QUANTISED / "gptq/model.safetensors", tmp_path)
    with pytest.raises(checkpoint.UnsupportedFormat, match=r"config\.json that says how GPTQ"):
        checkpoint.open(tmp_path, dequantise=True)


@pytest.mark.parametrize("scheme", ["bitsandbytes_4", "compressed_tensors", "awq", "gptq_v2"])
def test_parts_that_do_not_fit_are_refused(scheme: str, tmp_path: Path) -> None:
    if (settings := QUANTISED / scheme / "config.json").exists():
        shutil.copy(settings, tmp_path)
    with checkpoint.open(QUANTISED / scheme) as file:
        tensors = {name: file[name] for name in file}
    weights = [n for n in tensors if n.endswith(("weight", "_packed", "qweight"))]
    scales = [n for n in tensors if n.endswith(("absmax", "weight_scale", "scales"))]
    for name in (weights[0], scales[0], scales[-1]):
        cut = {**tensors, name: tensors[name][:-1]}
        checkpoint.write(tmp_path / "model.safetensors", cut, force=True)
        with (
            pytest.raises(checkpoint.CheckpointError),
            checkpoint.open(tmp_path / "model.safetensors", dequantise=True),
        ):
            pass
