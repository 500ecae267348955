"""Without a config.json: names of tensors tell the model, or that nothing does is said."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from tests.converters.command_line import cli

D = 6
# Names of a tensor outside the blocks, as transformers writes them, and words on the model.
PARTS = {
    "roformer.encoder.embed_positions.weight": "rotary positions",
    "transformer.h.0.mlp.fc_in.weight": "rotary positions",
    "esm.embeddings.word_embeddings.weight": "rotary positions",
    "deberta.embeddings.word_embeddings.weight": "relative positions",
    "longformer.embeddings.word_embeddings.weight": "windows",
}
FORMS = (
    "yoso.embeddings.word_embeddings.weight",
    "nystromformer.embeddings.word_embeddings.weight",
    "model.encoder.embed_global.weight",
    "reformer.embeddings.word_embeddings.weight",
)
UNKNOWN = "put the model's own config.json next to the file"


def run(*arguments: Any) -> Any:
    done = cli(*arguments)
    return done, " ".join(done.output.split())


def source(folder: Path, *names: str, layout: str = "linear") -> Path:
    kernel = np.eye(D, dtype=np.float32)
    state: dict[str, Any] = {f"a.{name}_proj.weight": kernel for name in ("q", "k", "v", "out")}
    if layout == "torch":
        state = {
            "a.in_proj_weight": np.ones((3 * D, D), np.float32), "a.in_proj_bias": np.ones(3 * D, np.float32),
            "a.out_proj.weight": kernel, "a.out_proj.bias": np.ones(D, np.float32),
        }  # fmt: skip
    checkpoint.write(folder / "a.npz", state | dict.fromkeys(names, np.ones((9, D), np.float32)))
    return folder / "a.npz"


def commands(path: Path) -> dict[str, tuple[Any, ...]]:
    heads = ("--num-heads", 2)
    return {
        "inspect": ("inspect", path, *heads),
        "plan": ("plan", path, "--to", "flax", *heads),
        "convert": ("convert", path, path.with_name("b.npz"), "--to", "flax", *heads),
    }


@pytest.mark.parametrize("name", PARTS)
def test_names_tell_what_is_not_converted(name: str, tmp_path: Path) -> None:
    for command in commands(source(tmp_path, name)).values():
        done, text = run(*command)
        assert done.exit_code == 0, text
        assert f"not converted: {PARTS[name]}" in text
        assert name in text
        assert UNKNOWN in text


@pytest.mark.parametrize("name", FORMS)
def test_names_tell_another_form(name: str, tmp_path: Path) -> None:
    path = source(tmp_path, name)
    for which, command in commands(path).items():
        done, text = run(*command)
        assert "attention of another form than plain projections" in text
        assert done.exit_code == (0 if which == "inspect" else 2), text
    assert not path.with_name("b.npz").exists()
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')  # it is another model
    assert run(*commands(path)["convert"])[0].exit_code == 0


def test_where_nothing_tells_it_is_reported(tmp_path: Path) -> None:
    for command in commands(source(tmp_path)).values():
        done, text = run(*command)
        assert (done.exit_code, "there is no config.json: the model may compute" in text) == (
            0,
            True,
        )
        assert UNKNOWN in text


def test_a_class_of_a_framework_computes_nothing_more(tmp_path: Path) -> None:
    for command in commands(source(tmp_path, layout="torch")).values():
        done, text = run(*command)
        assert (done.exit_code, "config.json" in text) == (0, False), text
