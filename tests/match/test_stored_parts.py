"""Weights that torch stores in parts are computed or refused, and adapters are no layers."""

import json
import warnings
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import keras
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import save_file
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize, prune

from jaxmha.converters import equinox, flax, match
from jaxmha.converters.matching import prove
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.migrate.plans import Plan, Step
from tests.converters.test_every_layout import N, exported

I, O = 5, 7
TARGET = {"mine": {"kernel": np.zeros((I, O), "float32"), "bias": np.zeros(O, "float32")}}
STORE: dict[str, Any] = {
    "weight_norm": utils.weight_norm,
    "weight_norm of all": lambda layer: utils.weight_norm(layer, dim=None),  # type: ignore[arg-type]
    "parametrization": parametrizations.weight_norm,
    "parametrization of columns": lambda layer: parametrizations.weight_norm(layer, dim=1),
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),  # type: ignore[no-untyped-call]
    "spectral_norm": utils.spectral_norm,
    "spectral parametrization": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "two": lambda layer: parametrize.register_parametrization(
        parametrizations.weight_norm(layer), "weight", torch.nn.Tanh()
    ),
}


def stored(kind: str) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(I, O)).double()
    with warnings.catch_warnings(category=FutureWarning, action="ignore"):
        STORE[kind](model[0])
    return model.eval()


@pytest.mark.parametrize("of", ["module", "state"])
@pytest.mark.parametrize("kind", [*STORE][:5])
def test_a_weight_is_computed_from_its_parts(kind: str, of: str) -> None:
    model = stored(kind)
    x = torch.arange(float(I), dtype=torch.double)
    expected = model(x).detach().numpy()  # computes the weight
    source = model if of == "module" else model.state_dict()
    plan = match(source, TARGET)
    way = "as its layers do" if of == "module" else "if nothing else computes them"
    assert f"computed from the parts that torch stores, {way}: 0.weight" in plan.notes
    filled = equinox.load_into(TARGET, source, plan, dtype="float32")["mine"]
    np.testing.assert_allclose(x.numpy() @ filled["kernel"] + filled["bias"], expected, 1e-5, 1e-5)
    assert prove(source, {"mine": {k: np.asarray(v) for k, v in filled.items()}}, plan).same
    assert not match(model, stored(kind)).notes  # which has the same parts


@pytest.mark.parametrize("kind", [*STORE][5:])
def test_parts_that_do_not_determine_the_weight_are_refused(kind: str) -> None:
    model = stored(kind)
    with pytest.raises(ValueError, match=r"computes 0\.weight from .* first by") as refused:
        match(model, TARGET)
    eval(str(refused.value).partition("first by ")[2], {"torch": torch, "module": model})
    assert match(model, TARGET).questions == ()


def test_names_of_parts_with_other_shapes_are_no_parts() -> None:
    source = {"a.w_g": np.zeros((3, 5), "float32"), "a.w_v": np.ones((3, 5), "float32")}
    target = {name: np.zeros_like(x) for name, x in source.items()}
    assert not match(source, target).notes
    assert equinox.load_into(target, source)["a.w_v"].all()


LORA = {
    f"base_model.model.model.layers.0.self_attn.{name}_proj.lora_{end}.weight": np.ones(shape, "float32")
    for name in "qkvo"
    for end, shape in (("A", (2, 8)), ("B", (8, 2)))
}  # fmt: skip


