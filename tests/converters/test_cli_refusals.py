"""The command line refuses: exit code 2, one message, and nothing written."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxmha import checkpoint
from jaxmha.converters import flax
from tests.converters import layers
from tests.converters.command_line import N, cli, fails, succeeds, torch_encoder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a file of torch, and what is wrong in it."""
    torch.save(torch_encoder().state_dict(), tmp_path / "encoder.pt")
    return tmp_path


def conversion_fails(place: Path, name: str, *more: Any, to: str = "x.npz") -> str:
    command = ("convert", place / name, place / to, "--to", "flax", "--num-heads", N)
    return fails(place, *command, *more)


def test_missing_file(place: Path) -> None:
    for command in (["inspect"], ["convert"], ["verify"]):
        more: dict[str, list[Any]] = {
            "convert": [place / "x.npz", "--to", "flax"],
            "verify": [place / "encoder.pt"],
        }
        message = fails(place, *command, place / "no.pt", *more.get(command[0], []))
        assert "no.pt" in message


def test_directory(place: Path) -> None:
    (place / "folder.pt").mkdir()
    assert "folder.pt" in fails(place, "inspect", place / "folder.pt")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_truncated_file(place: Path, share: float) -> None:
    raw = (place / "encoder.pt").read_bytes()
    (place / "short.pt").write_bytes(raw[: int(len(raw) * share)])
    assert "short.pt" in conversion_fails(place, "short.pt")


def test_unknown_suffixes(place: Path) -> None:
    assert ".safetensors" in conversion_fails(place, "encoder.pt", to="x.onnx")
    (place / "text.md").write_text("nothing")
    assert "text.md" in fails(place, "inspect", place / "text.md")


def test_wrong_and_missing_head_count(place: Path) -> None:
    arguments = ("convert", place / "encoder.pt", place / "x.npz", "--to", "flax")
    wrong = fails(place, *arguments, "--num-heads", 4)
    assert "in_proj_weight" in wrong
    assert "N=4" in wrong
    assert "count: pass --num-heads: it is" in fails(place, *arguments)
    assert fails(place, *arguments, "--num-heads", 0)
    assert fails(place, *arguments, "--num-heads", "three")


def test_unknown_layout_and_dtype(place: Path) -> None:
    arguments = ("convert", place / "encoder.pt", place / "x.npz", "--num-heads", N)
    assert "haddock" in fails(place, *arguments, "--to", "haddock")
    assert "int8" in fails(place, *arguments, "--to", "flax", "--dtype", "int8")


def test_existing_destination(place: Path) -> None:
    (place / "x.npz").write_bytes(b"mine")
    arguments = ("convert", place / "encoder.pt", place / "x.npz", "--to", "flax", "--num-heads", N)
    assert "x.npz" in fails(place, *arguments)
    assert (place / "x.npz").read_bytes() == b"mine"
    assert cli(*arguments, "--force").exit_code == 0
    assert (place / "x.npz").read_bytes() != b"mine"


def test_destination_is_the_source(place: Path) -> None:
    source = place / "encoder.pt"
    arguments = ("convert", source, source, "--to", "torch-separate", "--num-heads", N)
    assert "encoder.pt" in fails(place, *arguments)
    assert "encoder.pt" in fails(place, *arguments, "--force")
    (place / "link.pt").symlink_to(source)
    fails(place, "convert", source, place / "link.pt", *arguments[3:], "--force")


def test_overflow(place: Path) -> None:
    with checkpoint.open(place / "encoder.pt") as file:
        arrays = {name: file[name] for name in file}
    arrays["layers.1.self_attn.out_proj.bias"][2] = 1e6
    checkpoint.write(place / "large.npz", arrays)
    message = conversion_fails(place, "large.npz", "--dtype", "float16")
    assert "1e+06" in message
    assert "bfloat16" in message


def test_no_attention_block(place: Path) -> None:
    checkpoint.write(place / "none.npz", {"weight": np.ones((3, 5), np.float32)})
    message = fails(place, "convert", place / "none.npz", place / "x.npz", "--to", "flax")
    assert "no attention block" in message
    assert "no attention block" in fails(place, "diff", place / "none.npz", place / "none.npz")
    assert "0 attention blocks" in succeeds("inspect", place / "none.npz").stdout


def test_block_that_the_target_cannot_hold(place: Path) -> None:
    config = next(c for c in layers.configs("nnx") if c.name == "num_kv_heads")
    params = flax.from_module(layers.build(config))[0]
    checkpoint.write(place / "grouped.npz", flax.export_params(params, prefix="decoder"))
    message = fails(place, "convert", place / "grouped.npz", place / "x.pt", "--to", "torch")
    assert "block decoder" in message
    assert f"K={config.K}" in message


@pytest.mark.parametrize(
    ("key", "value", "usual"),
    [
        ("attention_multiplier", 0.015, None),
        ("attn_logit_softcapping", 50.0, None),
        ("scale_attn_by_inverse_layer_idx", True, False),
        ("scale_attn_weights", False, True),
    ],
)
def test_behaviour_that_only_the_config_holds_is_refused(
    place: Path, key: str, value: object, usual: object
) -> None:
    """Converted weights alone would be another function."""
    config, source = place / "config.json", place / "encoder.pt"
    for content in ({"nhead": N, key: value}, {"text": [{"nhead": N, key: value}]}):
        config.write_text(json.dumps(content))
        assert f"{key}={value!r}" in fails(
            place, "convert", source, place / "x.npz", "--to", "flax"
        )
        assert f"{key}={value!r}" in fails(place, "verify", source, source)
    config.write_text(json.dumps({"nhead": N, key: usual}))
    arguments = ("--to", "flax", "--check", "none")
    assert cli("convert", source, place / "x.npz", *arguments).exit_code == 0


def test_transposed_keys_of_grouped_queries_are_refused(place: Path) -> None:
    """Any width would do for a layer of several inputs: Llama's has one."""
    rng = np.random.default_rng(0)
    shapes = {"q": (32, 32), "k": (32, 16), "v": (32, 16), "o": (32, 32)}
    state = {
        f"model.layers.0.self_attn.{name}_proj.weight": rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    checkpoint.write(place / "llama.npz", state)
    assert "(32, 16)" in conversion_fails(place, "llama.npz", "--num-heads", 4)


def test_hostile_header(place: Path) -> None:
    (place / "bad.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert "bad.safetensors" in fails(place, "inspect", place / "bad.safetensors")
