"""A config.json that cannot be read is refused, however much of what it says is given."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.checkpoint.errors import UnreadableFile
from jaxmha.converters.discovery import hf_config
from tests.converters.command_line import cli, succeeds

D = 4


UNREADABLE: dict[str, Callable[[Path], Any]] = {
    "half": lambda path: path.write_text('{"num_attention_heads": 2,'),
    "empty": lambda path: path.write_text(""),
    "a key twice": lambda path: path.write_text(
        '{"num_attention_heads": 2, "num_attention_heads": 4}'
    ),
    "a key twice within": lambda path: path.write_text('{"rope_scaling": {"a": 1, "a": 2}}'),
    "FIFO": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "link to nothing": lambda path: path.symlink_to("blobs/none"),
    "link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    state = {
        f"self_attn.{name}_proj.weight": np.eye(D, dtype=np.float32)
        for name in ("q", "k", "v", "out")
    }
    checkpoint.write(tmp_path / "a.safetensors", state)
    return tmp_path / "a.safetensors"


@pytest.mark.parametrize("kind", UNREADABLE)
def test_every_command_refuses_it(kind: str, source: Path) -> None:
    UNREADABLE[kind](source.parent / hf_config.CONFIG)
    target, heads = source.with_name("b.npz"), ("--num-heads", 2)
    for command in (
        ("convert", source, target, "--to", "flax", *heads),
        ("plan", source, "--to", "flax", *heads),
        ("verify", source, source, *heads),
        ("diff", source, source, *heads),
        ("describe", source, *heads),
    ):
        done = cli(*command)
        text = " ".join(done.stderr.split())
        assert done.exit_code == 2, (command, done.output)
        assert "config.json cannot be read as JSON" in text, command
        assert text.endswith("correct it, or move it away"), command
    assert not target.exists()
    done = succeeds("inspect", source, *heads)
    assert "note: " in done.stdout
    assert "config.json cannot be read as JSON" in " ".join(done.stdout.split())


def test_a_file_that_stores_its_head_count_is_no_exception(tmp_path: Path) -> None:
    state = {f"{name}/kernel": np.ones((D, 2, 2), np.float32) for name in ("query", "key", "value")}
    state["out/kernel"] = np.ones((2, 2, D), np.float32)
    checkpoint.write(tmp_path / "a.npz", state)
    (tmp_path / hf_config.CONFIG).write_text("{")
    done = cli("convert", tmp_path / "a.npz", tmp_path / "b.npz", "--to", "linear")
    assert (done.exit_code, "it may hold settings of attention" in done.stderr) == (2, True)


def test_a_folder_that_cannot_be_opened() -> None:
    """Weights in a folder that may be entered but not listed can be read, its config.json not."""
    path = Path("x" * 300) / "model.safetensors"  # for root too
    with pytest.raises(UnreadableFile, match="the folder cannot be opened"):
        hf_config.read(path)
    assert hf_config.readable(path) == {}
