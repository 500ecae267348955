"""A refused layout names those that hold the block, and they do."""

from pathlib import Path
from typing import Any

import pytest

from jaxmha.converters.discovery import attention_blocks
from jaxmha.converters.layout import transform
from jaxmha.converters.migrate import pipeline
from tests import drawn
from tests.converters.test_behaviours import GEMMA2, QWEN3, source
from tests.converters.test_every_layout import model_file

GROUPED = "; --to flax, keras-gqa or jaxmha holds it"
OWN = "; --to jaxmha (as .safetensors) holds it"


def grouped(folder: Path) -> Path:
    """A block of Llama whose query heads share keys and values."""
    params = drawn.params(num_heads=4, num_kv_heads=2, features=20, use_bias=False)
    state = transform.export_params(attention_blocks.named("llama"), params, prefix="layers.0.attn")
    return model_file(folder / "a.safetensors", state, {"num_attention_heads": 4})


def error_of(path: Path, target: Path, to: str) -> str:
    with pytest.raises(ValueError, match="cannot hold") as refused:
        pipeline.convert(path, target, to=to)
    return str(refused.value)


@pytest.mark.parametrize("to", ["keras", "torch"])
def test_an_error_names_layouts_that_hold_the_block(to: str, tmp_path: Path) -> None:
    path = grouped(tmp_path)
    assert error_of(path, tmp_path / "b.npz", to).endswith(GROUPED)
    for name in ("flax", "keras-gqa", "jaxmha"):
        assert pipeline.convert(path, tmp_path / f"{name}.npz", to=name).blocks


@pytest.mark.parametrize(("layout", "config"), [("llama-norm", QWEN3), ("llama", GEMMA2)])
def test_behaviour_that_only_one_layout_holds(
    layout: str, config: dict[str, Any], tmp_path: Path
) -> None:
    path = source(tmp_path, layout, config)
    assert error_of(path, tmp_path / "b.npz", "flax").endswith(OWN)
    folder = tmp_path / "own"
    folder.mkdir()
    assert pipeline.convert(path, folder / "b.safetensors", to="jaxmha").blocks


def test_an_error_for_a_keras_file_names_what_such_a_file_holds(tmp_path: Path) -> None:
    path, target = grouped(tmp_path), tmp_path / "b.weights.h5"
    assert error_of(path, target, "keras").endswith("; --to keras-gqa holds it")
    assert pipeline.convert(path, target, to="keras-gqa").blocks
    other = source(tmp_path, "llama", GEMMA2)
    text = error_of(other, tmp_path / "c.weights.h5", "keras")
    assert text.endswith("; --to jaxmha holds it, in a .safetensors file")
