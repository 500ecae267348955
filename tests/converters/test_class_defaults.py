"""A configuration without a key means what the class of transformers has by default."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from jaxmha import checkpoint, multi_head_attention
from jaxmha.converters import masks_of
from jaxmha.converters.discovery import (
    behaviour_readers,
    behaviours,
    class_defaults,
    head_count,
    head_defaults,
    layer_kinds,
    other_behaviours,
    rotary_settings,
)
from jaxmha.converters.verify import load_block
from tests.converters.configuration_classes import classes_of
from tests.converters.test_behaviours import source
from tests.tolerance import assert_close

N, H, T, D = 3, 4, 5, 12
_DECODER = {
    "vocab_size": 11, "hidden_size": D, "intermediate_size": 7, "num_attention_heads": N,
    "num_key_value_heads": N, "num_hidden_layers": 2, "head_dim": H,
}  # fmt: skip
_GPT2 = {"vocab_size": 11, "n_embd": D, "n_head": N, "n_layer": 2, "n_positions": 13}
_MPT = {"vocab_size": 11, "d_model": D, "n_heads": N, "n_layers": 2, "expansion_ratio": 1}
# Configuration of transformers -> its settings, and a key that is then left out of the file.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "granite": ("GraniteConfig", _DECODER, "attention_multiplier"),
    "gemma2": ("Gemma2Config", _DECODER, "query_pre_attn_scalar"),
    "gemma2 cap": ("Gemma2Config", _DECODER, "attn_logit_softcapping"),
    "qwen3": ("Qwen3Config", _DECODER, "rms_norm_eps"),
    "gpt2": ("GPT2Config", _GPT2, "scale_attn_weights"),
    "gpt2 unscaled": ("GPT2Config", _GPT2 | {"scale_attn_weights": False}, ""),
    "gpt2 by layer": ("GPT2Config", _GPT2 | {"scale_attn_by_inverse_layer_idx": True}, ""),
    "mpt": ("MptConfig", _MPT | {"attn_config": {"softmax_scale": 0.3}}, ""),
}


def outputs(model: Any, x: Any) -> Any:
    """The outputs of the attention of the second layer, without mask and rotation."""
    layers = getattr(model, "layers", None) or getattr(model, "h", None) or model.blocks
    layer = layers[1]
    attention = next(
        found for name in ("self_attn", "attn") if (found := getattr(layer, name, None)) is not None
    )
    given: dict[str, Any] = {"attention_mask": None}
    if type(attention).__name__ == "MptAttention":
        given["position_bias"] = torch.zeros(N, 1, T)
    elif hasattr(attention, "q_proj"):
        given["position_embeddings"] = (torch.ones(1, T, H), torch.zeros(1, T, H))
    with torch.no_grad():
        return attention(x, **given)[0].numpy()


@pytest.mark.slow_variants("granite", "gpt2", "gpt2 unscaled")
@pytest.mark.parametrize("name", MODELS)
def test_a_block_computes_as_the_model_without_the_key(name: str, tmp_path: Path) -> None:
    kind, settings, key = MODELS[name]
    torch.manual_seed(0)
    built = transformers.AutoModel.from_config(getattr(transformers, kind)(**settings))
    state = {x: torch.randn(p.shape) for x, p in built.named_parameters()}
    built.load_state_dict(state, strict=False)
    built.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if key:
        del config[key]
        (tmp_path / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    x = torch.randn(2, T, D)
    with checkpoint.open(tmp_path / "model.safetensors") as file:
        first, second = behaviours.blocks(file)
    assert first.prefix < second.prefix
    block = load_block.read(tmp_path / "model.safetensors", second.prefix)
    found = multi_head_attention(block.params, x.numpy(), semantics=block.semantics)
    assert_close(found, outputs(model.eval(), x))


def test_a_setting_that_is_no_number_is_refused(tmp_path: Path) -> None:
    config = {"model_type": "granite", "attention_multiplier": None}
    path = source(tmp_path, "llama", config)
    with pytest.raises(
        ValueError, match=r"settings of attention for model_type granite that cannot"
    ):
        load_block.read(path)


def test_a_configuration_without_a_head_count_has_no_unread_scale(tmp_path: Path) -> None:
    path = source(tmp_path, "llama", {"model_type": "granite", "num_attention_heads": None})
    with pytest.raises(ValueError, match=r"no num_attention_heads for model_type granite"):
        load_block.read(path, num_heads=3)


def test_llama_ignores_layer_types(tmp_path: Path) -> None:
    stray = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 2}
    torch.manual_seed(0)
    plain = transformers.LlamaModel(transformers.LlamaConfig(**_DECODER))
    model = transformers.LlamaModel(transformers.LlamaConfig(**_DECODER, **stray))
    model.load_state_dict(plain.state_dict())
    tokens = torch.arange(T)[None]
    first, other = (one(tokens, use_cache=False)[0].detach().numpy() for one in (plain, model))
    np.testing.assert_array_equal(first, other)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["layer_types"] == stray["layer_types"]
    assert {str(mask) for mask in masks_of(tmp_path).values()} == {"causal"}


@pytest.mark.parametrize("given", [{}, {"attention_types": [[["local"], 1], [["global"], 1]]}])
def test_layers_of_gpt_neo(given: dict[str, Any]) -> None:
    config = transformers.GPTNeoConfig(num_layers=2 if given else 24, **given)
    own = class_defaults.filled(given, "gpt_neo")
    kinds = [layer_kinds.listed(own, "gpt_neo", i) for i in range(config.num_layers)]
    assert kinds == config.attention_layers
    assert own["window_size"] == config.window_size


def test_rotation_of_layers_without_kinds() -> None:
    """Classes whose layers all attend fully by default have the parameters of that kind."""
    given = transformers.CONFIG_MAPPING["mellum"]().rope_parameters
    assert len(given) > 1
    found = rotary_settings.of({"rope_parameters": given}, "mellum", 0)
    assert found["rope_theta"] == given["full_attention"]["rope_theta"]
    kinds = {"hybrid": {"rope_theta": 7.0}, "hybrid_sliding": {"rope_theta": 5.0}}
    with pytest.raises(ValueError, match="layer_types of the configuration are missing"):
        rotary_settings.of({"rope_parameters": kinds}, "zaya", 0)


def settings_of(config: Any) -> dict[str, Any]:
    """The settings of a configuration, and those of its text model where it has none of its own."""
    found: dict[str, Any] = config.get_text_config().to_dict() | config.to_dict()
    return found


# As gemma-3-4b-it, llava-1.5-7b and idefics2 have them: class, settings, and a block of each part.
NESTED: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "gemma3": (
        "Gemma3Config",
        {"text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "sliding_window": 1024},
         "vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16}},
        {"text_config": "language_model.model.layers.1.self_attn",
         "vision_config": "vision_tower.vision_model.encoder.layers.1.self_attn"},
    ),
    "llava": (
        "LlavaConfig",
        {"text_config": {"model_type": "llama", "rms_norm_eps": 1e-5},
         "vision_config": {"model_type": "clip_vision_model"}},
        {"text_config": "language_model.model.layers.1.self_attn",
         "vision_config": "vision_tower.vision_model.encoder.layers.1.self_attn"},
    ),
    "stated": (
        "LlavaConfig",
        {"text_config": {"model_type": "gpt2", "n_head": 6},
         "vision_config": {"model_type": "clip_vision_model", "num_attention_heads": 8}},
        {"text_config": "language_model.transformer.h.1.attn"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NESTED)
def test_head_counts_of_nested_configurations(name: str, tmp_path: Path) -> None:
    kind, settings, prefixes = NESTED[name]
    config = getattr(transformers, kind)(**settings)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": config.model_type} | settings))
    found = head_count.in_config(tmp_path / "model.safetensors")
    assert found is not None
    for part, prefix in prefixes.items():
        count, where = found.of(prefix)
        assert count == getattr(config, part).num_attention_heads
        stated = {*settings[part]} & {*head_count.CONFIG_KEYS}
        assert ("the default of its class" in where) == (not stated)


@pytest.mark.slow
def test_head_counts_are_those_of_the_classes() -> None:
    from transformers import CONFIG_MAPPING

    modules = {sys.modules[kind.__module__] for kind in CONFIG_MAPPING.values()}
    kinds = {getattr(x, "model_type", ""): x for one in modules for x in vars(one).values()}
    for name, kind in ((name, kinds[name]) for name in head_defaults.OF_TYPES):
        key, count = head_defaults.OF_TYPES[name]
        assert kind().to_dict()[key] == count, name
        aliases = {alias for alias, own in kind.attribute_map.items() if own == key}
        assert {key, *aliases} - {"num_key_value_heads"} <= {*head_count.CONFIG_KEYS}, name


@pytest.mark.slow
def test_the_tables_are_those_of_the_classes() -> None:
    for name, kind in classes_of(class_defaults.OF_TYPES).items():
        found = settings_of(kind())
        expected = class_defaults.OF_TYPES[name]
        found["pos_att_type"] = "|".join(found.get("pos_att_type") or ())
        assert {key: found[key] for key in expected} == expected, name
    for name, kind in classes_of(layer_kinds.LISTING).items():
        assert "layer_types" in kind().to_dict(), name


@pytest.mark.slow
def test_no_setting_that_readers_need_is_missing() -> None:
    """A reader gives the same for a class with all its settings, and for one without them."""
    others = {t for types, _ in other_behaviours.READERS for t in types.split()}
    known = {t for types, _ in behaviour_readers.READERS for t in types.split()} - others
    sizes = ("hidden_size", "num_attention_heads")
    for name, kind in classes_of(known - {"exaone4_5_text"}).items():
        full = settings_of(kind())
        bare = class_defaults.filled({key: full.get(key) for key in sizes}, name)
        read = behaviour_readers.reader_of(name)
        assert read is not None
        for layer in (0, 3):
            index = {behaviour_readers.LAYER: layer}
            assert read(full | index) == read(bare | index), name
