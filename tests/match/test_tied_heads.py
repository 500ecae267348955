"""A head that the source ties to its embedding is offered that embedding."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import save_file

from jaxmha.converters import flax, match
from jaxmha.converters import torch as convert
from jaxmha.converters.matching import prove

V, D = 11, 8


class Mine(nnx.Module):  # type: ignore[misc]
    def __init__(self, bias: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.tokens, self.inner = nnx.Embed(V, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.lm_head = nnx.Linear(D, V, use_bias=bias, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        return self.lm_head(self.inner(self.tokens(ids)))


class Theirs(torch.nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embed_tokens, self.fc = torch.nn.Embedding(V, D), torch.nn.Linear(D, D)
        self.lm_head = torch.nn.Linear(D, V, bias=bias)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Any) -> Any:
        return self.lm_head(self.fc(self.embed_tokens(ids)))


def test_a_model_that_shows_the_tie_fills_the_head() -> None:
    source = Theirs()
    plan = match(source, Mine())
    assert "certain: the source ties lm_head.weight to it" in str(plan)
    model = flax.load_into(Mine(), source, plan)
    assert prove(source, model, plan, inputs=lambda rng: (rng.integers(0, V, (2, 3)),)).same


def test_the_bias_of_a_tied_head_is_found_in_a_state_dict() -> None:
    state, model = Theirs(bias=True).state_dict(), Theirs(bias=True)
    assert torch.equal(convert.load_into(model, state).lm_head.bias, state["lm_head.bias"])
    with pytest.raises(ValueError, match=r"no place for lm_head\.weight"):
        convert.load_into(model, {**state, "lm_head.weight": torch.zeros(V, D)})


@pytest.mark.parametrize("stored", ["shared", "copied", "pt", "safetensors"])
def test_a_model_without_a_head_leaves_out_one_that_is_tied(stored: str, tmp_path: Path) -> None:
    state: Any = Theirs().state_dict()
    if stored == "copied":
        state = {name: x.clone() for name, x in state.items()}
    source = state if stored in ("shared", "copied") else tmp_path / f"model.{stored}"
    if stored == "pt":
        torch.save(state, source)
    elif stored == "safetensors":
        save_file({name: x.numpy() for name, x in state.items()}, source)
    model = Mine()
    del model.lm_head
    flax.load_into(model, source)
    np.testing.assert_array_equal(model.tokens.embedding[...], state["embed_tokens.weight"])
    assert prove(source, model).same


@pytest.mark.parametrize("value", [1.0, None], ids=["constant", "other"])
def test_a_head_of_other_or_constant_values_has_no_place(value: float | None) -> None:
    model, state = Mine(), {name: x.clone() for name, x in Theirs().state_dict().items()}
    del model.lm_head
    for name in ("embed_tokens.weight", "lm_head.weight")[value is None :]:
        state[name][:] = torch.arange(D) if value is None else value
    with pytest.raises(ValueError, match=r"no place for lm_head\.weight"):
        flax.load_into(model, state)
    assert match({n: jax.eval_shape(lambda y: y, x.numpy()) for n, x in state.items()}, model)


def test_two_heads_without_a_source_are_asked_about() -> None:
    target = Mine()
    target.mtp_head = nnx.Linear(D, V, use_bias=False, rngs=nnx.Rngs(1))
    plan = match(Theirs(), target)
    assert [one.target for one in plan.questions] == ["lm_head/kernel", "mtp_head/kernel"]


@pytest.mark.parametrize("bias", ["none", "own", "absent"])
def test_a_file_without_the_head_is_asked_about(bias: str) -> None:
    state = {k: x.numpy() for k, x in Theirs().state_dict().items() if "head" not in k}
    state |= {"predictions.bias": np.ones(V, "float32")} if bias == "own" else {}
    target = Mine(bias=bias != "none")
    plan = match(state, target)
    (question,) = plan.questions
    assert question.candidates == ("embed_tokens.weight",)
    assert "tie_word_embeddings" in question.reason
    filled = flax.load_into(target, state, plan.with_lines(*question.examples[0]))
    np.testing.assert_array_equal(filled.lm_head.kernel[...].T, state["embed_tokens.weight"])
    if bias != "none":
        np.testing.assert_array_equal(filled.lm_head.bias[...], np.full(V, bias == "own"))


@pytest.mark.parametrize("ties", [True, False, None])
def test_the_config_of_a_folder_says_whether_the_head_is_tied(
    ties: bool | None, tmp_path: Path
) -> None:
    state = {k: x.numpy() for k, x in Theirs().state_dict().items() if "head" not in k}
    save_file(state, tmp_path / "model.safetensors")
    config = {} if ties is None else {"text_config": {"tie_word_embeddings": ties}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = match(tmp_path, Mine())
    if ties:
        filled = flax.load_into(Mine(), tmp_path, plan)
        np.testing.assert_array_equal(filled.lm_head.kernel[...].T, state["embed_tokens.weight"])
        assert "tie_word_embeddings of its configuration" in str(plan)
        return
    (question,) = plan.questions
    assert question.candidates == ("embed_tokens.weight",) * (ties is None)
    assert ("none is tied" in question.reason) == (ties is False)


def test_the_configuration_of_a_live_model_says_whether_the_head_is_tied() -> None:
    sizes = {"n_embd": D, "n_head": 2, "n_layer": 1, "vocab_size": V, "n_positions": 5}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    make = partial(transformers.GPT2Config, **sizes, **ids)
    target = transformers.GPT2LMHeadModel(make(tie_word_embeddings=False))
    asked = [
        match(transformers.GPT2Model(make(tie_word_embeddings=x)), target) for x in (True, False)
    ]
    assert [len(plan.questions) for plan in asked] == [0, 1]


def test_other_tables_and_other_targets_are_no_heads() -> None:
    tables = {"embed_positions.weight": (V, D), "vision.embed_tokens.weight": (V + 2, D)}
    source = {name: np.ones(shape, "float32") for name, shape in tables.items()}
    heads = {"head": (D, V), "text/lm_head": (D, V + 2), "decoder_embedding": (D, V + 2)}
    target: Any = {name: {"kernel": np.zeros(x, "float32")} for name, x in heads.items()}
    assert not any("tie" in question.reason for question in match(source, target).questions)
