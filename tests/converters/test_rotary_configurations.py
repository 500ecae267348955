"""Frequencies read from configurations of published models equal those of transformers."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from jaxmha import rope, rope_frequencies
from jaxmha.converters.discovery import rotary_settings

pytestmark = pytest.mark.filterwarnings("default")

LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 4096}
SHORT = [1.0 + 0.03 * i for i in range(48)]
LONG = [1.0 + 1.25 * i for i in range(48)]
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 4096,
}
# Model -> width of heads, max_position_embeddings, rope parameters, sequence length.
MODELS: dict[str, tuple[int, int, dict[str, Any], int]] = {
    "Llama 2 7B": (128, 4096, {"rope_theta": 1e4}, 0),
    "Llama 3.1 8B": (128, 131072, {"rope_theta": 5e5, "factor": 8.0, **LLAMA3}, 0),
    "Llama 3.2 1B": (64, 131072, {"rope_theta": 5e5, "factor": 32.0, **LLAMA3}, 0),
    "Qwen2.5 7B": (128, 32768, {"rope_theta": 1e6}, 0),
    "Qwen2.5 1M, YaRN": (128, 131072,
        {"rope_theta": 1e6, "factor": 4.0, **YARN, "original_max_position_embeddings": 32768}, 0),
    "gpt-oss 20B": (64, 131072, {"rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False, **YARN}, 0),
    "DeepSeek-V3": (64, 163840, {"rope_theta": 1e4, "factor": 40, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0, **YARN}, 0),
    "Phi-3 mini 128k": (96, 131072, {"rope_theta": 1e4, **LONGROPE}, 0),
    "Phi-3 mini 128k, long": (96, 131072, {"rope_theta": 1e4, **LONGROPE}, 9000),
    "Gemma 3 4B, full": (256, 131072, {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}, 0),
    "StableLM 2": (64, 4096, {"rope_theta": 1e4, "partial_rotary_factor": 0.25}, 0),
    "Phi-4 mini": (128, 131072, {"rope_theta": 1e4, "partial_rotary_factor": 0.75, **LONGROPE}, 0),
    "Llama 2, dynamic": (128, 4096, {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0},
        9001),
    "proportional": (128, 4096,
        {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.5}, 0),
    "proportional, factor": (16, 64,
        {"rope_theta": 1e4, "rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 3.0},
        0),
    "longrope, at its length": (96, 131072, {"rope_theta": 1e4, **LONGROPE}, 4096),
    "YaRN, all pairs": (64, 2**21, {"rope_theta": 1e4, "factor": 2.0, **YARN,
        "original_max_position_embeddings": 2**20}, 0),
    "YaRN, one mscale": (64, 8192, {"rope_theta": 1e4, "factor": 2.0, "mscale_all_dim": 0.7, **YARN}, 0),
    "YaRN, betas of 0": (64, 8192,
        {"rope_theta": 1e4, "factor": 2.0, "beta_fast": 0, "beta_slow": 0, **YARN}, 0),
    "YaRN, no length before": (64, 8192, {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0}, 0),
    "Llama 3, edges": (16, 8192, {"rope_theta": 16.0, "factor": 8.0, **LLAMA3,
        "original_max_position_embeddings": 8 * math.pi, "high_freq_factor": 4.0}, 0),
}  # fmt: skip


def theirs(head_dim: int, most: int, rope_parameters: dict[str, Any], length: int) -> Any:
    """The frequencies of transformers, float32, and the factor of cosine and sine."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = {"rope_type": "default", **rope_parameters}
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=most,
        rope_parameters=given,
    )
    if given["rope_type"] == "default":
        dims = int(head_dim * given.get("partial_rotary_factor", 1.0))
        steps = torch.arange(0, dims, 2, dtype=torch.int64).float() / dims
        return (1.0 / (given["rope_theta"] ** steps)).numpy(), 1.0
    found, factor = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, seq_len=length or None)
    return found.numpy(), factor


# Model -> frequencies of which torch's power in float32 is the next number on some machines. It differs
# between the vector instructions that torch finds, and is rounded correctly by none of them.
NEXT = {
    "Qwen2.5 7B", "Qwen2.5 1M, YaRN", "gpt-oss 20B", "Phi-3 mini 128k", "Phi-3 mini 128k, long",
    "Gemma 3 4B, full", "Phi-4 mini", "longrope, at its length",
}  # fmt: skip


def rounded_power(exponents: Any, base: float) -> Any:
    """`base ** exponents`, rounded correctly to float32."""
    of_base = torch.tensor(base, dtype=torch.float32).double()
    return (of_base ** exponents.double()).float()


