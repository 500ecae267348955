"""Kinds, bases and rotation of layers, from configurations as older files have them.

Each is compared with the configuration that the class of transformers makes of the same keys.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters import masks_of, positions_of
from jaxmha.converters.discovery import (
    attention_blocks,
    behaviours,
    layer_kinds,
    masked_types,
    positions,
    rotary_settings,
)
from jaxmha.converters.discovery.positions import Rotary
from jaxmha.converters.verify import load_block
from tests.converters.configuration_classes import classes_of
from tests.converters.test_every_layout import model_file

pytestmark = pytest.mark.filterwarnings("default")
LAYERS, HEADS, H = 13, 2, 8
SIZES = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": HEADS * H}
# Configurations without layer_types and rope_parameters, as on the Hub.
RAW: dict[str, dict[str, Any]] = {
    "gemma-3-1b": {
        "model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "sliding_window": 512, "sliding_window_pattern": 6,
    },
    "gemma-3-4b": {
        "model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "modernbert": {
        "model_type": "modernbert", "global_rope_theta": 160000.0, "local_rope_theta": 1e4,
        "local_attention": 128, "global_attn_every_n_layers": 3,
    },
    "cohere2": {
        "model_type": "cohere2", "rope_theta": 5e4, "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "llama4": {
        "model_type": "llama4_text", "attention_chunk_size": 8192, "no_rope_layers": [],
        "rope_theta": 5e5,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 3, "use_sliding_window": False},
    "olmo3": {
        "model_type": "olmo3", "rope_theta": 5e5, "max_position_embeddings": 65536,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2,
                         "original_max_position_embeddings": 8192},
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 64,
        "max_window_layers": 7,
    },
}  # fmt: skip


def _saved(folder: Path, config: dict[str, Any]) -> Path:
    rng = np.random.default_rng(0)
    state = {
        f"model.layers.{i}.self_attn.{x}_proj.weight": rng.normal(size=(HEADS * H, HEADS * H))
        for i in range(LAYERS)
        for x in "qkvo"
    }
    model_file(folder / "model.safetensors", state, SIZES | {"head_dim": H} | config)
    return folder


def _frequencies(config: Any, kind: str) -> tuple[float, Any, float]:
    """Base, frequencies and factor of a kind of layer, by the functions of transformers."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = config.rope_parameters
    nested = kind in given
    own = given[kind] if nested else given
    if own["rope_type"] == "default":
        return own["rope_theta"], own["rope_theta"] ** -(np.arange(0, H, 2) / H), 1.0
    of_kind = {"layer_type": kind} if nested else {}
    values, factor = ROPE_INIT_FUNCTIONS[own["rope_type"]](config, "cpu", **of_kind)
    return own["rope_theta"], values.numpy(), factor


