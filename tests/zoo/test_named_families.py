"""The families that people convert most, each by name: right, and back bit by bit."""

from typing import Any

import pytest

from tests.zoo import one, overrides

_V1 = {
    "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False,
    "type_vocab_size": 0,
}  # fmt: skip
_V3 = _V1 | {"position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True}
_FALCONS = (
    {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
    {"new_decoder_architecture": True, "num_attention_heads": 8, "num_kv_heads": 2, "alibi": False},
    {"new_decoder_architecture": False, "multi_query": False, "num_attention_heads": 8, "num_kv_heads": 8, "alibi": True, "bias": True,
     "parallel_attn": False},
)  # fmt: skip
# Name -> model type, and settings over the tiny configuration of the zoo.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi-2": ("phi", {"partial_rotary_factor": 0.4, "qk_layernorm": False}),
    "Phi-4": ("phi3", {"num_key_value_heads": 2}),
    "Falcon 7B": ("falcon", _FALCONS[0]),
    "Falcon 40B": ("falcon", _FALCONS[1]),
    "Falcon RW": ("falcon", _FALCONS[2]),
    "DeBERTa v1": ("deberta", _V1),
    "DeBERTa v2": ("deberta-v2", _V3 | {"share_att_key": False}),
    "DeBERTa v3": ("deberta-v2", _V3),
}
TYPES = (
    "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "phi", "phi3", "phimoe",
    "olmo2", "mistral", "mixtral", "llama4_text", "llama4", "deepseek_v2", "deepseek_v3", "mpt",
    "bloom", "gptj", "starcoder2", "cohere", "granite", "t5", "whisper", "bart", "pegasus",
    "marian", "bert", "roberta", "electra", "albert", "distilbert", "modernbert", "xlm", "roformer",
    "vit", "dinov2", "dinov3_vit", "siglip", "clip", "blip", "swin", "sam", "wav2vec2", "hubert",
    "wav2vec2-conformer", "wav2vec2-bert",
)  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in TYPES} | VARIANTS


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_named_family_is_right_in_both_directions(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, given = FAMILIES[family]
    settings = overrides.SETTINGS.get(model_type, {}) | given
    monkeypatch.setitem(overrides.SETTINGS, model_type, settings)
    found = one.check(model_type)
    assert found["class"] == "right", found
    assert all(block["ran"] for block in found["blocks"]), found
    assert (found["back"], bool(found["to"])) == ("same", True), found
