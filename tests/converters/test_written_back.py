"""Other layers than attention come back by name and value, or their conversion is refused."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters.discovery import attention_blocks, other_layers
from jaxmha.converters.layout import transform
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.migrate.plans import Step
from jaxmha.converters.verify import comparison
from jaxmha.params import CANONICAL, from_leaves
from tests.converters.test_every_layout import model_file

N, D = 3, 12
_RNG = np.random.default_rng(7)


def drawn(*shape: int) -> NDArray:
    return _RNG.normal(size=shape).astype(np.float32)


# Every kind of layer, as torch's modules name their parameters and buffers.
LAYERS: dict[str, dict[str, tuple[int, ...]]] = {
    "linear": {"fc.weight": (7, D), "fc.bias": (7,)},
    "linear without a bias": {"proj.weight": (7, D)},
    "square": {"proj.weight": (D, D), "proj.bias": (D,)},
    "conv1d of GPT-2": {"c_fc.weight": (D, 7), "c_fc.bias": (7,)},
    "convolution": {"conv.weight": (7, 5, 3, 3), "conv.bias": (7,)},
    "convolution over time": {"conv.weight": (5, D, 3), "conv.bias": (5,)},
    "depthwise": {"dwconv.weight": (D, 1, 3, 3), "dwconv.bias": (D,)},
    "embedding": {"embed.weight": (31, D)},
    "LayerNorm": {"norm.weight": (D,), "norm.bias": (D,)},
    "RMSNorm": {"norm.weight": (D,)},
    "RMSNorm by name": {"rms_norm.weight": (D,)},
    "GroupNorm": {"group_norm.weight": (D,), "group_norm.bias": (D,)},
    "BatchNorm": {
        "bn.weight": (D,), "bn.bias": (D,), "bn.running_mean": (D,), "bn.running_var": (D,),
    },
    "LayerScale": {"ls1.gamma": (D,)},
    "LayerScale by weight": {"ls1.weight": (D,)},
    "LayerScale by scale": {"layer_scale1.scale": (D,)},
    "Keras' names": {"fc.kernel": (D, 7), "norm.beta": (D,), "norm.gamma": (D,)},
    "Haiku's names": {"fc.w": (D, 7), "fc.b": (7,)},
    "Flax's embedding": {"embed.embedding": (31, D)},
    "weight_norm": {"fc.weight_g": (7, 1), "fc.weight_v": (7, D), "fc.bias": (7,)},
    "parametrized": {
        "fc.parametrizations.weight.original0": (7, 1),
        "fc.parametrizations.weight.original1": (7, D),
        "fc.bias": (7,),
    },
    "attention of another form": {
        f"lsh.{name}.{key}": (D, D) if key == "weight" else (D,)
        for name in ("query", "key", "value")
        for key in ("weight", "bias")
    },
    "attention without an output": {
        f"att.{name}.{key}": (D, D) if key == "weight" else (D,)
        for name in ("query", "key", "value", "query_global")
        for key in ("weight", "bias")
    },
}  # fmt: skip


SOURCES = ("linear", "bert", "gpt2", "torch", "t5", "flax", "keras", "haiku")
TARGETS = (
    "flax", "keras", "haiku", "torch", "linear", "bert", "llama", "gpt2", "timm", "annotated",
)  # fmt: skip


def block(layout: str, prefix: str) -> dict[str, NDArray]:
    """One block of a layout, of equal widths, so that most layouts hold it."""
    chosen = attention_blocks.named(layout)
    held = {leaf for entry in chosen.entries for leaf in entry.leaves}
    sizes = {"N": N, "K": N, "H": D // N, "h": D // N} | dict.fromkeys(("Dq", "Dk", "Dv", "Do"), D)
    params = from_leaves(
        {
            leaf: drawn(*(sizes[letter] for letter in axes.split()))
            for leaf, axes in CANONICAL.items()
            if leaf in held and leaf.split(".")[0] in ("query", "key", "value", "out")
        }
    )
    return transform.export_params(chosen, params, chosen.semantics, prefix=prefix)


def tree(source: str, names: Iterable[str]) -> dict[str, NDArray]:
    """A block and layers alongside, in the source's way of writing paths."""
    separator = attention_blocks.named(source).separator
    state = block(source, separator.join(("layers", "0", "self_attn")))
    for i, name in enumerate(names):
        for key, shape in LAYERS[name].items():
            state[f"layers.{i}.{key}".replace(".", separator)] = drawn(*shape)
    return state