@pytest.mark.parametrize("name", RAW)
def test_layers_are_those_of_the_configuration_class(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    raw = RAW[name]
    config = transformers.CONFIG_MAPPING[raw["model_type"]](**SIZES, head_dim=H, **raw)
    folder = _saved(tmp_path, raw)
    positions, masks = positions_of(folder), masks_of(folder)
    rows = getattr(config, "no_rope_layers", [1] * LAYERS)
    size = 64 if name == "modernbert" else getattr(config, "sliding_window", None) or 0
    for i in range(LAYERS):
        block = f"model.layers.{i}.self_attn"
        kind = (getattr(config, "layer_types", None) or ["full_attention"] * LAYERS)[i]
        mask, place = masks[block], positions[block]
        if kind == "sliding_attention":
            assert mask.left == size - (name != "modernbert"), (i, mask)
        else:
            assert mask.left is None, (i, mask)
        assert mask.chunk == (8192 if kind == "chunked_attention" else None)
        if not rows[i] or (name == "cohere2" and kind == "full_attention"):
            assert place.scheme == "none", (i, place)
            continue
        assert isinstance(place.rotary, Rotary), (i, place)
        base, values, factor = _frequencies(config, kind)
        assert (place.rotary.base, place.rotary.factor) == pytest.approx((base, factor))
        np.testing.assert_allclose(place.rotary.inv_freq, values, rtol=1e-6)


def test_the_tables_are_those_of_the_classes() -> None:
    pytest.importorskip("transformers")
    for name, kind in classes_of({*layer_kinds.EVERY, *layer_kinds.SIZES}).items():
        config = kind()
        key = {"llama4_text": "attention_chunk_size"}.get(name, "sliding_window")
        key = masked_types.WINDOWS.get(name, (key,))[0]
        assert config.to_dict()[key] == layer_kinds.SIZES.get(name), name
        if name in layer_kinds.EVERY:
            count = {"num_hidden_layers": config.num_hidden_layers}
            ours = [layer_kinds.of(count, name, i) for i in range(config.num_hidden_layers)]
            assert ours == config.layer_types, name
    for name, kind in classes_of(layer_kinds.SWITCHED).items():
        own = {"use_sliding_window": True}
        assert kind(**own).sliding_window == layer_kinds.window(own, name), name


def test_dbrx_keeps_its_base_in_a_part_of_its_own(tmp_path: Path) -> None:
    """The class of transformers 5 does not read it; that of version 4, of the file, did."""
    nested = {"clip_qkv": 8, "kv_n_heads": HEADS, "rope_theta": 500000}
    folder = _saved(tmp_path, {"model_type": "dbrx", "n_heads": HEADS, "attn_config": nested})
    assert {str(x).split(",")[1] for x in positions_of(folder).values()} == {" base 500000"}
    given = {"rope_parameters": {"rope_theta": 7.0}, "attn_config": nested}
    assert rotary_settings.of(given, "dbrx", 0)["rope_theta"] == 7.0


def test_bases_of_layers_are_read() -> None:
    own = {"layer_rope_theta": [7.0, 0], "rope_parameters": {"rope_theta": 9.0}}
    assert rotary_settings.of(own, "granite_swa", 0)["rope_theta"] == 7.0


def test_kinds_that_nothing_tells_are_unknown(tmp_path: Path) -> None:
    folder = _saved(tmp_path, {"model_type": "mimo_v2_flash", "sliding_window": 128})
    (mask, *_), (place, *_) = masks_of(folder).values(), positions_of(folder).values()
    assert (mask.scheme, place.scheme) == ("unknown", "unknown")
    assert "layer_types of the configuration are missing" in mask.why
    assert "rope_parameters of the configuration are missing" in place.why


def test_semantics_and_factors_follow_the_layers_of_llama_4(tmp_path: Path) -> None:
    raw = {**RAW["llama4"], "rms_norm_eps": 1e-5}
    folder = _saved(tmp_path, raw)
    with checkpoint.open(folder / "model.safetensors") as file:
        found = behaviours.configured(attention_blocks.find(attention_blocks.shapes(file)), file)
    norms = {b.prefix: b.layout.semantics.qk_norm for b in found}
    places = positions_of(folder)
    assert all(block.configured for block in found)
    for i in range(LAYERS):
        whole = (i + 1) % 4 == 0
        prefix = f"model.layers.{i}.self_attn"
        assert norms[prefix] == (None if whole else "rms")
        assert (places[prefix].query_scale is not None) == whole
    with checkpoint.open(folder / "model.safetensors") as file:
        (noted,) = (note for note in positions.notes(file, places) if ": none" in note)
    assert noted.startswith(f"positions of {LAYERS // 4} x model.layers.{{i}}.self_attn: none")
    assert "positions_of" in noted
    prefix = "model.layers.3.self_attn"
    assert load_block.read(folder / "model.safetensors", prefix).positions == str(places[prefix])


def test_a_window_without_a_direction_is_a_mask_of_the_model(tmp_path: Path) -> None:
    file = _saved(tmp_path, RAW["modernbert"]) / "model.safetensors"
    masks = [load_block.read(file, f"model.layers.{i}.self_attn").mask for i in (0, 1)]
    assert masks == ["", "full, a query and 64 keys before and 64 after"]


@pytest.mark.parametrize(
    ("left_out", "named"),
    [("num_attention_heads", "no num_attention_heads")],
)
def test_a_missing_setting_is_named(left_out: str, named: str, tmp_path: Path) -> None:
    kernels = {f"model.layers.0.self_attn.{x}_proj.weight": np.ones((16, 16)) for x in "qkvo"}
    norms = {f"model.layers.0.self_attn.{x}_norm.weight": np.ones(8) for x in "qk"}
    checkpoint.write(tmp_path / "a.safetensors", kernels | norms)
    config = {"model_type": "gemma3_text", "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 8,
              "attn_logit_softcapping": None, "head_dim": 8}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with checkpoint.open(tmp_path / "a.safetensors") as file:
        (block,) = behaviours.configured(attention_blocks.find(attention_blocks.shapes(file)), file)
    with pytest.raises(ValueError, match="no num_attention_heads for model_type gemma3_text"):
        block.refuse()


def test_a_part_without_a_head_count_is_the_one_that_a_prefix_names(tmp_path: Path) -> None:
    """gemma-3-4b-it: its text_config leaves out what equals the defaults of its class."""
    text = {"model_type": "gemma3_text", "sliding_window": 64, "num_hidden_layers": LAYERS}
    vision = {"model_type": "siglip_vision_model", "num_attention_heads": 16}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": vision}
    prefix = "language_model.model.layers.0.self_attn"
    kernels = {f"{prefix}.{x}_proj.weight": np.ones((16, 16)) for x in "qkvo"}
    model_file(
        tmp_path / "a.safetensors",
        kernels | {f"{prefix}.{x}_norm.weight": np.ones(8) for x in "qk"},
        config,
    )
    assert masks_of(tmp_path)[prefix].left == 63
    with checkpoint.open(tmp_path / "a.safetensors") as file:
        (block,) = behaviours.configured(attention_blocks.find(attention_blocks.shapes(file)), file)
    semantics = block.layout.semantics
    assert (semantics.scale, semantics.qk_norm_epsilon) == (256**-0.5, 1e-6)
