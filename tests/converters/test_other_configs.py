"""Configurations of diffusers, litgpt and timm give head counts, semantics and positions."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.checkpoint import yaml_text
from jaxmha.checkpoint.errors import CheckpointError
from jaxmha.checkpoint.limits import Budget, Limits
from jaxmha.converters import positions_of
from jaxmha.converters.discovery import attention_blocks, behaviours, described, hf_config
from jaxmha.converters.migrate import pipeline
from tests.converters.test_every_layout import model_file

D, N, H, K = 15, 3, 5, 1


def linears(prefix: str, width: int, names: tuple[str, ...], **more: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(0)
    shapes = {f"{name}.weight": (width, width) for name in names} | more
    return {f"{prefix}.{k}": rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def heads_of(path: Path) -> dict[str, Any]:
    with checkpoint.open(path) as file:
        blocks = attention_blocks.find(attention_blocks.shapes(file))
        heads = described.of(file, blocks).heads
        assert heads is not None
        return {block.prefix: heads.of(block.prefix)[0] for block in blocks}


TO = ("to_q", "to_k", "to_v", "to_out.0")
UNET = {
    "down_blocks.0.attentions.0.transformer_blocks.0.attn1": 12,
    "mid_block.attentions.0.transformer_blocks.0.attn1": 24,
    "up_blocks.0.attentions.0.transformer_blocks.0.attn1": 24,
    "up_blocks.1.attentions.0.transformer_blocks.0.attn1": 12,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"_class_name": "UNet2DConditionModel", "attention_head_dim": 3}, (3, 3, 3, 3)),
        ({"_class_name": "UNet2DConditionModel", "attention_head_dim": [3, 6]}, (3, 6, 6, 3)),
        ({"_class_name": "UNet2DModel", "attention_head_dim": 4, "block_out_channels": [12, 24]},
            (3, 6, 6, 3)),
        ({"_class_name": "UNet3DConditionModel", "attention_head_dim": 4,
            "block_out_channels": [12, 24]}, (3, 6, 6, 3)),
        ({"_class_name": "I2VGenXLUNet", "attention_head_dim": [4, 6], "num_attention_heads": 2,
            "block_out_channels": [12, 24]}, (3, 4, 4, 3)),
        ({"_class_name": "UNetMotionModel", "num_attention_heads": [3, 6]}, (3, 6, 6, 3)),
        ({"_class_name": "UNetMotionModel", "attention_head_dim": 3}, (3, 3, 3, 3)),
        ({"_class_name": "AutoencoderKL", "block_out_channels": [12, 24]}, (1, 1, 1, 1)),
    ],
)  # fmt: skip
def test_head_counts_of_diffusers(config: Any, expected: Any, tmp_path: Path) -> None:
    state: Any = {}
    for prefix, width in UNET.items():
        state |= linears(prefix, width, TO)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    model_file(path, state, config)
    assert tuple(heads_of(path).values()) == expected
    done = pipeline.convert(path, tmp_path / "made.safetensors", to="flax")
    assert len(done.blocks) == len(UNET)


@pytest.mark.parametrize(("motion", "expected"), [(4, (4, 4, 4)), ([4, 8], (8, 8, 4))])
def test_layers_over_frames_have_their_own_head_count(
    motion: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    prefixes = [f"{x}.motion_modules.0.transformer_blocks.0.attn1" for x in ("mid_block", "up_blocks.0", "up_blocks.1")]  # fmt: skip
    state: Any = {}
    for prefix in (*prefixes, "mid_block.attentions.0.transformer_blocks.0.attn1"):
        state |= linears(prefix, 24, TO)
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    checkpoint.write(path, state)
    config = {"_class_name": "UNetMotionModel", "num_attention_heads": 6}
    config |= {"motion_num_attention_heads": motion}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = heads_of(path)
    assert tuple(found[prefix] for prefix in prefixes) == expected
    assert found["mid_block.attentions.0.transformer_blocks.0.attn1"] == 6


def test_a_head_count_of_diffusers_that_fits_no_tensor_is_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, linears("down_blocks.0.attn1", 12, TO))
    config = {"_class_name": "UNet2DConditionModel", "attention_head_dim": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"num_attention_heads is 5, and .* 12 rows"):
        pipeline.convert(path, tmp_path / "made.safetensors", to="flax")


LITGPT = f"""
hf_config:
  name: Some-1B
  org: someone