@pytest.mark.parametrize("name", MODELS)
def test_frequencies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit those of transformers, with the powers that torch would round correctly."""
    head_dim, most, parameters, length = MODELS[name]
    config = {"max_position_embeddings": most, "rope_parameters": parameters}
    found = rope_frequencies(config, head_dim, length=length)
    ours = np.asarray(found.values, np.float32)
    np.testing.assert_array_max_ulp(ours, theirs(*MODELS[name])[0], maxulp=1 if name in NEXT else 0)
    monkeypatch.setattr(torch.Tensor, "__rpow__", rounded_power)
    expected, factor = theirs(*MODELS[name])
    assert found.factor == factor
    np.testing.assert_array_equal(ours, expected)
    older = {"max_position_embeddings": most, "rope_scaling": parameters}
    assert rope_frequencies(older, head_dim, length=length) == found
    assert hash(found) == hash(rope_frequencies(config, head_dim, length=length))


@pytest.mark.everyday(name=["gpt-oss 20B", "StableLM 2"])
@pytest.mark.parametrize("name", ["Llama 3.1 8B", "gpt-oss 20B", "StableLM 2", "Phi-4 mini"])
def test_rotation(name: str) -> None:
    head_dim, most, parameters, length = MODELS[name]
    config = {"max_position_embeddings": most, "rope_parameters": parameters}
    frequencies = rope_frequencies(config, head_dim, length=length)
    expected, factor = theirs(*MODELS[name])
    x = np.random.default_rng(0).normal(size=(2, 5, 3, head_dim)).astype(np.float32)
    angle = np.arange(5)[:, None] * expected.astype(np.float64)
    cos, sin = (factor * f(angle)[:, None] for f in (np.cos, np.sin))
    turned, rest = x[..., : 2 * len(expected)], x[..., 2 * len(expected) :]
    a, b = np.split(turned, 2, -1)
    want = np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)
    found = rope(x, np.arange(5), frequencies=frequencies)
    np.testing.assert_allclose(found, want, rtol=2e-6, atol=2e-6)


def test_sections_are_those_of_qwen2_vl() -> None:
    from transformers.models.qwen2_vl import modeling_qwen2_vl as theirs

    B, T, N, H, sections = 2, 7, 3, 32, (4, 6, 6)
    rng = np.random.default_rng(1)
    positions = rng.integers(0, 50, size=(3, B, T)).astype(np.int32)
    x = rng.normal(size=(B, T, N, H)).astype(np.float32)
    heads = torch.from_numpy(x).transpose(1, 2)
    config = theirs.Qwen2VLTextConfig(
        hidden_size=N * H,
        num_attention_heads=N,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections]},
    )
    angles = theirs.Qwen2VLRotaryEmbedding(config)(heads, torch.from_numpy(positions))
    expected, _ = theirs.apply_rotary_pos_emb(heads, heads, *angles)
    found = rope(x, positions, sections=sections)
    np.testing.assert_allclose(found, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"expected P=16 pairs in all"):
        rope(x, positions, sections=(4, 6, 5))


def test_names_of_gpt_neox() -> None:
    from transformers import GPTNeoXConfig

    config = {"rotary_emb_base": 500.0, "rotary_pct": 0.25}
    of_theirs = {"rope_parameters": GPTNeoXConfig(**config).rope_parameters}
    assert rope_frequencies(config, 16) == rope_frequencies(of_theirs, 16)
    assert rope_frequencies(config, 16).values == (1.0, float(np.float32(1 / 500**0.5)))


def test_a_part_of_the_head_is_rotated_alone() -> None:
    x = np.random.default_rng(2).normal(size=(2, 5, 3, 12)).astype(np.float32)
    found = rope(x, np.arange(5), rotary_dim=8)
    np.testing.assert_array_equal(found[..., :8], rope(x[..., :8].copy(), np.arange(5)))
    np.testing.assert_array_equal(found[..., 8:], x[..., 8:])
    frequencies = rope_frequencies({"partial_rotary_factor": 2 / 3}, 12)
    np.testing.assert_array_equal(found, rope(x, np.arange(5), frequencies=frequencies))


def test_wrong_configurations_are_refused() -> None:
    x = np.zeros((2, 5, 3, 12), np.float32)
    with pytest.raises(ValueError, match="rotary_dim and frequencies exclude each other"):
        rope(x, np.arange(5), rotary_dim=8, frequencies=rope_frequencies({}, 12))
    with pytest.raises(ValueError, match=r"H of at least rotary_dim=16, even"):
        rope(x, np.arange(5), rotary_dim=16)
    with pytest.raises(ValueError, match=r"rope type 'axial' is not known here"):
        rope_frequencies({"rope_type": "axial"}, 12)
    with pytest.raises(ValueError, match=r"parameters of the kind 'llama3' lack 'low_freq_factor'"):
        rope_frequencies({"rope_type": "llama3"}, 12)


@pytest.mark.parametrize("model_type", ["gptj", "codegen", "minimax_m2"])
def test_a_number_of_features_precedes_a_share_where_the_class_has_no_share(
    model_type: str,
) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    found = rotary_settings.frequencies({"rotary_dim": 6}, rope, model_type, 16)
    assert len(found.values) == (2 if model_type == "minimax_m2" else 3)