def comes_back(source: str, to: str, state: Mapping[str, Any], folder: Path) -> bool:
    """True if a state could be written; then it comes back by name and value, and verifies."""
    old, present, back = (folder / f"{name}.safetensors" for name in "abc")
    checkpoint.write(old, state, force=True)
    try:
        done = pipeline.convert(old, present, to=to, num_heads=N, force=True)
    except ValueError:
        return False
    printed = " ".join(note for note in done.notes if "converted back" in note)
    assert comparison.compare(old, present, num_heads=N)
    pipeline.inspect(present)
    pipeline.convert(present, back, to=source, force=True)
    with checkpoint.open(back) as file:
        other = {*file} ^ {*state}
        other |= {name for name in {*file} - other if not np.array_equal(file[name], state[name])}
        assert all(other_layers.split(name)[0] in printed for name in other), other
    return True


@pytest.mark.slow_variants(
    "linear-*",
    "!linear-flax",
    "!linear-keras",
    "!linear-gpt2",
    "flax-*",
    "!flax-torch",
    "!flax-haiku",
    "!flax-timm",
)
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("source", ["linear", "flax"])
def test_every_layer_comes_back(source: str, to: str, tmp_path: Path) -> None:
    assert comes_back(source, to, tree(source, LAYERS), tmp_path)


@pytest.mark.slow_variants("*", "!0", "!1")
@pytest.mark.parametrize("seed", range(40))
def test_random_trees_come_back(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    source, to = (str(rng.choice(names)) for names in (SOURCES, TARGETS))
    names = rng.choice(list(LAYERS), size=6, replace=False)
    comes_back(source, to, tree(source, map(str, names)), tmp_path)


def test_a_layer_scale_is_no_norm(tmp_path: Path) -> None:
    """Nor after a way through Keras, whose norms have a gamma."""
    state = tree("linear", ["LayerScale", "LayerScale by weight"])
    found = attention_blocks.find({name: array.shape for name, array in state.items()})
    layers, others = other_layers.find(state, found)
    assert layers == []
    assert others.keys() == {"layers.0.ls1.gamma", "layers.1.ls1.weight"}


def test_projections_of_unknown_attention_keep_their_names(tmp_path: Path) -> None:
    """Longformer's have no output next to them: in Flax they would look like half a block."""
    state = tree("linear", ["attention without an output"])
    checkpoint.write(tmp_path / "a.npz", state)
    done = pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="flax", num_heads=N)
    names = {name for name in state if ".att." in name and "query_global" not in name}
    assert names <= set(done.carried)
    assert comparison.compare(tmp_path / "a.npz", tmp_path / "b.npz", num_heads=N)
    assert done.plan is not None
    whys = {step.why for step in done.plan.steps if step.source in names}
    assert all("attention of no known layout" in why for why in whys)
    with pytest.raises(ValueError, match="attention of no known layout"):
        pipeline.convert(
            tmp_path / "a.npz", tmp_path / "c.npz", to="flax", num_heads=N, others="refuse"
        )


def test_a_plan_that_writes_unknown_attention_as_linears_is_read_back(tmp_path: Path) -> None:
    """No reader takes them for half a block."""
    state = tree("linear", ["attention without an output"])
    checkpoint.write(tmp_path / "a.npz", state)
    made = pipeline.plan(tmp_path / "a.npz", to="flax", num_heads=N)[0]
    steps = [step for step in made.steps if ".att." not in step.source]
    for name in ("query", "key", "value", "query_global"):
        at = f"layers.0.att.{name}"
        tensors = (f"{at}.weight", f"{at}.bias")
        steps.append(Step("linear", "torch", at, at.replace(".", "/"), tensors, "linear"))
    pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", plan=replace(made, steps=tuple(steps)))
    assert comparison.compare(tmp_path / "a.npz", tmp_path / "b.npz", num_heads=N)
    read = pipeline.inspect(tmp_path / "b.npz")
    assert read.damaged == ()
    assert [block.prefix for block in read.blocks] == ["layers/0/self_attn"]


