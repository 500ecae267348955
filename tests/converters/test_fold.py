"""The scale of a layout that has another one, folded into the query."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxmha
from jaxmha import Semantics, checkpoint
from jaxmha.converters import linear
from jaxmha.converters.discovery import attention_blocks
from jaxmha.converters.layout import fold, transform
from jaxmha.converters.migrate import pipeline, plan_toml
from jaxmha.converters.verify import comparison, forward_check
from tests import drawn
from tests.converters.command_line import cli, printed, succeeds
from tests.converters.test_every_layout import model_file
from tests.tolerance import assert_close

D = 32
PREFIX = "encoder.block.0.layer.0.SelfAttention"


def t5(folder: Path, N: int, H: int, dtype: str = "float32") -> Path:
    """T5's attention, whose scale is 1."""
    rng = np.random.default_rng(0)
    shapes = {"q": (N * H, D), "k": (N * H, D), "v": (N * H, D), "o": (D, N * H)}
    state = {
        f"{PREFIX}.{name}.weight": rng.normal(size=shape).astype(dtype) / 8
        for name, shape in shapes.items()
    }
    return model_file(
        folder / "t5.safetensors",
        {name: array.astype(dtype) for name, array in state.items()},
        {"num_heads": N},
    )


def output(path: Path, layout: str) -> Any:
    with checkpoint.open(path) as file:
        shapes = {name: info.shape for name, info in file.info.items()}
        (block,) = attention_blocks.find(shapes, [attention_blocks.named(layout)])
        params, semantics = block.read(file, None if block.layout.stores_num_heads else 4)
    x = np.random.default_rng(1).normal(size=(2, 5, D)).astype(np.float32)
    return np.asarray(jaxmha.multi_head_attention(params, x, semantics=semantics))


TARGETS = ["flax", "keras", "torch", "linear", "llama", "dense", "equinox", "haiku", "gpt-neox"]


@pytest.mark.everyday(to=["flax", "torch"])
@pytest.mark.parametrize("to", TARGETS)
def test_t5_goes_everywhere_and_comes_back(to: str, tmp_path: Path) -> None:
    N, H = (4, 8) if to in ("torch", "equinox", "gpt-neox") else (4, 16)  # some tie the width
    source, present, back = (
        t5(tmp_path, N, H),
        tmp_path / "a.safetensors",
        tmp_path / "b.safetensors",
    )
    refused = cli("convert", source, present, "--to", to)
    assert refused.exit_code == 2
    assert "--fold-scale" in printed(refused)
    assert "Semantics(scale=1.0)" in printed(refused)
    done = succeeds("convert", source, present, "--to", to, "--fold-scale")
    exact = H == 16
    assert ("a power of two, so that no digit changes" in printed(done)) is exact
    assert ("is rounded by up to 6e-08 of itself (float32)" in printed(done)) is not exact
    assert "verified" in printed(done)
    assert_close(output(present, to), output(source, "t5"), factor=8)
    done = succeeds("convert", present, back, "--to", "t5", "--fold-scale")
    with checkpoint.open(source) as a, checkpoint.open(back) as b:
        for name in a:
            if exact or ".q." not in name:
                np.testing.assert_array_equal(a[name], b[name], err_msg=name)
            np.testing.assert_allclose(a[name], b[name], rtol=3e-7)


def test_a_plan_says_it(tmp_path: Path) -> None:
    source, plan = t5(tmp_path, 4, 16), tmp_path / "plan.toml"
    assert cli("plan", source, "--to", "flax", "--fold-scale", "-o", plan).exit_code == 0
    assert plan_toml.read(plan).fold_scale
    assert "fold_scale = true" in plan.read_text()
    done = cli("convert", source, tmp_path / "a.npz", "--plan", plan)
    assert (done.exit_code, "verified" in printed(done)) == (0, True), printed(done)


def test_biases_are_multiplied_too() -> None:
    params = drawn.params(num_heads=4, features=16, head_dim=16)
    rng = np.random.default_rng(0)
    bias = rng.normal(size=(4, 16)).astype(np.float32)
    params = params._replace(query=params.query._replace(bias=bias))
    x = rng.normal(size=(2, 5, 16)).astype(np.float32)
    for semantics in (Semantics(scale=1.0), Semantics(scale=0.3), Semantics(scale=-2.0)):
        expected = oracle_of(params, x, semantics)
        for state in (
            linear.export_params(params, semantics, layout="linear", fold_scale=True),
            linear.export_params(params, semantics, fold_scale=True),
        ):
            again, own = linear.import_params(state, num_heads=4)
            assert own.scale is None
            assert_close(oracle_of(again, x, own), expected, factor=8)


