"""A model whose attention computes another function than the source's is refused."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import torch
import transformers
from flax import linen, nnx
from safetensors.numpy import save_file

import jaxmha.equinox
import jaxmha.flax.linen
import jaxmha.flax.nnx
from jaxmha import Semantics, rope
from jaxmha.converters import flax
from jaxmha.converters import torch as torch_face
from jaxmha.converters.matching import Line, Plan, loading, match, prove
from jaxmha.flax.latent.nnx import LatentAttention

ZERO, CAP, CLIP = (
    Semantics(add_zero_attn=True),
    Semantics(logits_soft_cap=5.0),
    Semantics(clip_qkv=2.0),
)
HEADS, FEATURES = 4, 16


def theirs(**settings: Any) -> Any:
    return torch.nn.MultiheadAttention(FEATURES, HEADS, batch_first=True, **settings)


def abstract(make: Callable[..., Any], *sizes: Any, **settings: Any) -> Any:
    return nnx.eval_shape(lambda: make(*sizes, rngs=nnx.Rngs(0), **settings))


def ours(semantics: Semantics = Semantics(), **settings: Any) -> Any:
    make = jaxmha.flax.nnx.MultiHeadAttention
    return abstract(make, HEADS, FEATURES, semantics=semantics, **settings)


def of_flax(**settings: Any) -> Any:
    return abstract(nnx.MultiHeadAttention, HEADS, FEATURES, decode=False, **settings)


def with_norms(norm: Any, **settings: Any) -> Any:
    module = nnx.MultiHeadAttention(
        HEADS, FEATURES, decode=False, normalize_qk=True, rngs=nnx.Rngs(0)
    )
    for name in ("query_ln", "key_ln"):
        setattr(module, name, norm(FEATURES // HEADS, rngs=nnx.Rngs(0), **settings))
    return module


def of_linen(make: Any, **settings: Any) -> Any:
    module = make(HEADS, **settings)
    x = np.ones((1, 2, FEATURES), "float32")
    return module, jax.eval_shape(module.init, jax.random.key(0), x)


def of_equinox(make: Any, **settings: Any) -> Any:
    biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
    made = partial(make, HEADS, FEATURES, **biases, **settings)
    return equinox.filter_eval_shape(lambda: made(key=jax.random.key(0)))


def of_keras(*, shape: Any = (None, 5, FEATURES), **settings: Any) -> Any:
    layer = keras.layers.MultiHeadAttention(HEADS, FEATURES // HEADS, **settings)
    layer.build(shape, shape)
    return layer


def latent(base: float) -> Any:
    sizes = {"latent_dim": 8, "rotary_dim": 4, "head_dim": 5}
    return abstract(LatentAttention, 2, 6, **sizes, rotate=partial(rope, base=base))


def own_function(*args: Any, **settings: Any) -> Any:
    raise NotImplementedError


scaled = partial(jaxmha.flax.attention_fn, semantics=Semantics(scale=1.0))
their_linen, our_linen = (
    linen.MultiHeadDotProductAttention,
    jaxmha.flax.linen.MultiHeadDotProductAttention,
)
their_equinox, our_equinox = equinox.nn.MultiheadAttention, jaxmha.equinox.MultiheadAttention
WINDOW = r"local_window_size=\(1, 1\).*local_window_size=None"


@pytest.mark.parametrize(
    ("source", "target", "named"),
    [
        (lambda: theirs(add_zero_attn=True), of_flax, "add_zero_attn=True.*add_zero_attn=False"),
        (lambda: theirs(add_zero_attn=True), lambda: ours(ZERO), ""),
        (lambda: theirs(dropout=0.1), of_flax, ""),
        (theirs, lambda: ours(Semantics(scale=1.0)), r"scale=0.5, .*scale=1.0"),
        (theirs, lambda: ours(Semantics(scale=0.5)), ""),
        (theirs, lambda: ours(CAP), "logits_soft_cap=None.*logits_soft_cap=5.0"),
        (theirs, lambda: ours(CLIP), "clip_qkv=None.*clip_qkv=2.0"),
        (theirs, lambda: ours(rotate=rope), "rotate=None.*rotate=rope"),
        (theirs, lambda: of_flax(attention_fn=scaled), "scale=0.5.*scale=1.0"),
        (theirs, lambda: of_flax(attention_fn=own_function), ""),
        (theirs, lambda: of_linen(our_linen, semantics=ZERO), "add_zero_attn=False"),
        (theirs, lambda: of_linen(their_linen), ""),
        (lambda: of_keras(sliding_window=2), ours, WINDOW),
        (lambda: of_keras(sliding_window=2), lambda: ours(local_window_size=1), ""),
        (lambda: of_keras(shape=(None, 3, 5, FEATURES)), ours, r"attention_axes=\(-3, -2\)"),
        (lambda: of_keras(shape=(None, 3, 5, FEATURES), attention_axes=(2,)), ours, ""),
        (lambda: with_norms(nnx.LayerNorm, use_bias=False), lambda: ours(normalize_qk=True), ""),
        (
            lambda: with_norms(nnx.LayerNorm, use_bias=False, epsilon=1e-5),
            lambda: ours(normalize_qk=True),
            "qk_norm_epsilon=1e-05.*qk_norm_epsilon=1e-06",
        ),
        (
            lambda: with_norms(nnx.RMSNorm),
            lambda: ours(normalize_qk=True),
            "qk_norm='rms'.*qk_norm='layer'",
        ),
        (lambda: of_equinox(their_equinox), lambda: ours(rotate=rope), ""),
        (lambda: of_equinox(our_equinox, semantics=CAP), ours, "logits_soft_cap=5.0"),
        (lambda: latent(1e4), lambda: latent(1e5), r"rotate=rope\(base=10000.0\).*100000.0"),
        (lambda: latent(1e4), lambda: latent(1e4), ""),
        (lambda: ours(rotate=rope), lambda: ours(rotate=partial(rope, base=1e4)), ""),
        (lambda: ours(rotate=rope), lambda: ours(rotate=lambda *x: rope(*x)), ""),
        (theirs, lambda: ours(rotate=lambda x, _: x), ""),
        (theirs, lambda: ours(Semantics(scale=float(np.float32(0.5) / np.float32(1 + 1e-7)))), ""),
        (
            lambda: ours(Semantics(qk_norm="layer", qk_norm_epsilon=float(np.float32(1e-6)))),
            lambda: ours(normalize_qk=True),
            "",
        ),
        (lambda: of_keras(sliding_window=4), lambda: ours(local_window_size=(2, 0)), r"\(2, 0\)"),
        (lambda: ours(rotate=rope), lambda: ours(rotate=lambda x, _: x), "rotate=rope"),
    ],
)
def test_settings_that_change_the_function(
    source: Callable[[], Any], target: Callable[[], Any], named: str
) -> None:
    if not named:
        made = match(source(), target())
        assert not any((made.notes, made.questions))
        return
    with pytest.raises(ValueError, match=f"the source has .*{named}.*the arrays fit"):
        match(source(), target())


def up_to(length: int) -> Callable[..., Any]:
    """A rotation by a table of angles, which JAX reads at its end for places beyond it."""
    table = rope(np.ones((1, length, 1, 4), "float32"), np.arange(length))
    cos, sin = table[0, :, 0, :2] + table[0, :, 0, 2:], table[0, :, 0, 2:] - table[0, :, 0, :2]

    def rotate(x: Any, places: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        c, s = (part[places][:, :, None] / 2 for part in (cos, sin))
        return jnp.concatenate([a * c - b * s, b * c + a * s], -1)

    return rotate


@pytest.mark.parametrize(
    ("source", "target", "named"),
    [
        (theirs, lambda: ours(local_window_size=(None, 0)), "local_window_size=None"),
        (lambda: of_keras(sliding_window=4), lambda: ours(local_window_size=(3, 0)), r"=\(3, 3\)"),
        (lambda: ours(rotate=rope), lambda: ours(rotate=up_to(512)), "rotate=rope"),
    ],
)
def test_what_calls_or_longer_inputs_decide_is_noted(
    source: Callable[[], Any], target: Callable[[], Any], named: str
) -> None:
    """Calls of the source may be causal; and a table may be as long as the longest input."""
    (note,) = match(source(), target()).notes
    assert re.search(f"{named}, and nothing shows", note)


def test_a_configuration_that_is_no_json_states_nothing() -> None:
    from transformers import LlamaConfig, LlamaModel

    source = LlamaModel(
        LlamaConfig(
            hidden_size=8,
            num_attention_heads=2,
            num_hidden_layers=1,
            vocab_size=7,
            intermediate_size=8,
        )
    )
    source.config.activation = torch.nn.GELU()
    assert not match(source, source).notes


def test_a_refused_model_keeps_its_arrays_and_a_dict_fills_it() -> None:
    source = theirs(add_zero_attn=True).eval()
    model = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0))
    before = np.array(model.query.kernel.get_value())
    for call in (flax.load_into, lambda a, b: prove(b, a)):
        with pytest.raises(ValueError, match="add_zero_attn=True"):
            call(model, source)
    assert np.array_equal(before, model.query.kernel.get_value())
    with pytest.raises(ValueError, match="add_zero_attn=True"):
        torch_face.load_into(theirs(), source)

    settings = {"rngs": nnx.Rngs(0), "semantics": ZERO}
    alike = jaxmha.flax.nnx.MultiHeadAttention(HEADS, FEATURES, **settings)
    arrays = dict(source.state_dict())
    model, alike = flax.load_into(model, arrays), flax.load_into(alike, source)

    def inputs(rng: np.random.Generator) -> Any:
        x = rng.normal(size=(2, 5, FEATURES))
        return {"source": (x, x, x), "target": (x,)}

    assert prove(source, alike, inputs=inputs).same
    with pytest.raises(ValueError, match="add_zero_attn=True"):
        prove(source, model, inputs=inputs)


def test_notes_say_what_nothing_compares() -> None:
    tree = nnx.to_pure_dict(nnx.state(ours(), nnx.Param))
    (note,) = match(theirs(add_zero_attn=True), tree).notes
    assert note == (
        "a layer of the source: add_zero_attn=True, and nothing shows that the model computes the same"
    )
    assert "rotate=rope," in match(ours(rotate=rope), ours(rotate=own_function)).notes[0]
    assert not match(theirs(), tree).notes


def test_a_proof_has_the_notes_of_the_plan() -> None:
    source, model = torch.nn.LayerNorm(FEATURES), nnx.LayerNorm(FEATURES, rngs=nnx.Rngs(0))
    plan = match(source, model)
    given = loading.with_unused(Plan.from_toml(plan.to_toml()), source, model)  # of --plan
    proof = prove(source, flax.load_into(model, source))
    assert proof.same
    assert proof.notes == plan.notes == given.notes
    assert str(proof).endswith("note: a layer of the source: epsilon=1e-05, and 1e-06 in the model")


def of_norm(framework: str) -> Any:
    made = keras.layers.LayerNormalization(epsilon=1e-3)
    if framework == "keras":
        made.build((None, FEATURES))
        return made
    if framework == "nnx":
        return abstract(nnx.LayerNorm, FEATURES, epsilon=1e-3)
    return equinox.filter_eval_shape(equinox.nn.LayerNorm, FEATURES, eps=1e-3)


@pytest.mark.parametrize("framework", ["keras", "nnx", "equinox"])
def test_other_epsilons_of_norms_are_noted(framework: str) -> None:
    source, target = torch.nn.LayerNorm(FEATURES), of_norm(framework)
    note = "a layer of the source: epsilon=1e-05, and 0.001 in the model"
    assert match(source, target).notes == (note,)
    assert not match(torch.nn.LayerNorm(FEATURES, eps=1e-3), target).notes


def folder(at: Path, config: dict[str, Any], norms: bool = False) -> Path:
    """A decoder layer's attention with the names of Llama, next to its config.json."""
    rng, block = np.random.default_rng(3), "model.layers.0.self_attn"
    arrays = {
        f"{block}.{x}_proj.weight": rng.normal(size=(FEATURES, FEATURES)).astype("f")
        for x in "qkvo"
    }
    if norms:
        arrays |= {f"{block}.{x}_norm.weight": np.ones(FEATURES // HEADS, "f") for x in "qk"}
    save_file(arrays, at / "model.safetensors")
    shared = {"num_attention_heads": HEADS, "hidden_size": FEATURES}
    (at / "config.json").write_text(json.dumps(shared | config))
    return at


GEMMA = {
    "model_type": "gemma2", "query_pre_attn_scalar": 9, "attn_logit_softcapping": 50.0,
    "head_dim": 4, "num_key_value_heads": 4, "sliding_window": 4,
}  # fmt: skip
LIKE_GEMMA = {"semantics": Semantics(scale=1 / 3, logits_soft_cap=50.0)}
LLAMA = {"model_type": "llama"}
QWEN = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 4, "num_key_value_heads": 4}
RMS = Semantics(qk_norm="rms", qk_norm_epsilon=1e-6)


@pytest.mark.parametrize(
    ("config", "settings", "named"),
    [
        (GEMMA, LIKE_GEMMA, ""),
        (
            GEMMA,
            {"semantics": Semantics(scale=1 / 3)},
            "logits_soft_cap=50.0.*logits_soft_cap=None",
        ),
        (GEMMA, {"semantics": CAP}, "scale=0.333"),
        (GEMMA, LIKE_GEMMA | {"local_window_size": (7, 0)}, r"local_window_size=\(3, None\)"),
        (GEMMA, LIKE_GEMMA | {"local_window_size": (3, 0)}, ""),
        (LLAMA, {}, ""),
        (LLAMA, {"semantics": CAP}, "logits_soft_cap=None.*logits_soft_cap=5.0"),
        (LLAMA, {"local_window_size": (None, 0)}, ""),
        (LLAMA, {"local_window_size": (3, 0)}, r"local_window_size=\(3, 0\)"),
        (
            LLAMA,
            {"rotate": partial(rope, base=5e5)},
            r"rotate=\(rotary, base 10000.*rotate=rope\(base=500000.0\)",
        ),
        (LLAMA, {"rotate": partial(rope, interleaved=True)}, "interleaved=True"),
        (QWEN, {"semantics": RMS}, ""),
        (QWEN | {"rms_norm_eps": 1e-5}, {"semantics": RMS}, "qk_norm_epsilon=1e-05"),
        ({"model_type": "unheard"}, {"semantics": CAP}, ""),
    ],
)
def test_the_config_of_a_folder_states_settings(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], named: str
) -> None:
    norms = settings.get("semantics", Semantics()).qk_norm is not None
    source = folder(tmp_path, config, norms)
    model = ours(**{"use_bias": False, "rotate": rope, **settings})
    if not named:
        assert not match(source, model).questions
        return
    with pytest.raises(ValueError, match=rf"self_attn of the source has .*{named}"):
        match(source, model)


