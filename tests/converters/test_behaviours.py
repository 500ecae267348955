"""The behaviour that a config.json names is carried: scale, soft cap, norms; unknown attention is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import Semantics, checkpoint
from jaxmha.converters.discovery import (
    all_positions,
    attention_blocks,
    behaviours,
    stored_semantics,
)
from jaxmha.converters.discovery.positions import Rotary
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.migrate import pipeline
from tests.converters.test_every_layout import N, exported, model_file

PREFIX = "layers.0.self_attn"
QWEN3 = {"model_type": "qwen3", "rms_norm_eps": 1e-5}
GEMMA2 = {"model_type": "gemma2", "query_pre_attn_scalar": 64, "attn_logit_softcapping": 50.0}
# Gemma 3 of transformers 5.23 has the cap of Gemma 2 among its settings, and never applies it.
GEMMA3 = GEMMA2 | {"model_type": "gemma3_text", "rms_norm_eps": 1e-5}
OFFSET = {"scale": 0.125, "qk_norm": "rms", "qk_norm_epsilon": 1e-5, "qk_norm_offset": 1.0}
GRANITE = {"model_type": "granite", "attention_multiplier": 0.25}


def source(folder: Path, layout: str, config: dict[str, Any]) -> Path:
    """One block with a configuration, and a norm under the name that torchtune gives it."""
    norm = {"layers.0.sa_norm.scale": np.ones(5, np.float32)}
    config = {"num_attention_heads": N} | config
    return model_file(folder / "a.safetensors", exported(layout, PREFIX) | norm, config)


def same(one: Path, other: Path) -> bool:
    with checkpoint.open(one) as a, checkpoint.open(other) as b:
        return a.info.keys() == b.info.keys() and all(
            np.array_equal(a[name], b[name]) for name in a.info
        )


@pytest.mark.parametrize(
    ("layout", "config", "fields"),
    [
        ("llama-norm", QWEN3, {"qk_norm": "rms", "qk_norm_epsilon": 1e-5}),
        ("llama", GEMMA2, {"scale": 0.125, "logits_soft_cap": 50.0}),
        ("llama-norm", GEMMA3, OFFSET),
        ("llama", GRANITE, {"scale": 0.25}),
    ],
)
def test_the_configuration_tells_semantics_and_the_file_keeps_them(
    layout: str, config: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    path, converted = source(tmp_path, layout, config), tmp_path / "elsewhere" / "b.safetensors"
    converted.parent.mkdir()
    pipeline.convert(path, converted, to="jaxmha")
    with checkpoint.open(converted) as file:
        (block,) = behaviours.configured(attention_blocks.find(attention_blocks.shapes(file)), file)
        params, semantics = block.read(file)
    assert semantics == Semantics(**fields)
    assert (params.query_norm is not None) == ("qk_norm" in fields)
    pipeline.convert(converted, tmp_path / "c.safetensors", to=layout)
    assert same(path, tmp_path / "c.safetensors")


def test_semantics_go_nowhere_else_unsaid(tmp_path: Path) -> None:
    path = source(tmp_path, "llama", GRANITE)
    with pytest.raises(ValueError, match=r"cannot hold semantics.scale=0.25.*--fold-scale"):
        pipeline.convert(path, tmp_path / "b.safetensors", to="flax")
    converted = tmp_path / "b.safetensors"
    pipeline.convert(path, converted, to="jaxmha")
    with pytest.raises(ValueError, match=r"layout linear-wo cannot hold semantics.scale=0.25"):
        pipeline.convert(converted, tmp_path / "c.safetensors", to="linear-wo")


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("", "no tensor tells how q_norm and k_norm normalise"),
        ("llama", "no tensor tells how q_norm and k_norm normalise"),
        ("timesfm2_5", "timesfm2_5 normalises queries and keys after their rotation"),
    ],
)
def test_norms_are_refused_where_nothing_tells_how_they_normalise(
    model_type: str, why: str, tmp_path: Path
) -> None:
    path = source(tmp_path, "llama-norm", {"model_type": model_type} if model_type else {})
    with pytest.raises(ValueError, match=why):
        pipeline.convert(path, tmp_path / "b.safetensors", to="jaxmha")


def test_unreadable_metadata_is_refused(tmp_path: Path) -> None:
    path = source(tmp_path, "llama", GRANITE)
    pipeline.convert(path, converted := tmp_path / "b.safetensors", to="jaxmha")
    with checkpoint.open(converted) as file:
        state = {name: np.asarray(file[name]) for name in file.info}
    wrong = {f"{stored_semantics.METADATA}.{PREFIX}": '{"scale": "large"}'}
    checkpoint.write(converted, state, metadata=wrong, force=True)
    with pytest.raises(ValueError, match=rf"{stored_semantics.METADATA}.{PREFIX} of the metadata"):
        pipeline.convert(converted, tmp_path / "c.safetensors", to="llama")


@pytest.mark.parametrize(
    "names",
    [
        ("q_lin9", "k_lin9", "v_lin9", "out_lin9", "mix"),
        ("in_proj_qkv", "out"),
        ("query", "key_value", "proj9", "proj10"),
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    ],
)
def test_attention_of_no_known_layout_is_named_and_carried(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    state: dict[str, NDArray] = {
        f"h.{i}.attn.{name}.weight": rng.normal(size=(12, 12)).astype(np.float32)
        for i in range(2)
        for name in names
    }
    state["h.0.mlp.fc1.weight"] = rng.normal(size=(7, 12)).astype(np.float32)
    checkpoint.write(tmp_path / "a.safetensors", state)
    done = pipeline.convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", to="flax")
    matching = [
        note for note in done.notes if "attention of no known layout, 2 x h.{i}.attn" in note
    ]
    assert matching
    assert matching[0] in pipeline.inspect(tmp_path / "a.safetensors").notes
    with checkpoint.open(tmp_path / "b.safetensors") as file:
        for name, array in state.items():
            if "attn" in name:
                np.testing.assert_array_equal(file[name], array)


def test_positions_are_named_for_every_layer(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
    config = {"model_type": "llama", "rope_parameters": rope, "head_dim": 4}
    found = all_positions.positions_of(source(tmp_path, "llama", config))[PREFIX]
    assert found.scheme == "rotary"
    assert isinstance(found.rotary, Rotary)
    np.testing.assert_allclose(found.rotary.inv_freq, [0.5, 0.05])


def test_positions_that_nothing_tells_are_unknown(tmp_path: Path) -> None:
    found = all_positions.positions_of(source(tmp_path, "llama", {"model_type": "new_model"}))
    assert found[PREFIX].scheme == "unknown"
    assert found[PREFIX].why == "model_type new_model is not known here"