def test_where_queries_are_normalised_their_norm_is_multiplied() -> None:
    """A kernel before the norm would change nothing."""
    rng = np.random.default_rng(0)
    params = drawn.params(num_heads=2, features=8)
    norm = rng.uniform(0.5, 2, size=4).astype(np.float32)
    params = params._replace(query_norm=norm, key_norm=norm[::-1].copy())
    semantics = Semantics(scale=2.0, qk_norm="layer")
    folded, own = fold.fold(params, semantics, attention_blocks.named("flax"))
    np.testing.assert_array_equal(folded.query.kernel, params.query.kernel)
    x = rng.normal(size=(2, 5, 8)).astype(np.float32)
    assert_close(oracle_of(folded, x, own), oracle_of(params, x, semantics), factor=8)


def test_a_dtype_without_the_range_is_refused() -> None:
    for value, by, fine in ((60000.0, 4.0, False), (1e-7, 0.25, False), (1.0, 4.0, True)):
        array = np.full(3, value, np.float16)
        if fine:
            assert (fold.times(array, by, "q") == value * by).all()
            continue
        with pytest.raises(ValueError, match=r"q times .* leaves the range of float16"):
            fold.times(array, by, "q")


def test_the_same_scale_changes_nothing() -> None:
    params = drawn.params(num_heads=3, features=15)
    layout = attention_blocks.named("flax")
    for semantics in (Semantics(), Semantics(scale=5**-0.5)):
        folded, _ = jax.jit(partial(fold.fold, semantics=semantics, target=layout))(params)
        np.testing.assert_array_equal(folded.query.kernel, params.query.kernel)
    with pytest.raises(TypeError, match=r"fold_scale multiplies query.* needs values"):
        jax.eval_shape(partial(fold.fold, semantics=Semantics(scale=1.0), target=layout), params)
    with pytest.raises(ValueError, match=r"--fold-scale.*Semantics\(scale=1.0\)"):
        transform.export_params(layout, params, Semantics(scale=1.0))


def test_states_in_memory(tmp_path: Path) -> None:
    with checkpoint.open(t5(tmp_path, 4, 16)) as file:
        state = dict(file)
    with pytest.raises(ValueError, match="--fold-scale"):
        pipeline.convert_state(state, to="flax", num_heads=4)
    made = pipeline.convert_state(state, to="flax", num_heads=4, fold_scale=True)
    (name,) = [name for name in made if "query/kernel" in name]
    expected = state[f"{PREFIX}.q.weight"].T.reshape(D, 4, 16) * np.float32(4)
    np.testing.assert_array_equal(made[name], expected)


def oracle_of(params: Any, x: Any, semantics: Semantics) -> Any:
    return np.asarray(jaxmha.multi_head_attention(params, x, semantics=semantics))


def test_verify_does_not_call_a_folded_scale_missing() -> None:
    """Outputs are the same, so that nothing is missing."""
    params = drawn.params(num_heads=2, features=8)
    ours = params, Semantics(scale=1.0)
    (block,) = comparison.compare(ours, fold.fold(*ours, attention_blocks.named("flax"))).blocks
    assert not block.same
    assert block.explanation == "the scale is folded into the query: outputs are the same"
    swapped = comparison.compare(fold.fold(*ours, attention_blocks.named("flax")), ours)
    assert swapped.blocks[0].explanation == block.explanation
    (block,) = comparison.compare(ours, (params, Semantics())).blocks
    assert block.explanation == forward_check.MISSING_SCALE


@pytest.mark.everyday(dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_verify_recognises_a_factor_that_rounds(dtype: str | None, tmp_path: Path) -> None:
    """The square root of 8 rounds every number of the query, and outputs with them."""
    source, present = t5(tmp_path, 4, 8), tmp_path / "a.safetensors"
    pipeline.convert(source, present, to="flax", fold_scale=True, dtype=dtype)
    found = comparison.compare(source, present, dtype=dtype)
    (block,) = found.blocks
    assert not found.same
    assert block.explanation is not None
    assert "the scale is folded into the query, times 2.82843: " in block.explanation
    assert "rounding" in block.explanation
    assert "jaxmha convert --fold-scale" in found.notes[-1]
    (block,) = comparison.compare(present, source).blocks
    assert "times 0.353553" in str(block)
    assert "the scale is folded into the query, times 2.82843: " in printed(
        cli("diff", source, present)
    )


def test_verify_names_no_folded_scale_where_more_differs() -> None:
    params = drawn.params(num_heads=2, features=6)
    ours = params, Semantics(scale=1.0)
    folded, own = fold.fold(*ours, attention_blocks.named("flax"))
    kernel = np.array(folded.value.kernel)
    kernel[0, 0, 0] += 1e-3
    other = folded._replace(value=folded.value._replace(kernel=kernel))
    found = comparison.compare(ours, (other, own))
    assert "folded" not in str(found)
    assert "folded" in str(comparison.compare(ours, (folded, own)))
    assert "folded" not in str(comparison.compare(ours, (folded, Semantics(scale=0.0))))
