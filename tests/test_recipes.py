"""Recipes: each loads what transformers saved, computes what it computes, decodes and trains."""

import importlib
import json
import sys
from collections.abc import Callable
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
from typer.testing import CliRunner

from experiments.recipes import bert, gemma, gpt2, llama, t5, vit, whisper
from jaxmha.cli import recipes
from jaxmha.cli.app import app
from tests.drawn import to_jax

STEPS = 20
SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 16}
# Decoders of text: recipe, class of transformers, and its config.
DECODERS: dict[str, tuple[ModuleType, str, dict[str, Any]]] = {
    "llama": (llama, "Llama", GROUPED | {"sliding_window": 7}),  # which Llama ignores
    "qwen3": (
        llama,
        "Qwen3",
        GROUPED
        | {"tie_word_embeddings": True, "sliding_window": 7}
        | {"use_sliding_window": True, "max_window_layers": 1},
    ),
    "mistral": (llama, "Mistral", GROUPED | {"sliding_window": 7}),
    "gpt2": (gpt2, "GPT2", {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gemma": (
        gemma,
        "Gemma3",
        GROUPED
        | {"num_hidden_layers": 3, "sliding_window": 5, "query_pre_attn_scalar": 13}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.usefixtures("implicit_promotion"),
]


def theirs(kind: str, config: str, **sizes: Any) -> Any:
    """A model of transformers whose weights are large enough to tell errors apart."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model


def loaded(load: Callable[[Path], Any], model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return load(folder)


def tokens(*shape: int) -> Any:
    return np.random.default_rng(shape).integers(0, 101, shape)


def output(model: Any, **inputs: Any) -> Any:
    arrays = {name: torch.from_numpy(np.asarray(x)) for name, x in inputs.items()}
    with torch.no_grad():
        return model(**arrays)


def greedy(logits: Callable[[Any], Any], prompt: Any) -> Any:
    """The next tokens by the whole model again for every one of them."""
    found = prompt
    for _ in range(STEPS):
        best = logits(found)[:, -1:].argmax(-1).numpy()
        found = np.concatenate([found, best], 1)
    return found[:, prompt.shape[1] :]


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs.numpy(), rtol=0, atol=1e-5)


def forward(model: nnx.Module, *arrays: Any, **named: Any) -> Any:
    """One program: the operations of a model by themselves take longer to compile."""
    run = nnx.jit(lambda model, arrays, named: model(*arrays, **named))
    return run(model, jax.tree.map(to_jax, arrays), jax.tree.map(to_jax, named))


def trains(model: nnx.Module, loss: Callable[..., Any], *batch: Any) -> None:
    """The loss falls along its gradient, which reaches every parameter."""
    step = nnx.jit(nnx.value_and_grad(loss))
    before, gradients = step(model, *batch)
    leaves = [np.asarray(x) for x in jax.tree.leaves(gradients)]
    assert all(np.isfinite(x).all() and np.any(x) for x in leaves)
    state = nnx.state(model, nnx.Param)
    lower = jax.tree.map(
        lambda x, g: to_jax(np.asarray(x) - 1e-3 * np.asarray(g)), state, gradients
    )
    nnx.update(model, lower)
    assert step(model, *batch)[0] < before


@pytest.mark.long
@pytest.mark.slow_variants("*", "!llama")
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, tmp_path: Path) -> None:
    recipe, kind, sizes = DECODERS[name]
    kind, config = (
        f"{kind}LMHeadModel" if name == "gpt2" else f"{kind}ForCausalLM",
        ("Gemma3TextConfig" if name == "gemma" else f"{kind}Config"),
    )
    model = theirs(kind, config, pad_token_id=0, **sizes)
    own = loaded(recipe.load, model, tmp_path)
    prompt = tokens(2, 11)
    close(forward(own, prompt), output(model, input_ids=prompt).logits)
    want = greedy(lambda x: output(model, input_ids=x).logits, prompt)
    np.testing.assert_array_equal(recipe.generate(own, to_jax(prompt), STEPS), want)
    trains(own, recipe.loss, to_jax(prompt))


@pytest.mark.parametrize(
    ("name", "kind"), [("mistral", 7), ("gemma", "sliding_attention"), ("gemma", "full_attention")]
)
def test_a_cache_holds_no_more_than_the_window(name: str, kind: Any, tmp_path: Path) -> None:
    recipe, model, sizes = DECODERS[name]
    config = "Gemma3TextConfig" if name == "gemma" else f"{model}Config"
    getattr(transformers, config)(**sizes).save_pretrained(tmp_path)
    window = 99 if kind == "full_attention" else sizes["sliding_window"]

    def keys() -> Any:
        block = recipe.Block(recipe.Config.read(tmp_path), kind, nnx.Rngs(0))
        return [block.cache(1, length, spare).key for length in (3, 5, 40) for spare in (0, 2)]

    found = [key.shape[2] for key in jax.eval_shape(keys)]
    assert found == [min(length, window + spare) for length in (3, 5, 40) for spare in (0, 2)]


def test_bert(tmp_path: Path) -> None:
    """Padding is masked by lengths; the head of the language model is left out."""
    model = theirs("BertForMaskedLM", "BertConfig", max_position_embeddings=64, **SIZES)
    own = loaded(bert.load, model, tmp_path)
    ids, lengths = tokens(2, 11), np.array([11, 6])
    valid = np.arange(11) < lengths[:, None]
    want = output(model.bert, input_ids=ids, attention_mask=valid.astype(int)).last_hidden_state
    states = forward(own, ids, lengths=lengths)
    close(states[valid], want[torch.from_numpy(valid)])
    classifier = bert.Classifier(own, 3, nnx.Rngs(0))

    def loss(model: Any, ids: Any) -> Any:
        return jnp.square(model(ids, jnp.asarray(lengths)) - 1.0).mean()

    before, gradients = nnx.jit(nnx.value_and_grad(loss))(classifier, to_jax(ids))
    assert before > 0
    assert (gradients["encoder"]["blocks"][0]["attention"]["query"]["kernel"][...] != 0).any()


@pytest.mark.slow
def test_vit(tmp_path: Path) -> None:
    sizes = {name: x for name, x in SIZES.items() if name != "vocab_size"}
    sizes |= {"image_size": 24, "patch_size": 8, "num_labels": 5}
    model = theirs("ViTForImageClassification", "ViTConfig", **sizes)
    own = loaded(vit.load, model, tmp_path)
    images = np.random.default_rng(0).standard_normal((2, 3, 24, 24)).astype("f")
    ours = to_jax(images.transpose(0, 2, 3, 1))
    close(own(ours), output(model, pixel_values=images).logits)
    trains(own, lambda model, x: jnp.square(model(x) - 1.0).mean(), ours)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.0", "1.1", "mt5"])
def test_t5(version: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 101,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
    }
    sizes |= {"num_heads": 4, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8}
    kind = "MT5" if version == "mt5" else "T5"
    if version == "1.1":
        sizes |= {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    model = theirs(f"{kind}ForConditionalGeneration", f"{kind}Config", **sizes)
    own = loaded(t5.load, model, tmp_path)
    source, target, lengths = tokens(2, 13), tokens(2, 7), np.array([13, 6])
    given = {"attention_mask": (np.arange(13) < lengths[:, None]).astype(int), "input_ids": source}

    def logits(target: Any) -> Any:
        return output(model, decoder_input_ids=target, **given).logits

    arrays = to_jax(source), to_jax(target), to_jax(lengths)
    close(own(*arrays), logits(target))
    found = t5.generate(own, arrays[0], arrays[2], STEPS)
    np.testing.assert_array_equal(found, greedy(logits, np.zeros((2, 1), int)))
    trains(own, t5.loss, *arrays)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "umt5"}, "is umt5, expected t5 or mt5"),
        ({"model_type": "t5", "feed_forward_proj": "gated-silu"}, "gated-silu, expected relu or"),
    ],
)
def test_t5_that_is_another_model(config: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        t5.load(tmp_path)


@pytest.mark.slow
def test_whisper(tmp_path: Path) -> None:
    sides = {f"{s}_{x}": n for s in ("encoder", "decoder") for x, n in (("layers", 2),)}
    sides |= {f"{s}_attention_heads": 4 for s in ("encoder", "decoder")}
    sides |= {f"{s}_ffn_dim": 48 for s in ("encoder", "decoder")}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    sizes = {"vocab_size": 101, "num_mel_bins": 20, "d_model": 32, "max_source_positions": 25}
    kind = "WhisperForConditionalGeneration"
    model = theirs(kind, "WhisperConfig", max_target_positions=64, **sizes, **sides, **ends)
    own = loaded(whisper.load, model, tmp_path)
    prompt = tokens(2, 4)
    mel = np.random.default_rng(0).standard_normal((2, 20, 50)).astype("f")

    def logits(prompt: Any) -> Any:
        return output(model, input_features=mel, decoder_input_ids=prompt).logits

    sound = to_jax(mel.transpose(0, 2, 1))
    close(own(sound, to_jax(prompt)), logits(prompt))
    found = whisper.generate(own, sound, to_jax(prompt), STEPS)
    np.testing.assert_array_equal(found, greedy(logits, prompt))
    trains(own, whisper.loss, sound, to_jax(prompt))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["recipes", *arguments])


def test_the_command_lists_and_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy runs alone, and replaces nothing unless it is told to."""
    assert set(json.loads(run("--json").output)) == set(recipes.recipes())
    assert "llama" in run().output
    known = recipes.recipes().items()
    others = [name for name, path in known if "\ndef generate(" not in path.read_text()]
    assert f"all but {' and '.join(others)} decode" in str(recipes.command.__doc__)
    done = run("copy", "llama", str(tmp_path))
    assert done.exit_code == 0
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        copy = importlib.import_module("llama")
        patch.delitem(sys.modules, "llama")
    assert copy.__file__ == str(tmp_path / "llama.py")
    assert (copy.Llama.__module__, copy.load.__module__) == ("llama", "llama")
    (tmp_path / "llama.py").write_text("mine")
    assert run("copy", "llama", str(tmp_path)).exit_code == 2
    assert (tmp_path / "llama.py").read_text() == "mine"
    assert run("copy", "llama", str(tmp_path), "--force").exit_code == 0
    assert (tmp_path / "llama.py").read_text() != "mine"


@pytest.mark.parametrize("arguments", [("copy",), ("copy", "lama"), ("paste", "llama")])
def test_a_wrong_word_gives_one_message(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2