@pytest.mark.parametrize("turned", ["query key", "query"])
def test_a_plan_may_reorder_the_features_of_heads_for_other_pairs(turned: str) -> None:
    """Pairs of halves become pairs of features next to each other."""
    make = partial(jaxmha.flax.nnx.MultiHeadAttention, HEADS, FEATURES, rngs=nnx.Rngs(0))
    source, target = make(rotate=rope), make(rotate=partial(rope, interleaved=True))
    lines = [
        Line(f"{x}/kernel", (f"{x}/kernel",), "i n (2 p) -> i n (p 2)") for x in turned.split()
    ]
    lines += [Line(f"{x}/bias", (f"{x}/bias",), "n (2 p) -> n (p 2)") for x in turned.split()]
    plan = match(source, make(rotate=rope)).with_lines(*lines)
    if turned == "query":
        with pytest.raises(ValueError, match="the outputs would differ"):
            flax.load_into(target, source, plan)
        return
    filled = flax.load_into(target, source, plan)
    inputs = lambda rng: (rng.normal(size=(2, 7, FEATURES)),)
    assert prove(source, filled, plan, inputs=inputs).same


def test_the_configuration_of_a_live_model_states_settings() -> None:
    sizes = {"hidden_size": FEATURES, "num_attention_heads": HEADS, "num_hidden_layers": 1}
    few = {"vocab_size": 5, "intermediate_size": 7}
    given = {name: x for name, x in GEMMA.items() if name != "model_type"}
    config = transformers.Gemma2Config(**sizes, **few, **given)
    source = torch.nn.ModuleDict({"text": transformers.Gemma2Model(config)})
    assert match(source, ours(**LIKE_GEMMA, use_bias=False, rotate=rope)).lines
    with pytest.raises(ValueError, match=r"text.layers.0.self_attn of the source has .*=50.0"):
        match(source, ours(Semantics(scale=1 / 3), use_bias=False, rotate=rope))


def test_settings_that_calls_may_add_are_noted(tmp_path: Path) -> None:
    source = folder(tmp_path, LLAMA | {"model_type": "mistral", "sliding_window": 4})
    (note,) = match(source, of_flax(use_bias=False)).notes
    of_halves = "rotate=(rotary, base 10000, 4 features in pairs of halves)"
    assert f"self_attn of the source: {of_halves}, local_window_size=(3, None), and" in note
