"""A part of a configuration without a model type is that of its class in transformers."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters import masks_of, positions_of
from jaxmha.converters.discovery import (
    architectures,
    attention_blocks,
    head_count,
    hf_config,
    part_types,
)
from jaxmha.converters.verify import load_block
from tests.converters.configuration_classes import classes_of
from tests.converters.test_every_layout import model_file

pytestmark = pytest.mark.filterwarnings("default")
# Model types of models whose text part leaves out its model type in these tests -> settings of it.
_SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 32}
_WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
TEXTS: dict[str, dict[str, Any]] = {
    "gemma3": _WINDOW | {"head_dim": 8},
    "llava": {},
    "mistral3": {"sliding_window": 5},
    "paligemma": {"head_dim": 8},
    "internvl": {"partial_rotary_factor": 0.5},
    "qwen3_vl": {"head_dim": 8},
    "llama4": {"head_dim": 8, "attention_chunk_size": 3},
}


@pytest.mark.parametrize("model_type", TEXTS)
def test_a_text_model_is_read_as_if_it_named_its_type(model_type: str, tmp_path: Path) -> None:
    kind = part_types.OF_TYPES[model_type]["text_config"]
    text = _SIZES | {"num_attention_heads": 2, "num_key_value_heads": 2} | TEXTS[model_type]
    prefix = "language_model.model.layers.{}.self_attn.{}_proj.weight"
    rng = np.random.default_rng(0)
    state = {prefix.format(i, x): rng.normal(size=(16, 16)) for i in range(2) for x in "qkvo"}
    read: list[Any] = []
    for named in ({}, {"model_type": kind}):
        folder = tmp_path / f"{len(read)}"
        folder.mkdir()
        checkpoint.write(folder / "model.safetensors", state)
        config = {"model_type": model_type, "text_config": text | named, "vision_config": {}}
        (folder / "config.json").write_text(json.dumps(config))
        positions, masks = positions_of(folder), masks_of(folder)
        assert all(one.scheme != "unknown" for one in positions.values())
        blocks = [load_block.read(folder / "model.safetensors", name) for name in positions]
        read.append((positions, masks, [block.semantics for block in blocks]))
    assert read[0] == read[1]


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "paddleocr_vl"])
def test_older_files_have_the_text_model_at_their_top(model_type: str, tmp_path: Path) -> None:
    """As Qwen2.5-VL-7B-Instruct has it, and the nested file that transformers makes of it."""
    (kind,) = classes_of([model_type]).values()
    sections: dict[str, Any] = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    text: dict[str, Any] = _SIZES | {"num_attention_heads": 2, "num_key_value_heads": 2}
    text |= sections | {"rope_theta": 7.0}
    if model_type == "paddleocr_vl":
        text["rope_scaling"]["type"], text["head_dim"] = "default", 8
    read: list[Any] = []
    vision = {"model_type": model_type, "num_heads": 4}
    older = {"model_type": model_type, "vision_config": vision, **text}
    newer = json.loads(kind.from_dict(older).to_json_string(use_diff=False))
    for config, outer in ((older, "model"), (newer, "model.language_model")):
        name = outer + ".layers.{}.self_attn.{}_proj.weight"
        state = {name.format(i, x): np.ones((16, 16)) for i in range(2) for x in "qkvo"}
        folder = tmp_path / f"{len(read)}"
        folder.mkdir()
        model_file(folder / "model.safetensors", state, config)
        read.append([[*of(folder).values()] for of in (positions_of, masks_of)])
    assert read[0] == read[1]
    positions, masks = read[0]
    assert {str(one) for one in masks} == {"causal"}
    assert {one.rotary.base for one in positions} == {7.0}
    found: Any = hf_config.read(tmp_path / "0" / "a.safetensors")
    assert found["vision_config"]["model_type"] == f"{model_type}_vision"


VISION = {"num_heads": 4}


@pytest.mark.parametrize("model_type", ["fuyu", "qwen2_vl"])
@pytest.mark.parametrize("vision", [{}, {"vision_config": VISION}], ids=["text", "vision"])
@pytest.mark.parametrize("outer", ["module.language_model.model", "base_model.model.model"])
def test_a_wrapped_text_model_has_the_head_count_of_the_top(
    model_type: str, vision: dict[str, Any], outer: str, tmp_path: Path
) -> None:
    """As DistributedDataParallel and PEFT save it."""
    config = {"model_type": model_type, "num_attention_heads": 2} | _SIZES | vision
    _compare_heads({f"{outer}.layers.0.self_attn": 2}, config, tmp_path)


@pytest.mark.parametrize("named", [{}, {"model_type": "git_vision_model"}])
@pytest.mark.parametrize(("stated", "heads"), [({}, 12), ({"num_attention_heads": 8}, 8)])
def test_towers_of_git(
    named: dict[str, str], stated: dict[str, int], heads: int, tmp_path: Path
) -> None:
    config = {"model_type": "git", "num_attention_heads": 2, "vision_config": named | stated}
    vision = "git.image_encoder.vision_model.encoder.layers.0.self_attn"
    _compare_heads({"git.encoder.layer.0.attention": 2, vision: heads}, config, tmp_path)


# Model type -> settings of its parts with head counts of their own, and of its top.
_COUNTED: dict[str, dict[str, Any]] = {
    "cohere_asr": {"num_attention_heads": 4, "num_hidden_layers": 1,
                   "encoder_config": {"num_attention_heads": 2, "num_hidden_layers": 1}},
    "neucodec": {"num_attention_heads": 4, "num_hidden_layers": 1,
                 "semantic_model_config": {"num_attention_heads": 2, "num_hidden_layers": 1}},
    "grounding-dino": {"encoder_attention_heads": 4, "decoder_attention_heads": 8,
                       "encoder_layers": 1, "decoder_layers": 1,
                       "text_config": {"num_attention_heads": 6, "num_hidden_layers": 1},
                       "backbone_config": {"model_type": "swin", "depths": [1, 1, 1, 1],
                                           "out_indices": [2, 3, 4]}},
    "bridgetower": {"num_attention_heads": 4, "num_hidden_layers": 2,
                    "text_config": {"num_attention_heads": 6, "num_hidden_layers": 1},
                    "vision_config": {"num_hidden_layers": 1}},
    "dia": {f"{part}_config": {"num_hidden_layers": 1} for part in ("encoder", "decoder")},
    "unlimited_ocr": {"text_config": {"num_hidden_layers": 1},
                      "vision_config": {"encoder_config": {"num_hidden_layers": 1},
                                        "sam_config": {"num_hidden_layers": 1}}},
    "depth_pro": {f"{part}_model_config": {"num_attention_heads": heads, "num_hidden_layers": 1}
                  for part, heads in (("image", 2), ("patch", 3), ("fov", 4))},
}  # fmt: skip


@pytest.mark.parametrize("model_type", _COUNTED)
def test_head_counts_of_parts_are_those_of_the_modules(model_type: str, tmp_path: Path) -> None:
    """The count at the top is that of all blocks of no part, and each part has its own."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModel

    config = CONFIG_MAPPING[model_type](**_COUNTED[model_type])
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    shapes = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    blocks = [block.prefix for block in attention_blocks.find(shapes)]
    found = head_count.in_config(tmp_path / "model.safetensors")
    assert found is not None
    counts = {name: found.over(blocks).of(name)[0] for name in blocks}
    assert counts == {name: _heads(model.get_submodule(name)) for name in blocks}


