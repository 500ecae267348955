"""Whole models of known families: every tensor is understood, moves to Flax and Keras, and back."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters.discovery import (
    attention_blocks,
    damaged_blocks,
    family_keymaps,
    other_layers,
)
from jaxmha.converters.discovery.model_families import FAMILIES
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.migrate import pipeline

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning", "ignore:enable_nested_tensor:UserWarning"
)
N, D = 3, 15  # D is no multiple of anything else here


def state_of(model: Any) -> dict[str, NDArray]:
    """A state dict of random numbers, norms included."""
    rng = np.random.default_rng(0)
    found = {name: to_numpy(tensor) for name, tensor in model.state_dict().items()}
    return {
        name: np.asarray(rng.normal(size=array.shape), array.dtype)
        if array.dtype.kind == "f"
        else array
        for name, array in found.items()
    }


def hugging_face(name: str) -> dict[str, NDArray]:
    """A tiny model of a family."""
    import transformers as t

    sizes: dict[str, Any] = {
        "hidden_size": D,
        "num_attention_heads": N,
        "num_hidden_layers": 1,
        "intermediate_size": 22,
    }
    vision = {**sizes, "image_size": 8, "patch_size": 4}
    text = {**sizes, "vocab_size": 31}
    gpt2 = {"n_embd": D, "n_head": N, "n_layer": 1, "vocab_size": 31, "n_positions": 10}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    special = {"pad_token_id": 0, **tokens, "decoder_start_token_id": 1}
    both = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in (("layers", 1), ("attention_heads", N), ("ffn_dim", 22))
    } | {"vocab_size": 31, "max_position_embeddings": 10}
    models: dict[str, Any] = {
        "GPT-NeoX": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**text)),
        "BLOOM": lambda: t.BloomForCausalLM(
            t.BloomConfig(hidden_size=D, n_head=N, n_layer=1, vocab_size=31)
        ),
        # its positions are sines and cosines, so that the width is even
        "Whisper": lambda: t.WhisperForConditionalGeneration(
            t.WhisperConfig(d_model=18, num_mel_bins=7, **both, **special)
        ),
        "BART": lambda: t.BartForConditionalGeneration(t.BartConfig(d_model=D, **both, **special)),
        "OPT": lambda: t.OPTForCausalLM(
            t.OPTConfig(
                **text, ffn_dim=22, max_position_embeddings=10, word_embed_proj_dim=7, **special
            )
        ),
        "T5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(d_model=D, num_heads=N, d_kv=5, num_layers=1, d_ff=22, vocab_size=31)
        ),
        "old Falcon": lambda: t.FalconModel(
            t.FalconConfig(**text | {"hidden_size": 18}, multi_query=False, bias=True)
        ),
        "BERT": lambda: t.BertForPreTraining(t.BertConfig(**text)),
        "RoBERTa": lambda: t.RobertaForMaskedLM(t.RobertaConfig(**text)),
        "GPT-2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt2, **tokens)),
        "Llama": lambda: t.LlamaForCausalLM(
            t.LlamaConfig(**text | {"hidden_size": 12, "num_key_value_heads": 1})
        ),
        "ViT": lambda: t.ViTForImageClassification(t.ViTConfig(**vision)),
        "CLIP": lambda: t.CLIPModel(
            t.CLIPConfig(text_config={**text, **tokens}, vision_config=vision)
        ),
    }
    return state_of(models[name]())


def torch_model(name: str) -> dict[str, NDArray]:
    """A whole stock transformer, or one of its layers or stacks."""
    import torch

    sizes: dict[str, Any] = {"d_model": D, "nhead": N, "dim_feedforward": 22}
    layer = torch.nn.TransformerEncoderLayer(**sizes)
    cross = torch.nn.TransformerDecoderLayer(**sizes)
    models: dict[str, Any] = {
        "TransformerEncoderLayer": lambda: layer,
        "TransformerDecoderLayer": lambda: cross,
        "TransformerEncoder": lambda: torch.nn.TransformerEncoder(
            layer, 2, torch.nn.LayerNorm(D), enable_nested_tensor=False
        ),
        "TransformerDecoder": lambda: torch.nn.TransformerDecoder(cross, 2),
        "Transformer": lambda: torch.nn.Transformer(
            D, N, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=22, batch_first=True
        ),
    }
    return state_of(models[name]())


# Layout, family, blocks by pattern, layers next to them by kind, and what keeps its name.
MODELS = {
    "BERT": ("bert", "BERT", "1 encoder.layer.{i}.attention", "6 linear 4 norm 3 embedding",
             "cls.predictions.bias"),
    "RoBERTa": ("bert", "BERT", "1 encoder.layer.{i}.attention", "4 linear 4 norm 3 embedding",
                "lm_head.bias"),
    "GPT-2": ("gpt2", "GPT-2", "1 h.{i}.attn", "2 conv1d 1 linear 3 norm 2 embedding", ""),
    "Llama": ("llama", "Llama", "1 layers.{i}.self_attn", "4 linear 3 rmsnorm 1 embedding", ""),
    "ViT": ("llama", "ViT (transformers 5)", "1 layers.{i}.attention",
            "3 linear 3 norm 1 convolution",
            "vit.embeddings.cls_token vit.embeddings.position_embeddings"),
    "CLIP": ("linear", "CLIP",
             "1 text_model.encoder.layers.{i}.self_attn 1 vision_model.encoder.layers.{i}.self_attn",
             "6 linear 7 norm 3 embedding 1 convolution",
             "logit_scale vision_model.embeddings.class_embedding"),
    "GPT-NeoX": ("gpt-neox", "GPT-NeoX", "1 layers.{i}.attention", "3 linear 3 norm 1 embedding", ""),
    "BLOOM": ("gpt-neox", "BLOOM", "1 h.{i}.self_attention", "3 linear 4 norm 1 embedding", ""),
    "old Falcon": ("gpt-neox", "BLOOM", "1 h.{i}.self_attention", "2 linear 2 norm 1 embedding", ""),
    "BART": ("linear", "BART, OPT", "1 layers.{i}.encoder_attn 2 layers.{i}.self_attn",
             "5 linear 7 norm 5 embedding", "final_logits_bias"),
    "OPT": ("linear", "BART, OPT", "1 layers.{i}.self_attn", "5 linear 3 norm 2 embedding", ""),
    "T5": ("t5", "T5", "1 block.{i}.layer.{i}.EncDecAttention 2 block.{i}.layer.{i}.SelfAttention",
           "5 linear 7 rmsnorm 3 embedding",
           ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight "
            "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight")),
    "Whisper": ("whisper", "Whisper", "1 layers.{i}.encoder_attn 2 layers.{i}.self_attn",
                "5 linear 7 norm 3 embedding",  # convolutions over time are not known
                ("model.encoder.conv1.weight model.encoder.conv1.bias "
                 "model.encoder.conv2.weight model.encoder.conv2.bias")),
    "TransformerEncoderLayer": ("torch", None, "1 None", "2 linear 2 norm", ""),
    "TransformerDecoderLayer": ("torch", None, "2 None", "2 linear 3 norm", ""),
    "TransformerEncoder": ("torch", "nn.Transformer", "2 layers.{i}.self_attn",
                           "4 linear 5 norm", ""),
    "TransformerDecoder": ("torch", "nn.Transformer",
                           "2 layers.{i}.multihead_attn 2 layers.{i}.self_attn",
                           "4 linear 6 norm", ""),
    "Transformer": ("torch", "nn.Transformer",
                    "1 layers.{i}.multihead_attn 2 layers.{i}.self_attn", "4 linear 7 norm", ""),
}  # fmt: skip


def counts(text: str) -> dict[str, int]:
    """The number before each name."""
    parts = text.split()
    return dict(zip(parts[1::2], map(int, parts[::2]), strict=True))


@pytest.mark.slow_variants("keras-*", "haiku-*", "*-Transformer*", "!flax-Transformer", "!*-BERT")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("to", ["flax", "keras", "haiku"])
def test_every_tensor_is_understood_and_comes_back(name: str, to: str) -> None:
    layout, family, patterns, kinds, left = MODELS[name]
    state = (torch_model if layout == "torch" else hugging_face)(name)
    shapes, bare = {key: array.shape for key, array in state.items()}, set(left.split())
    found = attention_blocks.find(shapes)
    assert {block.layout.name for block in found} == {layout}
    assert {block.family and block.family[0] for block in found} == {family}
    assert Counter(str(block.family and block.family[1]) for block in found) == counts(patterns)
    assert not any(block.unknown or block.also for block in found)
    assert damaged_blocks.describe(shapes, found) == []
    layers, others = other_layers.find(state, found)
    assert Counter(module.kind for module in layers) == counts(kinds)
    assert others.keys() == bare
    if family is not None:  # a layer alone has no place
        assert {module.confidence for module in layers} == {"certain"}
    if name in ("T5", "Whisper"):  # the targets hold neither that scale nor a key without a bias
        for block in found:
            block.read(state, N)
        return
    heads: dict[str, Any] = {"num_heads": N}
    if (name, to) in (("Llama", "haiku"), ("Llama", "keras")):
        to = "keras-gqa"  # fewer key/value heads than these hold
    moved = pipeline.convert_state(state, to=to, **heads)
    assert not any("weight" in key for key in moved.keys() - bare)
    stored: dict[str, Any] = {} if attention_blocks.named(to).stores_num_heads else heads
    back = pipeline.convert_state(moved, to=layout, **stored)
    assert back.keys() == state.keys()
    for key, array in state.items():
        assert (back[key].shape, back[key].dtype) == (array.shape, array.dtype), key
        assert back[key].tobytes() == array.tobytes(), key


def test_conv1d_is_not_transposed_and_linear_is() -> None:
    state = hugging_face("GPT-2")
    moved = pipeline.convert_state(state, to="flax", num_heads=N)
    mlp, head = "transformer.h.0.mlp.c_fc", "lm_head"
    np.testing.assert_array_equal(moved[f"{mlp.replace('.', '/')}/kernel"], state[f"{mlp}.weight"])
    np.testing.assert_array_equal(moved[f"{head}/kernel"], state[f"{head}.weight"].T)
    # as a file of plain linear layers, where nothing is a Conv1D
    plain = pipeline.convert_state(state, to="linear", num_heads=N)
    np.testing.assert_array_equal(plain[f"{mlp}.weight"], state[f"{mlp}.weight"].T)


def test_the_head_of_gpt_neox_is_no_embedding() -> None:
    """Older files call it embed_out."""
    state = hugging_face("GPT-NeoX")
    state = {name.replace("lm_head", "embed_out"): array for name, array in state.items()}
    moved = pipeline.convert_state(state, to="flax", num_heads=N)
    np.testing.assert_array_equal(moved["embed_out/kernel"], state["embed_out.weight"].T)


def test_every_map_is_of_a_known_family() -> None:
    assert {keymap.family for keymap in family_keymaps.KEYMAPS} <= {
        family.name for family in FAMILIES
    }


def test_stock_keras_loads_a_whole_layer(tmp_path: Path) -> None:
    """Keras numbers the groups of a file by class, in the order of the model's layers."""
    import keras

    state = torch_model("TransformerEncoderLayer")
    source, target = tmp_path / "layer.npz", tmp_path / "layer.weights.h5"
    checkpoint.write(source, {f"layers.0.{name}": array for name, array in state.items()})
    pipeline.convert(source, target, to="keras", num_heads=N)
    norms = [keras.layers.LayerNormalization(epsilon=1e-5) for _ in range(2)]
    linears = keras.layers.Dense(22, "relu"), keras.layers.Dense(D)
    inputs = keras.Input((7, D))
    x = norms[0](inputs + keras.layers.MultiHeadAttention(N, D // N)(inputs, inputs))
    model = keras.Model(inputs, norms[1](x + linears[1](linears[0](x))))
    model.load_weights(target)
    for name, layer in zip(
        ("norm1", "norm2", "linear1", "linear2"), (*norms, *linears), strict=True
    ):
        for key, weight in zip(("weight", "bias"), layer.weights, strict=True):
            np.testing.assert_array_equal(to_numpy(weight), state[f"{name}.{key}"].T, err_msg=name)
