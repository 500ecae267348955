"""Biases of zeros, for layouts that require biases which a layer lacks."""

from functools import cache
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
import pytest

import jaxmha
from jaxmha import MHAParams, Projection, Semantics, checkpoint
from jaxmha.converters import flax, huggingface
from jaxmha.converters.layout import fill, registry, transform
from jaxmha.converters.layout.flax import LINEN
from jaxmha.converters.migrate import pipeline, plan_toml
from jaxmha.converters.verify import report
from jaxmha.params import leaves
from tests import drawn
from tests.converters.command_line import cli, printed, succeeds
from tests.converters.test_every_layout import model_file
from tests.tolerance import assert_close

N, D = 3, 15
PREFIX = "model.encoder.layers.0.self_attn"
# Layout of a file -> the parts of its attention without a bias.
LACKING = {"whisper": ("key",), "llama": ("out",)}


@cache
def without(*lacking: str) -> MHAParams:
    """Parameters with a random bias of every part, except some."""
    params = drawn.params(num_heads=N, features=D)
    rng = np.random.default_rng(0)

    def biased(name: str, axes: tuple[int, ...]) -> Projection:
        part: Projection = getattr(params, name)
        bias = rng.normal(size=axes).astype(np.float32)
        return part._replace(bias=None if name in lacking else bias)

    query, key, value = (biased(name, (N, D // N)) for name in ("query", "key", "value"))
    return MHAParams(query, key, value, biased("out", (D,)))


def saved(folder: Path, layout: str, dtype: str = "float32") -> Path:
    """A file with such attention, and its configuration."""
    params = without(*LACKING[layout])
    state = transform.export_params(registry.named(layout), params, prefix=PREFIX)
    return model_file(
        folder / "model.safetensors",
        {name: array.astype(dtype) for name, array in state.items()},
        {"num_attention_heads": N},
    )


@pytest.mark.everyday(layout=["llama"])
@pytest.mark.parametrize("layout", LACKING)
def test_flax_computes_the_same_with_biases_of_zeros(layout: str, tmp_path: Path) -> None:
    source, made = saved(tmp_path, layout), tmp_path / "flax.safetensors"
    refused = cli("convert", source, made, "--to", "flax")
    assert refused.exit_code == 2
    assert "--fill-bias zeros" in printed(refused)
    assert not made.exists()
    done = succeeds("convert", source, made, "--to", "flax", "--fill-bias", "zeros")
    assert "verified" in printed(done)
    filled = f"{LACKING[layout][0]}.bias"
    assert f"{filled} filled with zeros: layout flax requires" in printed(done)
    x = np.random.default_rng(1).normal(size=(2, 7, D)).astype(np.float32)
    with checkpoint.open(made) as file:
        prefix = f"{PREFIX.replace('.', '/')}/"
        flat = {tuple(name.removeprefix(prefix).split("/")): file[name] for name in file}
    assert not flat[LACKING[layout][0], "bias"].any()
    assert all(flat[part, "bias"].any() for part in ("query", "value"))
    layer = nn.MultiHeadDotProductAttention(num_heads=N, qkv_features=D, out_features=D)
    tree = {part: {"kernel": flat[part, "kernel"], "bias": flat[part, "bias"]} for part, _ in flat}
    expected = jaxmha.multi_head_attention(without(*LACKING[layout]), x)
    assert_close(np.asarray(layer.apply({"params": tree}, x)), np.asarray(expected), factor=8)


def test_a_plan_says_it_and_shows_zeros(tmp_path: Path) -> None:
    source, plan = saved(tmp_path, "whisper"), tmp_path / "plan.toml"
    done = succeeds("plan", source, "--to", "flax", "--fill-bias", "zeros", "-o", plan)
    assert "zeros -> model/encoder/layers/0/self_attn/key/bias (3, 5) zeros -> K H" in printed(done)
    assert plan_toml.read(plan).fill_bias == "zeros"
    done = cli("convert", source, tmp_path / "a.npz", "--plan", plan)
    assert (done.exit_code, "verified" in printed(done)) == (0, True), printed(done)
    plan.write_text(plan.read_text().replace('fill_bias = "zeros"', 'fill_bias = "ones"'))
    done = cli("convert", source, tmp_path / "b.npz", "--plan", plan)
    assert (done.exit_code, "fill_bias must be zeros" in printed(done)) == (2, True)


def test_the_comparison_sees_a_bias_that_is_not_zero(tmp_path: Path) -> None:
    source, made = saved(tmp_path, "whisper"), tmp_path / "flax.safetensors"
    done = pipeline.convert(source, made, to="flax", fill_bias="zeros")
    assert done.plan is not None
    assert report.check(source, made, done.plan).same
    with checkpoint.open(made) as file:
        state, metadata = {name: np.array(file[name]) for name in file}, dict(file.metadata)
    (name,) = [name for name in state if name.endswith("key/bias")]
    state[name][1, 2] = 1.0
    checkpoint.write(made, state, metadata=metadata, force=True)
    (found,) = report.check(source, made, done.plan).modules
    assert found.differences == ("key.bias: 1 of 15 elements differ",)


def test_a_packed_bias_is_filled_in_its_dtype(tmp_path: Path) -> None:
    """The other parts of the packed bias are kept, and the dtype of the file."""
    source = saved(tmp_path, "whisper", "float16")
    made = tmp_path / "torch.safetensors"
    pipeline.convert(source, made, to="torch", fill_bias="zeros")
    with checkpoint.open(source) as a, checkpoint.open(made) as b:
        packed = b[f"{PREFIX}.in_proj_bias"].reshape(3, D)
        assert packed.dtype == np.float16
        np.testing.assert_array_equal(packed[0], a[f"{PREFIX}.q_proj.bias"])
        np.testing.assert_array_equal(packed[1], 0)
        np.testing.assert_array_equal(packed[2], a[f"{PREFIX}.v_proj.bias"])


@pytest.mark.parametrize("layout", registry.LAYOUTS, ids=lambda layout: layout.name)
def test_no_layout_lacks_biases_after_it(layout: Any) -> None:
    """Every layout: no bias is missing that could be filled, and nothing but biases is added."""
    for lacking in (
        ("key",),
        ("out",),
        ("query", "key", "value"),
        ("query", "key", "value", "out"),
    ):
        params, added = fill.filled(without(*lacking), layout, "zeros")
        assert all(name.endswith(".bias") and not array.any() for name, array in added.items())
        assert not fill.missing(layout, leaves(params))
        jaxmha.params.check(params)


def test_parameters_and_states() -> None:
    params = without("key")
    with pytest.raises(ValueError, match=r"fill_bias='zeros' \(--fill-bias zeros\)"):
        flax.export_params(params)
    state = flax.export_params(params, Semantics(scale=1.0), fold_scale=True, fill_bias="zeros")
    assert not state["key/bias"].any()
    other = huggingface.export_params(params, layout="whisper", prefix=PREFIX)
    made = pipeline.convert_state(other, to="flax", num_heads=N, fill_bias="zeros")
    assert sum(name.endswith("bias") for name in made) == 4
    with pytest.raises(ValueError, match="fill_bias must be None or zeros, got 'ones'"):
        flax.export_params(params, fill_bias="ones")


def test_biases_of_stacked_layers_and_of_gates() -> None:
    kernel = np.ones((2, 7, N, 5), np.float32)
    stacked = {f"{name}.kernel": kernel for name in ("query", "key", "value")}
    added = fill.missing(LINEN, stacked | {"key.bias": np.ones((2, N, 5), np.float32)})
    assert {name: array.shape for name, array in added.items()} == {
        "query.bias": (2, N, 5),
        "value.bias": (2, N, 5),
    }
    gated = registry.named("llama-norm-gate-bias")
    for name, axes in (("gate.kernel", (7, N, 5)), ("gate_heads.kernel", (7, N))):
        added = fill.missing(gated, stacked | {name: np.ones((2, *axes), np.float32)})
        assert added["gate_heads.bias"].shape == (2, N)


def test_an_extra_position_is_not_filled() -> None:
    """Keys of zeros take part in the softmax."""
    for layout in registry.LAYOUTS:
        some = leaves(without()) | {"bias_k": np.ones((N, 5), np.float32)}
        assert "bias_v" not in fill.missing(layout, some)


def test_biases_of_zeros_are_dropped_on_the_way_back(tmp_path: Path) -> None:
    source, made = saved(tmp_path, "whisper"), tmp_path / "flax.safetensors"
    back = tmp_path / "back.safetensors"
    cli("convert", source, made, "--to", "flax", "--fill-bias", "zeros")
    done = succeeds("convert", made, back, "--to", "whisper")
    assert "key.bias dropped: every number is zero" in printed(done)
    assert "verified" in printed(done)
    with checkpoint.open(source) as a, checkpoint.open(back) as b:
        assert a.info.keys() == b.info.keys()
        assert all(a[name].tobytes() == b[name].tobytes() for name in a.info)
    with checkpoint.open(made) as file:
        state = {name: np.array(file[name]) for name in file.info}
    name = next(name for name in state if name.endswith("key/bias"))
    state[name][0, 0] = 1e-30
    checkpoint.write(made, state, force=True)
    refused = cli("convert", made, back, "--to", "whisper", "--force")
    assert refused.exit_code == 2
    assert "key.bias" in printed(refused)
