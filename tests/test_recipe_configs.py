"""Configurations of recipes: every key is computed as transformers computes it, or refused."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from experiments.recipes import bert, gemma, gpt2, llama, t5, vit, whisper
from jaxmha.checkpoint import hub
from tests.drawn import to_jax
from tests.test_recipes import GROUPED, SIZES, close, forward, loaded, output, theirs, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.usefixtures("implicit_promotion"),
]
GPT2 = {"vocab_size": 101, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 11}
GEMMA = GROUPED | {"sliding_window": 5, "query_pre_attn_scalar": 13, "pad_token_id": 0}
VIT = {name: x for name, x in SIZES.items() if name != "vocab_size"} | {"num_labels": 5}
T5 = {"vocab_size": 101, "d_model": 12, "d_kv": 5, "d_ff": 17, "num_layers": 2, "num_heads": 3}
SIDES = {"layers": 1, "attention_heads": 3, "ffn_dim": 17}
WHISPER: dict[str, Any] = {"vocab_size": 101, "num_mel_bins": 7, "d_model": 12}
WHISPER |= {"max_source_positions": 13, "max_target_positions": 11, "decoder_start_token_id": 1}
WHISPER |= {f"{side}_{x}": n for side in ("encoder", "decoder") for x, n in SIDES.items()}
WHISPER |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
# Keys without influence on the outputs of a trained model, or of the parts that recipes have.
INERT = frozenset((
    "architectures", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop",
    "bos_token_id", "chunk_size_feed_forward", "classifier_dropout", "dropout_rate", "dtype",
    "embd_pdrop", "encoder_stride", "eos_token_id", "hidden_dropout_prob", "id2label",
    "initializer_factor", "initializer_range", "is_encoder_decoder", "label2id",
    "output_attentions", "output_hidden_states", "pad_token_id", "pooler_act",
    "pooler_output_size", "pretraining_tp", "problem_type", "reorder_and_upcast_attn",
    "resid_pdrop", "return_dict", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "transformers_version",
    "use_cache",
))  # fmt: skip
WHISPERS = frozenset((
    "activation_dropout", "apply_spec_augment", "begin_suppress_tokens", "classifier_proj_size",
    "decoder_layerdrop", "decoder_start_token_id", "dropout", "encoder_layerdrop", "init_std",
    "mask_feature_length", "mask_feature_min_masks", "mask_feature_prob", "mask_time_length",
    "mask_time_min_masks", "mask_time_prob", "median_filter_width", "scale_embedding",
    "suppress_tokens", "use_weighted_layer_sum",
))  # fmt: skip
ROTARY = {"max_position_embeddings", "rope_parameters"}
# Configuration class -> its recipe, and the keys that the recipe reads by other names, or that
# transformers does not read in this model.
KEYS: dict[str, tuple[ModuleType, frozenset[str] | set[str]]] = {
    "Llama": (llama, ROTARY),
    "Mistral": (llama, ROTARY | {"sliding_window"}),
    "Qwen3": (
        llama,
        ROTARY | {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"},
    ),
    "Gemma3Text": (gemma, ROTARY | {"_sliding_window_pattern", "attn_logit_softcapping"}),
    "Bert": (bert, {"add_cross_attention", "tie_word_embeddings"}),
    "GPT2": (gpt2, frozenset()),
    "T5": (t5, {"is_decoder", "dense_act_fn"}),
    "MT5": (t5, {"is_decoder", "dense_act_fn"}),
    "ViT": (vit, frozenset()),
    "Whisper": (whisper, WHISPERS),
}
# Configuration class -> a value of every key that its recipe refuses.
REFUSED: dict[str, dict[str, Any]] = {
    "Llama": {
        "hidden_act": "relu",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    },
    "Mistral": {"hidden_act": "gelu"},
    "Qwen3": {"hidden_act": "gelu_new"},
    "Gemma3Text": {
        "hidden_activation": "relu",
        "tie_word_embeddings": False,
        "use_bidirectional_attention": True,
    },
    "Bert": {"hidden_act": "gelu_new", "is_decoder": True, "position_embedding_type": "relative"},
    "GPT2": {
        "activation_function": "relu",
        "add_cross_attention": True,
        "scale_attn_by_inverse_layer_idx": True,
        "scale_attn_weights": False,
        "tie_word_embeddings": False,
    },
    "T5": {"feed_forward_proj": "gated-silu"},
    "ViT": {"hidden_act": "gelu_new"},
    "Whisper": {"activation_function": "relu", "tie_word_embeddings": False},
}


def saved(kind: str, folder: Path, **settings: Any) -> Path:
    getattr(transformers, f"{kind}Config")(**settings).save_pretrained(folder)
    return folder


def traced(
    recipe: ModuleType, name: str, folder: Path, run: Callable[[nnx.Module], jax.Array]
) -> jax.ShapeDtypeStruct:
    """The shape of what a model of a recipe returns; nothing is computed or compiled."""
    config = recipe.Config.read(folder)
    shape: jax.ShapeDtypeStruct = nnx.eval_shape(
        lambda: run(getattr(recipe, name)(config, nnx.Rngs(0)))
    )
    return shape


@pytest.mark.parametrize("kind", KEYS)
def test_every_key_of_transformers_is_known(kind: str) -> None:
    recipe, others = KEYS[kind]
    keys = set(getattr(transformers, f"{kind}Config")().to_dict()) - {"model_type", "_name_or_path"}
    known = recipe.Config.__dataclass_fields__.keys() | recipe.ACCEPTED.keys() | others | INERT
    assert keys <= known


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, keys in REFUSED.items() for key in keys]
)
def test_other_computations_are_refused(kind: str, key: str, tmp_path: Path) -> None:
    saved(kind, tmp_path, **{key: REFUSED[kind][key]})
    with pytest.raises(ValueError, match="length" if key == "rope_parameters" else key):
        KEYS[kind][0].Config.read(tmp_path)


def test_every_accepted_key_has_a_refused_value() -> None:
    for recipe in (bert, gemma, gpt2, llama, t5, vit, whisper):
        refused = {key for kind in REFUSED if KEYS[kind][0] is recipe for key in REFUSED[kind]}
        assert recipe.ACCEPTED.keys() - {"partial_rotary_factor"} <= refused


# Decoders: recipe, class, and settings that the recipe computes.
COMPUTED: dict[str, tuple[ModuleType, str, dict[str, Any]]] = {
    "llama biases": (llama, "Llama", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "mistral of one window": (llama, "Mistral", GROUPED | {"sliding_window": 5}),
    "llama of one block": (llama, "Llama", GROUPED | {"num_hidden_layers": 1}),
    "llama swish": (llama, "Llama", GROUPED | {"hidden_act": "swish"}),
    "qwen3 biases": (llama, "Qwen3", GROUPED | {"attention_bias": True, "mlp_bias": True}),
    "mistral without biases": (llama, "Mistral", GROUPED | {"attention_bias": True}),
    "gemma": (
        gemma,
        "Gemma3",
        GEMMA
        | {"final_logit_softcapping": 2.0, "attention_bias": True, "attn_logit_softcapping": 2.0},
    ),
    "gemma of one block": (gemma, "Gemma3", GEMMA | {"num_hidden_layers": 1}),
    "gpt2 of one block": (
        gpt2,
        "GPT2",
        GPT2 | {"n_layer": 1, "activation_function": "gelu_pytorch_tanh"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPUTED)
def test_computed_settings(name: str, tmp_path: Path) -> None:
    recipe, kind, sizes = COMPUTED[name]
    model = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = theirs(model, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config", **sizes)
    own = loaded(recipe.load, model, tmp_path)
    prompt = tokens(2, 7)
    close(forward(own, prompt), output(model, input_ids=prompt).logits)
    found = recipe.generate(own, to_jax(prompt), 2)  # fewer than there are in a window
    both = np.concatenate([prompt, found[:, :1]], 1)
    np.testing.assert_array_equal(found, own(to_jax(both))[:, -2:].argmax(-1))


def test_gemma_of_transformers_4(tmp_path: Path) -> None:
    """One base per kind of layer, and every second layer attends all tokens."""
    sizes = GEMMA | {"final_logit_softcapping": 2.0, "attention_bias": True}
    model = theirs("Gemma3ForCausalLM", "Gemma3TextConfig", **sizes)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key in ("rope_parameters", "layer_types", "_sliding_window_pattern"):
        config.pop(key)
    config |= {"rope_theta": 5000.0, "rope_local_base_freq": 100.0, "sliding_window_pattern": 2}
    config["rope_scaling"] = {"rope_type": "linear", "factor": 3.0}
    path.write_text(json.dumps(config))
    model = transformers.Gemma3ForCausalLM.from_pretrained(tmp_path).eval()
    prompt = tokens(2, 7)
    own = gemma.load(tmp_path)
    want = output(model, input_ids=prompt).logits
    close(forward(own, prompt), want)
    best = want[:, -1:].argmax(-1).numpy()
    after = output(model, input_ids=np.concatenate([prompt, best], 1)).logits[:, -1:].argmax(-1)
    found = gemma.generate(own, to_jax(prompt), 2)
    np.testing.assert_array_equal(found, np.concatenate([best, after.numpy()], 1))


@pytest.mark.slow
def test_vit_of_images_that_are_not_square(tmp_path: Path) -> None:
    sizes = VIT | {"image_size": [12, 20], "patch_size": [4, 5]}
    model = theirs("ViTForImageClassification", "ViTConfig", **sizes)
    images = np.random.default_rng(0).standard_normal((2, 3, 12, 20)).astype("f")
    ours = loaded(vit.load, model, tmp_path)(to_jax(images.transpose(0, 2, 3, 1)))
    close(ours, output(model, pixel_values=images).logits)


@pytest.mark.slow
@pytest.mark.parametrize(("encoder", "decoder"), [(2, 1), (1, 2), (1, 1)])
def test_t5_of_few_blocks(encoder: int, decoder: int, tmp_path: Path) -> None:
    """Files of the first T5 also have biases of cross-attention, which transformers ignores."""
    sizes = T5 | {"num_layers": encoder, "num_decoder_layers": decoder}
    model = theirs("T5ForConditionalGeneration", "T5Config", **sizes, decoder_start_token_id=0)
    state = model.state_dict()
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    model.save_pretrained(tmp_path, state_dict=state | {name: torch.ones(32, 3)})
    source, target = tokens(2, 7), tokens(2, 5)
    want = output(model, input_ids=source, decoder_input_ids=target).logits
    close(t5.load(tmp_path)(to_jax(source), to_jax(target)), want)


@pytest.mark.slow
def test_t5_with_a_head_that_its_config_calls_tied(tmp_path: Path) -> None:
    """transformers 5 ties the head of T5 1.1 in the config, and not where the file has its own."""
    sizes = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    model = theirs("T5ForConditionalGeneration", "T5Config", **sizes)
    state = model.state_dict()
    state["lm_head.weight"] = state["shared.weight"] * 2
    model.save_pretrained(tmp_path, state_dict=state)
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert model.config.tie_word_embeddings
    source, target = tokens(2, 7), tokens(2, 5)
    want = output(model, input_ids=source, decoder_input_ids=target).logits
    close(t5.load(tmp_path)(to_jax(source), to_jax(target)), want)


@pytest.mark.slow
def test_gpt2_has_as_many_positions_as_its_table(tmp_path: Path) -> None:
    model = theirs("GPT2LMHeadModel", "GPT2Config", **GPT2)
    own = loaded(gpt2.load, model, tmp_path)
    prompt = tokens(2, 7)
    found = gpt2.generate(own, to_jax(prompt), 5)  # 11 positions: the last token is no query
    whole = np.concatenate([prompt, found[:, :-1]], 1)
    want = output(model, input_ids=whole).logits[:, 6:].argmax(-1).numpy()
    np.testing.assert_array_equal(found, want)


def test_gpt2_has_no_positions_beyond_its_table(tmp_path: Path) -> None:
    folder = saved("GPT2", tmp_path, **GPT2)
    with pytest.raises(ValueError, match="11 positions, and the tokens need 12"):
        traced(gpt2, "GPT2", folder, lambda own: gpt2.generate(own, jnp.asarray(tokens(2, 7)), 6))
    with pytest.raises(ValueError, match="11 positions, and the tokens need 13"):
        traced(gpt2, "GPT2", folder, lambda own: own(jnp.asarray(tokens(2, 13))))


def test_bert_has_no_positions_beyond_its_table(tmp_path: Path) -> None:
    folder = saved("Bert", tmp_path, **SIZES | {"max_position_embeddings": 11})
    with pytest.raises(ValueError, match="11 positions, and the tokens need 13"):
        traced(bert, "BERT", folder, lambda own: own(jnp.asarray(tokens(2, 13))))


def test_whisper_has_no_positions_beyond_its_tables(tmp_path: Path) -> None:
    of = partial(traced, whisper, "Whisper", saved("Whisper", tmp_path, **WHISPER))
    sound, prompt = np.zeros((2, 26, 7), np.float32), to_jax(tokens(2, 7))
    assert of(lambda own: whisper.generate(own, jnp.asarray(sound), prompt, 0)).shape == (2, 0)
    with pytest.raises(ValueError, match="13 positions, and the tokens need 14"):
        of(lambda own: own.encoder(jnp.zeros((2, 27, 7))))
    with pytest.raises(ValueError, match="11 positions, and the tokens need 12"):
        of(lambda own: own(jnp.asarray(sound), jnp.asarray(tokens(2, 12))))
    with pytest.raises(ValueError, match="11 positions, and the tokens need 12"):
        of(lambda own: whisper.generate(own, jnp.asarray(sound), prompt, 6))


# Recipe, its class, and its configuration.
NOTHING: dict[str, tuple[ModuleType, str, str, dict[str, Any]]] = {
    "llama": (llama, "Llama", "Llama", GROUPED),
    "gpt2": (gpt2, "GPT2", "GPT2", GPT2),
    "gemma": (gemma, "Gemma", "Gemma3Text", GEMMA),
    "t5": (t5, "T5", "T5", T5),
}


@pytest.mark.slow_variants("*", "!llama", "!t5")
@pytest.mark.parametrize("name", NOTHING)
def test_no_steps_give_no_tokens(name: str, tmp_path: Path) -> None:
    recipe, model, kind, sizes = NOTHING[name]
    lengths = [jnp.asarray([7, 5])] if recipe is t5 else []
    prompt = to_jax(tokens(2, 7))
    folder = saved(kind, tmp_path, **sizes)
    found = traced(recipe, model, folder, lambda own: recipe.generate(own, prompt, *lengths, 0))
    assert found.shape == (2, 0)


def test_recipes_load_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = theirs("LlamaForCausalLM", "LlamaConfig", **GROUPED)
    model.save_pretrained(tmp_path)
    fetched = hub.Fetched(tmp_path, "hf://org/model@main")
    monkeypatch.setattr(hub, "fetch", lambda address: fetched)
    prompt = tokens(2, 7)
    own = llama.load("hf://org/model")
    close(forward(own, prompt), output(model, input_ids=prompt).logits)
