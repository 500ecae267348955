"""Layers whose head count, width of heads or window differs from that of the others, as in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.step3p7 import modeling_step3p7

from jaxmha.converters.discovery import behaviours, head_count, layer_settings

SIZES = {
    "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 12, "intermediate_size": 16, "vocab_size": 32, "eos_token_id": 1,
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "n_routed_experts": 2,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"] * 2
HYBRID = ["hybrid_sliding", "hybrid", "hybrid", "hybrid_sliding"]
SWA = {"swa_num_attention_heads": 6, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
# Class of a text model -> the settings by which its layers differ.
MODELS: dict[str, dict[str, Any]] = {
    "EmbeddingGemma2TextModel": {"layer_types": KINDS, "global_head_dim": 24},
    "Gemma4UnifiedTextModel": {"layer_types": KINDS, "global_head_dim": 24},
    "Inkling2TextModel": {"layer_types": HYBRID, **SWA},
    "InklingTextModel": {"layer_types": HYBRID, **SWA},
    "LagunaModel": {"num_attention_heads_per_layer": [4, 8, 4, 2]},
    "Step3p7TextModel": {"layer_types": KINDS, "num_sliding_attention_heads": 8},
}


@pytest.mark.parametrize("name", MODELS)
def test_heads_are_those_of_the_layers(name: str, tmp_path: Path) -> None:
    """By the configuration that transformers saves, and by one with the keys of the authors alone."""
    given = {**SIZES, **MODELS[name]}
    model, model_type = _made(name, given)
    model.config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    own = {"model_type": model_type, **given}
    nested = {"model_type": "unknown", "text_config": own, "vision_config": {"num_heads": 3}}
    expected = {n: m for n, m in model.named_modules() if hasattr(m, "q_proj")}
    assert len(expected) == SIZES["num_hidden_layers"]
    for content, start in ((saved, ""), (own, "model."), (nested, "model.language_model.")):
        (tmp_path / "config.json").write_text(json.dumps(content))
        configured = head_count.in_config(tmp_path / "model.safetensors")
        assert configured is not None
        for place, layer in expected.items():
            count = configured.count_of(start + place)
            assert not isinstance(count, str), count
            rows, width = layer.q_proj.out_features, layer.head_dim
            assert count.heads == rows // width
            found = behaviours.part_of(content, count, start + place)
            assert found is not None
            assert found[0]["head_dim"] == width
    assert configured
    assert configured.of("model.vision.blocks.0.attn")[0] == 3


def _made(name: str, given: dict[str, Any]) -> tuple[Any, str]:
    """A model without memory for its weights, and its type."""
    cls = getattr(transformers, name, None) or getattr(modeling_step3p7, name)
    with torch.device("meta"):
        return cls(cls.config_class(**given)), cls.config_class.model_type


def test_a_layer_has_its_own_window() -> None:
    """In NeoMME, every other window is a long one."""
    config = transformers.NeoMMEConfig(
        **{**SIZES, "head_dim": 16}, layer_types=[KINDS[0], KINDS[0], *KINDS[:2]]
    )
    content = json.loads(config.to_json_string())
    count = head_count.Count(4, "", way=("num_attention_heads",))
    found = [behaviours.part_of(content, count, f"layers.{n}.self_attn") for n in range(4)]
    expected = [layer.sliding_window for layer in config.per_layer_config]
    assert len({*expected}) > 1
    assert [own["sliding_window"] for own, _ in filter(None, found)] == expected


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("inkling_text", {}, "layer_types have no layer 0, whose heads depend on its kind"),
        ("inkling_text", {"local_layer_ids": [1], "swa_num_attention_heads": 0}, "of layer 1 is 0"),
        ("llama", {"per_layer_config": {"2": {"num_attention_heads": "x"}}}, "of layer 2 is 'x'"),
    ],
)
def test_unusable_settings_are_named(
    model_type: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    content = {"model_type": model_type, "num_attention_heads": 4, **settings}
    (tmp_path / "config.json").write_text(json.dumps(content))
    configured = head_count.in_config(tmp_path / "model.safetensors")
    assert configured is not None
    assert message in configured.wrong


def test_layers_without_settings_of_their_own() -> None:
    """A class may have no such layers, and a key may be no index."""
    assert not layer_settings.of({"layer_types": KINDS, "global_head_dim": 8}, "gemma2", 1)
    assert not layer_settings.heads({"n_head": 2, "per_layer_config": {"x": {}}}, "gpt2", "n_head")