def _heads(block: Any) -> int | None:
    """The head count that a module of attention, or its first child with one, computes with."""
    keys = ("num_heads", "num_attention_heads", "n_heads")
    inside = [getattr(x, key, None) for x in (block, *block.children()) for key in keys]
    stated = block.config.num_attention_heads if hasattr(block, "config") else None
    return next((heads for heads in inside if heads), stated)


def test_a_part_without_a_count_has_not_that_of_another(tmp_path: Path) -> None:
    config = {"model_type": "grounding-dino", "encoder_attention_heads": 8, "backbone_config": {}}
    prefix = "backbone.conv_encoder.model.swin.encoder.layers.0.blocks.0.attention"
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = head_count.in_config(tmp_path / "model.safetensors")
    assert found is not None
    assert found.part_of(prefix) is None
    assert "no head count for backbone" in found.of(prefix)[1]


def test_a_model_of_unknown_type_has_no_count_for_the_rest(tmp_path: Path) -> None:
    """As MiniCPM-V has a resampler, whose count is neither that of the text nor of the vision."""
    config = {"model_type": "new", "num_attention_heads": 8, "vision_config": {"num_heads": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = head_count.in_config(tmp_path / "model.safetensors")
    assert found is not None
    assert found.over(["vision.layers.0.attn", "resampler.attn"]).of("resampler.attn")[0] is None


def _compare_heads(expected: dict[str, int], config: dict[str, Any], folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    found = head_count.in_config(folder / "model.safetensors")
    assert found is not None
    assert {prefix: found.of(prefix)[0] for prefix in expected} == expected


def _default(kind: Any, key: str) -> str | None:
    """The model type of a part with settings of its own; None if the class refuses that."""
    try:
        found = getattr(kind.from_dict({key: {}}), key)
    except Exception:  # noqa: BLE001 (classes raise various errors)
        return None
    return getattr(found, "model_type", None)


def _compare(models: Any) -> int:
    checked = 0
    for model_type, kind in models.items():
        for key in kind.sub_configs:
            theirs = _default(kind, key)
            if theirs in architectures.KNOWN:
                assert part_types.OF_TYPES[model_type].get(key) == theirs, (model_type, key)
                checked += 1
    return checked


def test_types_of_parts_are_those_of_the_class() -> None:
    assert _compare(classes_of(["gemma3", "llava", "t5gemma", "clap", "sam3"])) > 10


@pytest.mark.slow
def test_types_of_parts_are_those_of_every_class() -> None:
    from transformers import CONFIG_MAPPING

    modules = {sys.modules[kind.__module__] for kind in CONFIG_MAPPING.values()}
    kinds = [x for module in modules for x in vars(module).values()]
    named = {getattr(x, "model_type", ""): x for x in kinds if getattr(x, "sub_configs", None)}
    models = {name: kind for name, kind in named.items() if name in architectures.KNOWN}
    assert _compare(models) > 300


def test_stated_types_are_kept(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2_5_omni",
        "thinker_config": {"text_config": {"n": 1}, "audio_config": {"model_type": "other"}},
        "text_config": {"n": 2},
        "talker_config": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found: Any = hf_config.read(tmp_path / "a.safetensors")
    assert found["thinker_config"]["text_config"] == {"n": 1, "model_type": "qwen2_5_omni_text"}
    assert found["thinker_config"]["audio_config"] == {"model_type": "other"}
    assert found["text_config"] == {"n": 2}
