"""The families that people convert most, each by name: right, and back bit by bit."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from tests.zoo import one, overrides


class Named(NamedTuple):
    """A family: its model type, and settings over the tiny configuration of the zoo."""

    name: str
    model_type: str
    settings: Mapping[str, Any] = MappingProxyType({})


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
FAMILIES = (
    Named("Qwen2", "qwen2"),
    Named("Qwen3", "qwen3"),
    Named("Qwen3-MoE", "qwen3_moe"),
    Named("Gemma 2", "gemma2"),
    Named("Gemma 3", "gemma3_text"),
    Named("gpt-oss", "gpt_oss"),
    Named("Phi-1, 1.5", "phi"),
    Named("Phi-2", "phi", {"partial_rotary_factor": 0.4, "qk_layernorm": False}),
    Named("Phi-3", "phi3"),
    Named("Phi-3.5-MoE", "phimoe"),
    Named("Phi-4", "phi3", {"num_key_value_heads": 2}),
    Named("OLMo 2", "olmo2"),
    Named("Mistral", "mistral"),
    Named("Mixtral", "mixtral"),
    Named("Llama 4", "llama4_text"),
    Named("Llama 4 with images", "llama4"),
    Named("DeepSeek-V2", "deepseek_v2"),
    Named("DeepSeek-V3", "deepseek_v3"),
    Named("Falcon 7B", "falcon", _FALCONS[0]),
    Named("Falcon 40B", "falcon", _FALCONS[1]),
    Named("Falcon RW", "falcon", _FALCONS[2]),
    Named("MPT", "mpt"),
    Named("BLOOM", "bloom"),
    Named("GPT-J", "gptj"),
    Named("StarCoder2", "starcoder2"),
    Named("Cohere", "cohere"),
    Named("Granite", "granite"),
    Named("T5", "t5"),
    Named("Whisper", "whisper"),
    Named("BART", "bart"),
    Named("Pegasus", "pegasus"),
    Named("MarianMT", "marian"),
    Named("BERT", "bert"),
    Named("RoBERTa", "roberta"),
    Named("ELECTRA", "electra"),
    Named("ALBERT", "albert"),
    Named("DeBERTa v1", "deberta", _V1),
    Named("DeBERTa v2", "deberta-v2", _V3 | {"share_att_key": False}),
    Named("DeBERTa v3", "deberta-v2", _V3),
    Named("DistilBERT", "distilbert"),
    Named("ModernBERT", "modernbert"),
    Named("XLM", "xlm"),
    Named("RoFormer", "roformer"),
    Named("ViT", "vit"),
    Named("DINOv2", "dinov2"),
    Named("DINOv3", "dinov3_vit"),
    Named("SigLIP", "siglip"),
    Named("CLIP", "clip"),
    Named("BLIP", "blip"),
    Named("Swin", "swin"),
    Named("SAM", "sam"),
    Named("wav2vec 2", "wav2vec2"),
    Named("HuBERT", "hubert"),
    Named("Conformer of wav2vec 2", "wav2vec2-conformer"),
    Named("Conformer of w2v-BERT", "wav2vec2-bert"),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_named_family_is_right_in_both_directions(
    family: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = overrides.SETTINGS.get(family.model_type, {}) | dict(family.settings)
    monkeypatch.setitem(overrides.SETTINGS, family.model_type, settings)
    found = one.check(family.model_type)
    assert found["class"] == "right", found
    assert all(block["ran"] for block in found["blocks"]), found
    assert (found["back"], bool(found["to"])) == ("same", True), found