n_head: {N}
n_query_groups: {K}
n_embd: {D}
head_size: {H}
n_layer: 1
block_size: 64
norm_class_name: RMSNorm
norm_eps: 1.0e-05
norm_qk: true
norm_qk_type: default
rope_base: 500000
rotary_percentage: 0.8
rope_condense_ratio: 1
rope_adjustments: null
attention_scores_scalar: 4
attention_logit_softcapping: 30.0
sliding_window_indices:
- 1
- 0
name: 'Some-1B'
"""


def litgpt(folder: Path, text: str, name: str = "model_config.yaml") -> Path:
    path = folder / "lit_model.safetensors"
    more = {"norm_q.weight": (H,), "norm_k.weight": (H,), "qkv.weight": ((N + 2 * K) * H, D)}
    checkpoint.write(path, linears("transformer.h.0.attn", D, ("proj",), **more))
    (folder / name).write_text(text)
    return path


def test_settings_of_litgpt(tmp_path: Path) -> None:
    path = litgpt(tmp_path, LITGPT)
    assert heads_of(path) == {"transformer.h.0.attn": N}
    with checkpoint.open(path) as file:
        found = attention_blocks.find(attention_blocks.shapes(file))
        (block,) = behaviours.configured(found, file)
        params, semantics = block.read({n: file[n] for n in file.info}, N)
    assert params.key.kernel.shape == (D, K, H)
    assert (semantics.scale, semantics.logits_soft_cap) == (0.5, 30.0)
    assert (semantics.qk_norm, semantics.qk_norm_epsilon) == ("rms", 1e-5)
    place = positions_of(path)["transformer.h.0.attn"]
    assert str(place) == "rotary, base 500000, 4 features in pairs of halves"
    path.unlink()
    path = litgpt(tmp_path, LITGPT + "rope_local_base_freq: 10000\n")
    place = positions_of(path)["transformer.h.0.attn"]
    assert str(place) == "unknown, litgpt: its layers have two bases"


def test_older_settings_of_litgpt(tmp_path: Path) -> None:
    config = {"n_head": N, "n_query_groups": K, "n_embd": D, "rotary_percentage": 1.0,
              "norm_class_name": "LayerNorm"}  # fmt: skip
    assert heads_of(litgpt(tmp_path, json.dumps(config), "lit_config.json")) == {
        "transformer.h.0.attn": N
    }


WRONG_YAML = (
    "n_head: [3", "n_head 3", "- 1", "a: 1\na: 2", "a: &x 1", "a: *x",
    "a: !!python/object/apply:os.getcwd []", f"a: {'[' * 9}{']' * 9}",
)  # fmt: skip


@pytest.mark.parametrize("text", WRONG_YAML)
def test_other_yaml_is_reported(text: str, tmp_path: Path) -> None:
    path = litgpt(tmp_path, text)
    with pytest.raises(ValueError, match=r"model_config\.yaml cannot be read as YAML"):
        pipeline.convert(path, tmp_path / "made.safetensors", to="jaxmha", num_heads=N)


def test_numbers_of_yaml() -> None:
    text = b"a: 1e-5\nb: 1.0e-05\nc: [3, -2.5]\nd: {e: null, f: true}\ng: '1e-5'\n"
    assert yaml_text.load(text, Budget("x", 0, Limits())) == {
        "a": 1e-5, "b": 1e-5, "c": [3, -2.5], "d": {"e": None, "f": True}, "g": "1e-5",
    }  # fmt: skip


def test_yaml_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    hf_config._parsed.cache_clear()
    with pytest.raises(CheckpointError, match=r"pip install 'jaxmha\[files\]'"):
        pipeline.convert(litgpt(tmp_path, LITGPT), tmp_path / "made.safetensors", to="jaxmha")


@pytest.mark.parametrize(
    ("raw", "what"), [(b"a: 1\n" * 10_000, "memory to build"), (b"a" + b":" * 900_000, "size")]
)
def test_yaml_takes_no_more_memory_or_time_than_it_may(raw: bytes, what: str) -> None:
    with pytest.raises(CheckpointError, match=f"{what} (with|of) its YAML"):
        yaml_text.load(raw, Budget("x", 0, Limits(memory=1 << 20)))


@pytest.mark.parametrize("architecture", ["eva02_tiny_patch14_224", "vit_small_patch16_dinov3"])
def test_rotated_models_of_timm_are_named(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    checkpoint.write(path, linears("blocks.0.attn", D, ("proj",), **{"qkv.weight": (3 * D, D)}))
    config = {"architecture": architecture, "pretrained_cfg": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = pipeline.convert(path, tmp_path / "made.safetensors", to="flax", num_heads=N)
    assert any("rotary positions" in note for note in done.notes)
