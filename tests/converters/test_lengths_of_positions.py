"""Rotary frequencies that depend on the longest sequence are those of transformers at every length."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, LlamaConfig, Phi3Config

from jaxmha import checkpoint
from jaxmha.converters import positions_of
from jaxmha.converters.discovery.positions import Rotary

N, D, TRAINED = 2, 8, 16
SIZES: dict[str, Any] = {
    "hidden_size": D, "num_attention_heads": N, "num_key_value_heads": N, "num_hidden_layers": 1,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 7, "kv_lora_rank": 11,
    "q_lora_rank": None,
}  # fmt: skip
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "factor": 3.0}
ROPE: dict[str, dict[str, Any]] = {
    "phi3": {"rope_type": "longrope", "short_factor": [1.1, 1.3], "long_factor": [2.0, 3.0]},
    "llama": DYNAMIC,
    "deepseek_v3": DYNAMIC,
}
PROJECTIONS: dict[str, tuple[int, ...]] = {f"{x}_proj.weight": (D, D) for x in "qkvo"}
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "phi3": PROJECTIONS,
    "llama": PROJECTIONS,
    "deepseek_v3": {
        "q_proj.weight": (N * (5 + 4), D), "kv_a_proj_with_mqa.weight": (11 + 4, D),
        "kv_a_layernorm.weight": (11,), "kv_b_proj.weight": (N * (5 + 7), 11),
        "o_proj.weight": (D, N * 7),
    },
}  # fmt: skip


def inv_freq(kind: str, folder: Path, length: int) -> np.ndarray:
    """The frequencies of the live model; writes its configuration."""
    rope = {"rope_theta": 100.0, **ROPE[kind]}
    if kind == "phi3":
        from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding as Embedding

        rope["original_max_position_embeddings"] = TRAINED
        config: Any = Phi3Config(
            **SIZES, rope_parameters=rope, max_position_embeddings=4 * TRAINED,
            original_max_position_embeddings=TRAINED, pad_token_id=0,
        )  # fmt: skip
    elif kind == "deepseek_v3":
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
            DeepseekV3RotaryEmbedding as Embedding,
        )

        config = DeepseekV3Config(
            **SIZES, **LATENT, rope_parameters=rope, max_position_embeddings=TRAINED
        )
    else:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding as Embedding

        config = LlamaConfig(**SIZES, rope_parameters=rope, max_position_embeddings=TRAINED)
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    module = Embedding(config)
    module(torch.zeros(1, length, D), torch.arange(length)[None])
    return np.asarray(module.inv_freq)


@pytest.mark.parametrize("length", [TRAINED, TRAINED + 7])
@pytest.mark.parametrize("kind", ROPE)
def test_frequencies_are_those_of_transformers(kind: str, length: int, tmp_path: Path) -> None:
    state = {f"layers.0.self_attn.{k}": np.ones(s, np.float32) for k, s in SHAPES[kind].items()}
    checkpoint.write(tmp_path / "model.safetensors", state)
    want = inv_freq(kind, tmp_path, length)
    (found,) = positions_of(tmp_path, length=length).values()
    (trained,) = positions_of(tmp_path).values()
    assert isinstance(found.rotary, Rotary)
    assert isinstance(trained.rotary, Rotary)
    np.testing.assert_array_equal(np.asarray(found.rotary.inv_freq, np.float32), want)
    assert f"scaling {ROPE[kind]['rope_type']}, up to {TRAINED} tokens" in str(trained)
    assert (trained.rotary.inv_freq == found.rotary.inv_freq) == (length == TRAINED)
    assert "tokens" not in str(found)


def test_a_length_is_a_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="length"):
        positions_of(tmp_path, length=-1)