# Of no family, and of two.
OWN, LLAMA, GPT2 = "blocks.0.attention", "layers.0.self_attn", "h.0.attn"
RMS, LAYER = {"rms_norm_eps": 1e-6}, {"layer_norm_eps": 1e-6}
NORMS: list[tuple[str, dict[str, Any], str, str]] = [
    (OWN, {}, "norm.weight", "asked"),
    (OWN, RMS, "norm.weight", "scale"),
    (OWN, RMS | LAYER, "norm.weight", "asked"),
    (OWN, LAYER, "norm.weight", "asked"),
    (OWN, LAYER, "q_rmsnorm.weight", "scale"),
    (OWN, {}, "LayerNorm.weight", "gamma"),
    (OWN, RMS, "layers.0.mamba.norm.weight", "carried"),
    (LLAMA, RMS, "layers.0.linear_attn.norm.weight", "carried"),
    (LLAMA, RMS, "layers.0.input_layernorm.weight", "scale"),
    (LLAMA, LAYER, "layers.0.input_layernorm.weight", "gamma"),  # Cohere's
    (
        LLAMA,
        {"rms_norm_eps": None} | LAYER,
        "layers.0.input_layernorm.weight",
        "gamma",
    ),  # Cohere 2's MoE
    (LLAMA, {"model_type": "moonshine"}, "layers.0.input_layernorm.weight", "asked"),
    (LLAMA, {}, "layers.0.input_layernorm.weight", "asked"),  # Cohere's have no second norm
    (LLAMA, LAYER, "layers.0.gateway.norm.weight", "asked"),  # an RMSNorm of DEIMv2
    (GPT2, {"layer_norm_epsilon": 1e-5}, "h.0.ln_1.weight", "asked"),  # an RMSNorm of ImageGPT
    (LLAMA, RMS, "layers.1.self_attn.o_norm.weight", "carried"),  # gated in Kimi Linear
    (OWN, {}, "group_norms.0", "carried"),
    (OWN, {}, "feature_extractor.conv_layers.0.layer_norm", "carried"),  # wav2vec 2's, of groups
    (LLAMA, {}, "embeddings.norm.weight", "asked"),
    (LLAMA, RMS, "norm.weight", "scale"),
    (LLAMA, {}, "norm.weight", "scale"),
    (OWN, {"model_type": "mobilebert"}, "any_norm", "carried"),
    (OWN, {"model_type": "mobilebert", "normalization_type": "layer_norm"}, "any_norm", "gamma"),
]


@pytest.mark.parametrize(("prefix", "config", "name", "expected"), NORMS)
def test_a_norm_without_a_bias_is_known_or_refused(
    prefix: str, config: dict[str, Any], name: str, expected: str, tmp_path: Path
) -> None:
    """Keras keeps those of a LayerNorm and an RMSNorm under different names."""
    state: dict[str, Any] = block("gpt2" if prefix == GPT2 else "llama", prefix)
    names = [name] if name.endswith("weight") else [f"{name}.weight", f"{name}.bias"]
    state |= {one: drawn(D) for one in names}
    model_file(tmp_path / "a.npz", state, {"num_attention_heads": N} | config)
    done = pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="keras")
    with checkpoint.open(tmp_path / "b.npz") as file:
        if expected in ("asked", "carried"):
            assert set(names) <= set(file)
        else:
            assert f"{names[0].removesuffix('.weight').replace('.', '/')}/{expected}" in set(file)
    if expected == "asked":
        assert any("name the kind (norm or rmsnorm) in a plan" in note for note in done.notes)
        with pytest.raises(ValueError, match="RMSNorm or LayerNorm"):
            pipeline.convert(tmp_path / "a.npz", tmp_path / "c.npz", to="keras", others="refuse")


def test_a_plan_names_the_kind_of_a_norm(tmp_path: Path) -> None:
    """torch's RMSNorm and LayerNorm(bias=False) both have a weight alone."""
    for kind, key in (("rmsnorm", "scale"), ("norm", "gamma")):
        state: dict[str, Any] = tree("linear", []) | {"n.weight": drawn(D)}
        checkpoint.write(tmp_path / "a.npz", state, force=True)
        made = pipeline.plan(tmp_path / "a.npz", to="keras", num_heads=N)[0]
        steps = [step for step in made.steps if step.source != "n.weight"]
        steps.append(Step(kind, "torch", "n", "n", ("n.weight",), kind))
        plan = replace(made, steps=tuple(steps))
        pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", plan=plan, force=True)
        with checkpoint.open(tmp_path / "b.npz") as file:
            assert f"n/{key}" in set(file)
