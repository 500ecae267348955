"""Blocks of live models of transformers are found, each by its family, and read."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters.discovery import attention_blocks, damaged_blocks
from jaxmha.converters.layout.arrays import to_numpy
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import comparison
from tests.converters.test_blocks import Shapes

SOME = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2}
TEXT = {**SOME, "intermediate_size": 8, "vocab_size": 11}
IMAGE = {**SOME, "intermediate_size": 8, "image_size": 8, "patch_size": 4}
IDS = {"bos_token_id": 0, "eos_token_id": 1}
WHISPER = {"d_model": 12, "encoder_attention_heads": 3, "decoder_attention_heads": 3, **IDS,
           "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8,
           "vocab_size": 11, "pad_token_id": 0}  # fmt: skip
T5 = {"d_model": 12, "num_heads": 3, "d_kv": 4, "num_layers": 2, "d_ff": 8, "vocab_size": 11}
TOWER = "_model.encoder.layers.{i}.self_attn"
# transformers' class, its configuration, and what is to be found: layout, family, pattern, count.
LIVE: dict[str, tuple[str, str, dict[str, Any], list[tuple[str, str, str, int]]]] = {
    "bert": ("BertModel", "BertConfig", TEXT, [("bert", "BERT", "encoder.layer.{i}.attention", 2)]),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config",
             {"n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 11, **IDS},
             [("gpt2", "GPT-2", "h.{i}.attn", 2)]),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**TEXT, "num_key_value_heads": 3},
              [("llama", "Llama", "layers.{i}.self_attn", 2)]),
    "clip": ("CLIPModel", "CLIPConfig",
             {"text_config": TEXT | IDS, "vision_config": IMAGE, "projection_dim": 8},
             [("linear", "CLIP", f"{tower}{TOWER}", 2) for tower in ("text", "vision")]),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5,
           [("t5", "T5", "block.{i}.layer.{i}.EncDecAttention", 2),
            ("t5", "T5", "block.{i}.layer.{i}.SelfAttention", 4)]),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT,
                 [("gpt-neox", "GPT-NeoX", "layers.{i}.attention", 2)]),
    "whisper": ("WhisperModel", "WhisperConfig", WHISPER,
                [("whisper", "Whisper", "layers.{i}.encoder_attn", 2),
                 ("whisper", "Whisper", "layers.{i}.self_attn", 4)]),
    "falcon old": ("FalconModel", "FalconConfig", {**TEXT, "multi_query": False, "bias": True},
                   [("gpt-neox", "BLOOM", "h.{i}.self_attention", 2)]),
    "vit": ("ViTModel", "ViTConfig", IMAGE,
            [("llama", "ViT (transformers 5)", "layers.{i}.attention", 2)]),
}  # fmt: skip


@pytest.mark.filterwarnings("default")  # transformers' own
@pytest.mark.parametrize("name", LIVE)
def test_live_models_of_transformers(name: str) -> None:
    import transformers

    model, config, options, expected = LIVE[name]
    made = getattr(transformers, config)(**options)
    state = getattr(transformers, model)(made).state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    found = attention_blocks.find(shapes)
    seen: dict[tuple[str, ...], int] = {}
    for block in found:
        assert block.family is not None, block
        assert not block.unknown
        assert not block.also
        block.read(state, 3)  # every array of it fits
        row = (block.layout.name, *block.family)
        seen[row] = seen.get(row, 0) + 1
    assert sorted((*row, count) for row, count in seen.items()) == sorted(expected)
    assert damaged_blocks.describe(shapes, found) == []


@pytest.mark.filterwarnings("default")
def test_families_that_need_their_configuration_are_refused_by_name(tmp_path: Path) -> None:
    """The configuration of Gemma 2 says how its blocks compute."""
    import transformers as t

    some = {"hidden_size": 12, "num_attention_heads": 3, "num_hidden_layers": 2, "vocab_size": 11}
    gemma = {**some, "num_key_value_heads": 1, "head_dim": 4, "intermediate_size": 8}
    model = t.Gemma2ForCausalLM(t.Gemma2Config(**gemma))
    reason = r"its scale \(query_pre_attn_scalar \*\* -0.5\) and soft cap"
    state = {key: to_numpy(tensor) for key, tensor in model.state_dict().items()}
    shapes: Shapes = {key: array.shape for key, array in state.items()}
    found = attention_blocks.find(shapes)
    assert [block.family and block.family[0] for block in found] == ["Gemma 2"] * 2
    message = rf"layers\.0\.self_attn is of Gemma 2: .*{reason}"
    with pytest.raises(ValueError, match=message):
        found[0].read(state, 3)
    assert re.search(message, damaged_blocks.describe(shapes, found)[0])
    checkpoint.write(tmp_path / "a.npz", state)
    with pytest.raises(ValueError, match=message):
        pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="flax", num_heads=3)
    with pytest.raises(ValueError, match=message):
        comparison.compare(tmp_path / "a.npz", tmp_path / "a.npz", num_heads=3)
    assert re.search(message, pipeline.inspect(tmp_path / "a.npz", num_heads=3).damaged[0])


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("keys", [1, 3])
def test_every_packing_of_falcon_is_read(keys: int) -> None:
    """One head of keys, and groups of queries with a key and a value each."""
    import transformers as t

    grouped = {"new_decoder_architecture": True, "num_kv_heads": keys} if keys > 1 else {}
    heads = 6
    model = t.FalconForCausalLM(
        t.FalconConfig(
            hidden_size=24, num_attention_heads=heads, num_hidden_layers=1, vocab_size=20, **grouped
        )
    )
    state = {key: to_numpy(tensor) for key, tensor in model.state_dict().items()}
    (block,) = attention_blocks.find({key: array.shape for key, array in state.items()})
    assert block.family == ("Falcon", "h.{i}.self_attention")
    params, _ = block.read(state, heads)
    packed = model.transformer.h[0].self_attention.query_key_value.weight
    theirs = model.transformer.h[0].self_attention._split_heads(packed.T[None])
    for mine, other in zip(params[:3], theirs, strict=True):
        width = np.shape(mine.kernel)[1]
        given = to_numpy(other.detach())[0].reshape(24, -1, 4)
        given = given[:, :: given.shape[1] // width]  # Falcon repeats a head for its queries
        np.testing.assert_array_equal(mine.kernel, given)
