"""GGUF files that the gguf package wrote are read as it dequantises them, bit by bit."""

from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.checkpoint.formats import ggml_blocks

KINDS = gguf.GGMLQuantizationType
QUANTISED = (KINDS.Q4_0, KINDS.Q8_0, KINDS.Q4_K, KINDS.Q6_K)


def raw_blocks(rng: np.random.Generator, kind: Any, rows: int, columns: int) -> Any:
    """Drawn bytes of one type: the package quantises to some types only, and reads all."""
    size, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (rows, columns // size, nbytes), dtype=np.uint8)
    halves = {KINDS.Q4_0: (0,), KINDS.Q8_0: (0,), KINDS.Q4_K: (0, 2), KINDS.Q6_K: (208,)}
    for at in halves[kind]:
        scales = rng.normal(size=raw.shape[:2]).astype(np.float16)
        raw[:, :, at : at + 2] = scales.view(np.uint8).reshape(*raw.shape[:2], 2)
    return raw.reshape(rows, -1)


def written(path: Path, architecture: str = "qwen2", **tensors: Any) -> Path:
    """A file with these tensors; a pair has raw bytes and their type."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_token_list(["a", "b" * 3000, "c"])
    writer.add_token_scores([0.5, 1.0, 2.0])
    for name, value in tensors.items():
        array, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name.replace("__", "."), array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_quantised_tensors_are_those_of_the_package(kind: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    raw = raw_blocks(rng, kind, 6, 1024)
    path = written(tmp_path / "m.gguf", blk__0__ffn_up__weight=(raw, kind))
    expected = gguf.dequantize(gguf.GGUFReader(path).tensors[0].data, kind)
    with checkpoint.open(path) as file:
        found = file["blk.0.ffn_up.weight"]
        assert file.format == "gguf"
        assert file.quantised == {"blk.0.ffn_up.weight": kind.name}
        assert file.info["blk.0.ffn_up.weight"].dtype == found.dtype == np.float32
    assert found.shape == expected.shape == (6, 1024)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("kind", [KINDS.Q4_0, KINDS.Q8_0], ids=lambda kind: kind.name)
def test_what_the_package_quantised_is_read(kind: Any, tmp_path: Path) -> None:
    weights = np.random.default_rng(0).normal(size=(8, 96)).astype(np.float32)
    raw = gguf.quantize(weights, kind)
    path = written(tmp_path / "m.gguf", token_embd__weight=(raw, kind))
    with checkpoint.open(path) as file:
        np.testing.assert_array_equal(file["token_embd.weight"], gguf.dequantize(raw, kind))


def test_large_tensors_are_dequantised_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxmha.checkpoint.formats.gguf._PIECE", 1000)
    raw = raw_blocks(np.random.default_rng(0), KINDS.Q6_K, 5, 1024)
    path = written(tmp_path / "m.gguf", w=(raw, KINDS.Q6_K))
    with checkpoint.open(path) as file:
        np.testing.assert_array_equal(file["w"], gguf.dequantize(raw, KINDS.Q6_K))


def test_plain_types_keep_their_dtype(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "b": rng.normal(size=(2, 3, 5)).astype(np.float16),
        "c": rng.integers(0, 9, 4).astype(np.int32),
        "d": rng.normal(size=7),
    }
    half = rng.normal(size=(3, 4)).astype(ml_dtypes.bfloat16)
    path = written(tmp_path / "m.gguf", **tensors, e=(half.view(np.uint8), KINDS.BF16))
    with checkpoint.open(path) as file:
        assert file.quantised == {}
        for name, value in (tensors | {"e": half}).items():
            np.testing.assert_array_equal(file[name], value)
            assert file[name].dtype == value.dtype


def test_the_order_of_rotated_rows_is_that_of_hugging_face(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    rng = np.random.default_rng(0)
    config = LlamaConfig(num_attention_heads=4, num_key_value_heads=2)
    processor = LlamaTensorProcessor(config.to_dict())
    tensors = {
        f"blk.0.attn_{part}.weight": rng.normal(size=(rows, 12)).astype(np.float32)
        for part, rows in (("q", 24), ("k", 12), ("v", 12))
    }
    path = written(
        tmp_path / "m.gguf", "llama", **{n.replace(".", "__"): x for n, x in tensors.items()}
    )
    with checkpoint.open(path) as file:
        for name, value in tensors.items():
            expected = processor.process(weights=value, name=name).weights
            np.testing.assert_array_equal(file[name], expected)
            assert (np.asarray(expected) == value).all() == ("attn_v" in name)


@pytest.mark.parametrize("kind", [None, KINDS.Q8_0], ids=["float32", "Q8_0"])
def test_the_kernels_of_gpt2_are_those_of_hugging_face(kind: Any, tmp_path: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import GPT2TensorProcessor

    rng = np.random.default_rng(0)
    shapes = {"attn_qkv": (96, 32), "attn_output": (32, 32), "ffn_up": (64, 32),
              "ffn_down": (32, 64), "attn_norm": (32,)}  # fmt: skip
    tensors: dict[str, Any] = {
        f"blk.0.{part}.weight": rng.normal(size=shape).astype(np.float32)
        for part, shape in shapes.items()
    }
    tensors["token_embd.weight"] = rng.normal(size=(7, 32)).astype(np.float32)
    stored = {
        name: x if kind is None or x.ndim == 1 else (gguf.quantize(x, kind), kind)
        for name, x in tensors.items()
    }
    path = written(
        tmp_path / "m.gguf", "gpt2", **{name.replace(".", "__"): x for name, x in stored.items()}
    )
    with checkpoint.open(path) as file:
        for name, x in stored.items():
            value = gguf.dequantize(*x) if isinstance(x, tuple) else x
            expected = GPT2TensorProcessor().process(weights=value, name=name).weights
            assert file.info[name].shape == file[name].shape == expected.shape
            np.testing.assert_array_equal(file[name], expected)


def test_an_architecture_whose_changes_are_not_known_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", "gemma", w=np.ones((2, 3), np.float32))
    with pytest.raises(checkpoint.UnsupportedFormat, match="'gemma'"):
        checkpoint.open(path)


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    raw = np.zeros((2, 84), np.uint8)
    path = written(tmp_path / "m.gguf", w=(raw, KINDS.Q2_K))
    with pytest.raises(checkpoint.UnsupportedDtype, match="Q2_K"):
        checkpoint.open(path)
    names = {kind.value: kind.name for kind in KINDS}
    assert ggml_blocks.OTHERS.items() <= names.items()
    for number, block in ggml_blocks.QUANTISED.items():
        sizes = gguf.GGML_QUANT_SIZES[KINDS(number)]
        assert (names[number], sizes) == (block.name, (block.size, block.nbytes))


def test_it_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.UnsupportedFormat, match="read only"):
        checkpoint.write(tmp_path / "m.gguf", {"w": np.ones(3, np.float32)})