def test_adapters_are_no_layers(tmp_path: Path) -> None:
    save_file(LORA, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    advice = "are parts of an adapter .*merge_and_unload"
    for source in (tmp_path, LORA):
        with pytest.raises(ValueError, match=advice):
            match(source, TARGET)
    plan = match(
        {"a.weight": np.ones((O, I), "float32"), "a.bias": np.ones(O, "float32")} | LORA, TARGET
    )
    assert not plan.questions
    assert set(plan.unused) == set(LORA)
    assert "merge_and_unload" in plan.notes[0]
    with pytest.raises(ValueError, match=advice):
        pipeline.plan(tmp_path, to="flax")
    with pytest.raises(ValueError, match=advice):
        pipeline.convert_state(exported("torch", "a") | LORA, to="jaxmha", num_heads=N)
    info = pipeline.inspect(tmp_path)
    assert not info.layers
    assert all("of an adapter" in why for why in info.not_understood.values())
    assert any("merge_and_unload" in note for note in info.notes)
    step = Step("linear", "torch", "a.lora_A", "a", ("a.lora_A.weight",))
    save_file({"a.lora_A.weight": np.ones((2, 8), "f")}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="lora_A: 1 array is part of an adapter"):
        pipeline.convert(tmp_path / "a.safetensors", tmp_path / "b.npz", plan=Plan("flax", (step,)))


def test_an_adapter_fills_an_adapter() -> None:
    target = {name: np.zeros_like(x) for name, x in LORA.items()}
    assert all(x.all() for x in equinox.load_into(target, LORA).values())


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_adapters_of_keras_and_nnx_name_what_merges_them(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((I,)), keras.layers.Dense(O)])
    model.layers[0].enable_lora(2)
    model.layers[0].lora_kernel_b.assign(np.ones((2, O)))
    with pytest.raises(ValueError, match=r"merge them .* by model\.save_weights.* the base alone"):
        equinox.load_into(TARGET, model)
    model.save_weights(tmp_path / "a.weights.h5")
    filled = equinox.load_into(TARGET, tmp_path / "a.weights.h5")["mine"]["kernel"]
    np.testing.assert_array_equal(filled, np.asarray(model.layers[0].kernel))
    lora = nnx.Dict(mine=nnx.LoRALinear(I, O, lora_rank=2, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="adding lora_a @ lora_b to the kernel"):
        equinox.load_into(TARGET, lora)
    assert not match(lora, lora).questions
    assert "before it gets one" in match(TARGET, lora).questions[0].reason


def of_nnx(norm: Any = nnx.WeightNorm, **more: Any) -> Any:
    rngs = nnx.Rngs(0)
    return nnx.Dict(mine=norm(nnx.Linear(I, O, rngs=rngs), rngs=rngs, **more))


def of_linen(norm: str) -> Any:
    leaves = {"scale": np.ones(O)} if norm == "WeightNorm" else {"u": np.ones((1, O))}
    added = {f"{norm}_0": {f"mine/kernel/{leaf}": x for leaf, x in leaves.items()}}
    return {"params": TARGET, "batch_stats": added}


def of_equinox(norm: str) -> Any:
    linear = eqx.nn.Linear(I, O, key=jax.random.key(0))
    if norm == "WeightNorm":
        return {"mine": eqx.nn.WeightNorm(linear)}
    spectral = eqx.nn.SpectralNorm(linear, "weight", key=jax.random.key(0))
    return {"mine": eqx.nn.delete_init_state(spectral)}


NORMED: dict[str, Any] = {
    "nnx.WeightNorm": of_nnx,
    "nnx.WeightNorm without": lambda: of_nnx(use_scale=False),
    "nnx.SpectralNorm": lambda: of_nnx(nnx.SpectralNorm),
    "nnx.WeightNorm of state": lambda: nnx.state(of_nnx()),
    "linen.WeightNorm": lambda: of_linen("WeightNorm"),
    "linen.SpectralNorm": lambda: of_linen("SpectralNorm"),
    "equinox.nn.WeightNorm": lambda: of_equinox("WeightNorm"),
    "equinox.nn.SpectralNorm": lambda: of_equinox("SpectralNorm"),
}


@pytest.mark.parametrize("kind", NORMED)
def test_weights_that_a_layer_normalises_are_refused(kind: str) -> None:
    source = NORMED[kind]()
    with pytest.raises(ValueError, match=f"{kind.partition(' ')[0]} of the source .* at each call"):
        match(source, TARGET)
    assert not match(source, NORMED[kind]()).questions


def test_what_a_call_of_nnx_stores_fills_the_model() -> None:
    source, x = of_nnx(), np.ones((2, I), "float32")
    expected = source.mine(x)
    filled = equinox.load_into(TARGET, nnx.Dict(mine=source.mine.layer_instance))["mine"]
    np.testing.assert_allclose(x @ filled["kernel"], expected, 1e-6, 1e-6)  # a bias of zeros


def test_a_dict_of_nnx_is_filled_in_place() -> None:
    model = nnx.Dict(
        mine=nnx.Linear(I, O, rngs=nnx.Rngs(0)), drop=nnx.Dropout(0.1, rngs=nnx.Rngs(0))
    )
    source: Any = torch.nn.Sequential(torch.nn.Linear(I, O))
    assert flax.load_into(model, source) is model
    np.testing.assert_array_equal(model.mine.kernel[...].T, source[0].weight.detach())


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: stored("weight_norm"), "fill the model first, then call weight_norm"),
        (lambda: stored("parametrization"), "fill the model first, then call weight_norm"),
        *(
            (NORMED[kind], "set its scales to the norms")
            for kind in NORMED
            if kind.endswith(".WeightNorm")
        ),
        (NORMED["nnx.SpectralNorm"], "before nnx.SpectralNorm wraps it"),
    ],
)
def test_a_whole_weight_for_parts_is_asked_about_with_the_remedy(make: Any, advice: str) -> None:
    plan = match(torch.nn.Sequential(torch.nn.Linear(I, O)), make())
    assert "the source has the whole weight" in plan.questions[0].reason
    assert advice in plan.questions[0].reason
    assert "zeros are wrong" in plan.questions[0].advice()


def test_parts_that_a_file_keeps_are_named(tmp_path: Path) -> None:
    state = {k: x.numpy() for k, x in stored("parametrization").state_dict().items()}
    save_file(exported("torch", "a") | state, tmp_path / "a.safetensors")
    named = "torch computes 0.weight from 0.parametrizations.weight.original0 and others: store"
    info = pipeline.inspect(tmp_path / "a.safetensors")
    assert [why.startswith(named) for why in info.not_understood.values()] == [False, True, True]
    done = pipeline.convert(
        tmp_path / "a.safetensors", tmp_path / "b.npz", to="jaxmha", num_heads=N
    )
    assert any("carried over in parts" in note and named in note for note in done.notes)


def test_arrays_of_other_libraries_with_names_of_parts_are_arrays() -> None:
    tree = {"mlp": {"w_g": np.ones((6, 1), "f"), "w_v": np.ones((6, 5), "f")}}
    plan = match(tree, tree)
    assert [line.target for line in plan.lines] == ["mlp/w_g", "mlp/w_v"]
    assert not plan.notes


def test_the_remedy_is_also_given_for_blocks() -> None:
    """Whose arrays a question names by a pattern."""
    whole, apart = (torch.nn.Sequential(*(torch.nn.Linear(5, 7) for _ in range(3))) for _ in "ab")
    for layer in apart:
        torch.nn.utils.parametrizations.weight_norm(layer)
    reason = match(whole, apart).questions[0].reason
    assert "fill the model first, then call weight_norm" in reason
