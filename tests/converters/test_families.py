"""Whole models of known families: every tensor is understood, moves to Flax and Keras, and back."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters.discovery import attention_blocks, family_keymaps, other_layers
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


# Attention blocks, layers next to them by kind, and what keeps its name.
MODELS: dict[str, tuple[Any, str, int, dict[str, int], set[str]]] = {
    "BERT": (
        hugging_face, "bert", 1, {"linear": 6, "norm": 4, "embedding": 3},
        {"cls.predictions.bias"},
    ),
    "RoBERTa": (hugging_face, "bert", 1, {"linear": 4, "norm": 4, "embedding": 3}, {"lm_head.bias"}),
    "GPT-2": (
        hugging_face, "gpt2", 1, {"conv1d": 2, "linear": 1, "norm": 3, "embedding": 2}, set()
    ),
    "Llama": (hugging_face, "llama", 1, {"linear": 4, "rmsnorm": 3, "embedding": 1}, set()),
    "ViT": (
        hugging_face, "llama", 1, {"linear": 3, "norm": 3, "convolution": 1},
        {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"},
    ),
    "CLIP": (
        hugging_face, "linear", 2,
        {"linear": 6, "norm": 7, "embedding": 3, "convolution": 1},
        {"logit_scale", "vision_model.embeddings.class_embedding"},
    ),
    "GPT-NeoX": (hugging_face, "gpt-neox", 1, {"linear": 3, "norm": 3, "embedding": 1}, set()),
    "BLOOM": (hugging_face, "gpt-neox", 1, {"linear": 3, "norm": 4, "embedding": 1}, set()),
    "BART": (
        hugging_face, "linear", 3, {"linear": 5, "norm": 7, "embedding": 5}, {"final_logits_bias"}
    ),
    "OPT": (hugging_face, "linear", 1, {"linear": 5, "norm": 3, "embedding": 2}, set()),
    "TransformerEncoderLayer": (torch_model, "torch", 1, {"linear": 2, "norm": 2}, set()),
    "TransformerDecoderLayer": (torch_model, "torch", 2, {"linear": 2, "norm": 3}, set()),
    "TransformerEncoder": (torch_model, "torch", 2, {"linear": 4, "norm": 5}, set()),
    "TransformerDecoder": (torch_model, "torch", 4, {"linear": 4, "norm": 6}, set()),
    "Transformer": (torch_model, "torch", 3, {"linear": 4, "norm": 7}, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_is_understood_and_comes_back(name: str) -> None:
    maker, layout, attention, kinds, bare = MODELS[name]
    state = maker(name)
    found = attention_blocks.find({key: array.shape for key, array in state.items()})
    assert [block.layout.name for block in found] == [layout] * attention
    layers, others = other_layers.find(state, found)
    assert Counter(module.kind for module in layers) == kinds
    assert others.keys() == bare
    if not name.endswith("Layer"):  # a layer alone has no place
        assert {module.confidence for module in layers} == {"certain"}
    heads: dict[str, Any] = {"num_heads": N}
    for to in ("flax", "keras", "haiku"):
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


def test_all_of_whisper_but_its_convolutions_over_time() -> None:
    state = hugging_face("Whisper")
    found = attention_blocks.find({key: array.shape for key, array in state.items()})
    layers, others = other_layers.find(state, found)
    assert {module.confidence for module in layers} == {"certain"}
    assert Counter(module.kind for module in layers) == {"linear": 5, "norm": 7, "embedding": 3}
    convolutions = {f"model.encoder.conv{i}.{key}" for i in (1, 2) for key in ("weight", "bias")}
    assert others.keys() == convolutions


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
