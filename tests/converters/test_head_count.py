"""The head count of a block: given, or of metadata, of a configuration or of a shape; and unusable ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jaxmha import checkpoint
from jaxmha.converters import huggingface
from jaxmha.converters.discovery import attention_blocks, head_count
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import comparison
from tests.converters.command_line import cli
from tests.converters.test_blocks import shapes_of
from tests.converters.test_every_layout import N, exported, model_file


def test_head_count_of_a_block_goes_before_that_of_the_file() -> None:
    a, b = attention_blocks.find(shapes_of(huggingface.GPT2, "a", "b"))
    shapes = shapes_of(huggingface.GPT2, "a", "b")
    metadata = {head_count.METADATA: "3", f"{head_count.METADATA}.b": "2"}
    config = head_count.Configured(
        Path("config.json"), (head_count.Count(6, "config.json: n_head"),)
    )
    assert head_count.find(a, shapes, None, metadata, config) == (3, "metadata")
    assert head_count.find(b, shapes, None, metadata, config) == (2, "metadata")
    assert head_count.find(b, shapes, 2, metadata, config) == (2, "given")
    with pytest.raises(ValueError, match="a head count of 4 is given, and metadata says 2"):
        head_count.find(b, shapes, 4, metadata, config)
    assert (
        head_count.find(b, shapes, None, {head_count.METADATA: "x"}, config) == config.counts[0][:2]
    )
    assert head_count.find(b, shapes)[0] is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"num_heads": 3}, (3, "config.json: num_heads")),
        ({"model": {"nhead": 3}}, (3, "config.json: model: nhead")),
        ([{"num_heads": 3}, {"x": [{"n_head": 3}]}], (3, "config.json: num_heads")),
        ({"num_heads": None}, None),
        ([], None),
        (3, None),
        (json.loads('{"a": [' * 250 + "3" + "]}" * 250), None),
    ],
)
def test_config_next_to_the_file(content: Any, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = head_count.in_config(tmp_path / "model.pt")
    assert (found and found.of("h.0.attn")) == expected
    assert head_count.in_config(tmp_path / "elsewhere" / "model.pt") is None


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("{", "cannot be read as JSON (JSONDecodeError: "),
        ("\udc80", "cannot be read as JSON (UnicodeDecodeError: "),
        ("[" * 100_000, "cannot be read as JSON (RecursionError: "),
        ('{"num_heads": 0}', "has an impossible head count (config.json: num_heads is 0)"),
        ('{"num_heads": true}', "has an impossible head count (config.json: num_heads is True)"),
        ('{"num_heads": "3"}', "has an impossible head count (config.json: num_heads is '3')"),
        (
            '{"a": {"num_heads": [2, -4]}}',
            "has an impossible head count (config.json: a: num_heads is [2, -4])",
        ),
        ('{"num_heads": -3}', "has an impossible head count (config.json: num_heads is -3)"),
    ],
)
def test_an_unusable_config_is_reported(content: str, wrong: str, tmp_path: Path) -> None:
    """Where the head count is needed; a layout that stores it is read all the same."""
    for name in ("gpt2", "flax"):
        checkpoint.write(tmp_path / f"{name}.npz", exported(name, "h.0.attn"))
    (tmp_path / "config.json").write_text(content, errors="surrogateescape")
    printed = re.escape(f"{tmp_path / 'config.json'} {wrong}")
    unread = "cannot be read" in wrong
    remedy = f"correct it, or {'move it away' if unread else 'pass num_heads= (--num-heads)'}"
    with pytest.raises(ValueError, match=rf"(?s){printed}.*[:;] {re.escape(remedy)}"):
        pipeline.convert(tmp_path / "gpt2.npz", tmp_path / "out.npz", to="linear")
    (info,) = pipeline.inspect(tmp_path / "gpt2.npz").blocks
    assert info.num_heads is None
    assert wrong in info.num_heads_from
    (info,) = pipeline.inspect(tmp_path / "gpt2.npz", num_heads=N).blocks
    assert (info.num_heads, info.num_heads_from) == (N, "given")
    (info,) = pipeline.inspect(tmp_path / "flax.npz").blocks
    assert (info.num_heads, info.num_heads_from) == (N, "shape")


def test_a_head_count_that_does_not_divide_is_reported(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "a.npz", exported("gpt2", "h.0.attn"))
    message = r"h\.0\.attn\.c_attn\.weight: expected axes .* N=5, got shape \(13, 72\)"
    with pytest.raises(ValueError, match=rf"a\.npz: {message}"):
        pipeline.inspect(tmp_path / "a.npz", num_heads=5)
    done = cli("inspect", tmp_path / "a.npz", "--num-heads", "5")
    assert (done.exit_code, done.stdout) == (2, "")
    assert re.search(message, done.stderr)
    (tmp_path / "config.json").write_text('{"n_head": 5}')
    (info,) = pipeline.inspect(tmp_path / "a.npz").blocks
    assert info.num_heads is None
    assert "config.json does not describe these tensors (n_head is 5" in info.num_heads_from


def test_config_is_read_once_per_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {}
    for i in range(3):
        state |= exported("gpt2", f"h.{i}.attn", seed=i)
    model_file(tmp_path / "a.npz", state, {"n_head": N})
    calls = []
    real = head_count.in_config

    def counted(path: Path) -> head_count.Configured | None:
        calls.append(path)
        return real(path)

    monkeypatch.setattr(head_count, "in_config", counted)
    infos = pipeline.inspect(tmp_path / "a.npz").blocks
    assert [info.num_heads for info in infos] == [N] * 3
    assert len(calls) == 1
    pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="linear")
    assert len(calls) == 2
    assert comparison.compare(tmp_path / "a.npz", tmp_path / "b.npz").same
    assert len(calls) == 4
