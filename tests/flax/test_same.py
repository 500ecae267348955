"""Modules of jaxmha are flax's own: outputs, initial values, masks and sown weights."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmha import Semantics
from jaxmha.flax import linen as ours_linen
from jaxmha.flax import nnx as ours_nnx
from tests.flax.common import (
    DK,
    DQ,
    B,
    H,
    N,
    Row,
    T,
    by_numpy,
    inputs,
    normal,
    pairs,
    plain,
    randomise,
    shapes,
    state_of,
    structure,
    theirs,
)
from tests.flax.rows import INITS, LINEN, NNX, NORM, WIDE, agree, widths
from tests.tolerance import assert_close, assert_same


@pytest.mark.everyday(row=["as wide as the input", "normalize_qk", "half", "three widths"])
@pytest.mark.slow_variants("normalize_qk", "three widths", "half")
@pytest.mark.parametrize("row", LINEN)
def test_linen(row: Row) -> None:
    flax, ours = (
        module.MultiHeadDotProductAttention(**row.settings) for module in (nn, ours_linen)
    )
    x = inputs(row, widths(row))
    variables = theirs(jax.eval_shape, flax.init, jax.random.key(3), *x)
    mine = jax.eval_shape(ours.init, jax.random.key(3), *x)
    assert shapes(mine) == shapes(variables)
    assert structure(mine) == structure(variables)
    variables = randomise(variables)
    mask = pairs(x[-1].shape[1])
    expected = theirs(flax.apply, variables, *x, mask=mask)
    actual = ours.apply(variables, *x, mask=mask)
    agree(actual, expected, row)


@pytest.mark.everyday(row=["normalize_qk", "dtype", "num_kv_heads"])
@pytest.mark.slow_variants("num_kv_heads", "dtype")
@pytest.mark.parametrize("row", NNX)
def test_nnx(row: Row) -> None:
    Dq, Dk, _ = widths(row)
    settings = {"in_features": Dq, "decode": False, **row.settings}
    if row.inputs == 2:
        settings["in_kv_features"] = Dk
    flax, ours = (
        theirs(nnx.eval_shape, lambda: module.MultiHeadAttention(rngs=nnx.Rngs(3), **settings))  # noqa: B023
        for module in (nnx, ours_nnx)
    )
    assert shapes(nnx.state(ours)) == shapes(nnx.state(flax))
    state = randomise(nnx.state(flax, nnx.Param))
    nnx.update(flax, state)
    nnx.update(ours, state)
    x = inputs(row, widths(row))
    heads = 2 if row.name == "num_kv_heads" else 1
    mask = np.repeat(pairs(x[-1].shape[1]), heads, axis=1)
    out = theirs(flax, *x, mask=mask)
    actual = ours(*x, mask=mask)
    agree(actual, out, row)


QUICK = jax.random.key(3, impl="unsafe_rbg")  # draws in small programs
DRAWN = (
    Row("every initialiser", {**WIDE, **INITS, **NORM}, 2),
    Row("defaults", {**WIDE, "dropout_rate": 0.1}, 2),
    Row("no biases", {**WIDE, "use_bias": False, "kernel_init": INITS["kernel_init"]}, 1),
    Row("half", {**WIDE, **INITS, "param_dtype": jnp.bfloat16}, 2, "bfloat16"),
)


@pytest.mark.everyday(row=["every initialiser"])
@pytest.mark.parametrize("row", DRAWN)
def test_initial_values_of_linen(row: Row) -> None:
    x = inputs(row)
    settings = {**row.settings, "deterministic": True}
    expected, actual = (
        plain(theirs(jax.jit(module.MultiHeadAttention(**settings).init), QUICK, *x))
        for module in (nn, ours_linen)
    )
    assert list(actual) == list(expected)
    for name in expected:
        assert_same(actual[name], expected[name], name)


GROUPED = Row("grouped", {**INITS, "num_heads": 2 * N, "qkv_features": 2 * N * H,
                          "num_kv_heads": N}, 2)  # fmt: skip


@pytest.mark.everyday(row=["every initialiser"])
@pytest.mark.parametrize("row", [*DRAWN, GROUPED])
def test_initial_values_of_nnx(row: Row) -> None:
    settings = {**row.settings, "in_features": DQ, "in_kv_features": (DQ, DK)[row.inputs - 1]}
    expected, actual = (
        state_of(theirs(module.MultiHeadAttention, rngs=nnx.Rngs(QUICK), **settings))
        for module in (nnx, ours_nnx)
    )
    assert list(actual) == list(expected)
    for name in expected:
        assert_same(actual[name], expected[name], name)


def test_call_arguments_of_linen() -> None:
    flax, ours = (module.MultiHeadAttention(**WIDE) for module in (nn, ours_linen))
    x = inputs(Row("", {}, 2))
    variables = randomise(theirs(jax.eval_shape, flax.init, jax.random.key(0), *x))
    expected = theirs(flax.apply, variables, *x)
    with pytest.warns(DeprecationWarning, match="inputs_kv"):
        assert_close(ours.apply(variables, x[0], inputs_kv=x[1]), expected)
    assert_close(ours.apply(variables, x[0], x[1], x[1]), expected)
    for wrong in ({"inputs_v": x[1]}, {"inputs_kv": x[1], "inputs_k": x[1]}):
        with pytest.raises(ValueError, match="inputs_k"):
            ours.apply(variables, x[0], **wrong)


@pytest.mark.slow
def test_masks_of_every_rank_and_dtype(no_shape_hook: None) -> None:
    flax, ours = (module.MultiHeadAttention(**WIDE) for module in (nn, ours_linen))
    (x,) = inputs(Row("", {}))
    variables = randomise(theirs(jax.eval_shape, flax.init, jax.random.key(0), x))
    causal = nn.make_causal_mask(jnp.ones((B, T)))
    full = pairs(T)
    for mask in (causal, full.astype(jnp.int32)[0]):
        expected = theirs(flax.apply, variables, x, mask=mask)
        assert_close(ours.apply(variables, x, mask=mask), expected, str(mask.shape))
    with pytest.raises(ValueError, match="mask: expected axes"):
        ours.apply(variables, x, mask=full[..., :3])
    with pytest.raises(TypeError, match="mask must be an array"):
        ours.apply(variables, x, mask=[[True]])


@pytest.mark.slow
def test_any_number_of_batch_axes() -> None:
    flax, ours = (module.MultiHeadAttention(**WIDE) for module in (nn, ours_linen))
    x = normal("many", (2, 3, T, DQ))
    mask = jnp.broadcast_to(pairs(T)[:, None], (2, 3, N, T, T))
    variables = randomise(theirs(jax.eval_shape, flax.init, jax.random.key(0), x))
    expected = theirs(flax.apply, variables, x, mask=mask)
    assert_close(ours.apply(variables, x, mask=mask), expected)
    assert_close(ours.apply(variables, x[0, 0], mask=mask[0, 0]), expected[0, 0])


@pytest.mark.slow
def test_causal_of_nnx() -> None:
    settings = {**WIDE, "in_features": DQ, "decode": False}
    flax = theirs(nnx.MultiHeadAttention, rngs=nnx.Rngs(3), **settings)
    ours = ours_nnx.MultiHeadAttention(rngs=nnx.Rngs(3), **settings)
    (x,) = inputs(Row("", {}))
    expected = theirs(flax, x, mask=pairs(T) & jnp.tri(T, dtype=bool)[None, None])
    assert_close(ours(x, mask=pairs(T), is_causal=True), expected)


def test_fully_masked_rows() -> None:
    x = inputs(Row("", {}, 2))
    flax = nn.MultiHeadAttention(**WIDE)
    variables = randomise(theirs(jax.eval_shape, flax.init, jax.random.key(0), *x))
    mask = pairs(x[1].shape[1], empty=True)
    run = jax.jit(flax.apply)
    expected = theirs(run, variables, *x, mask=mask)
    preset = ours_linen.MultiHeadAttention(**WIDE, semantics=Semantics.flax())
    assert_close(preset.apply(variables, *x, mask=mask), expected)

    one_head = mask[:, 1:2]  # head 1 of row (0, 2) is empty: now every head is
    own = ours_linen.MultiHeadAttention(**WIDE)
    out = jax.jit(own.apply)(variables, *x, mask=one_head)
    assert_same(out[0, 2], variables["params"]["out"]["bias"])
    assert_close(out[1], theirs(run, variables, *x, mask=one_head)[1])

    settings = {**WIDE, "in_features": DQ, "in_kv_features": DK, "decode": False}
    settings["kernel_init"] = by_numpy
    theirs_nnx = theirs(nnx.MultiHeadAttention, rngs=nnx.Rngs(3), **settings)
    preset_nnx = ours_nnx.MultiHeadAttention(
        rngs=nnx.Rngs(3), semantics=Semantics.flax("fused"), **settings
    )
    called = nnx.jit(lambda module, *x: module(*x, mask=mask))
    assert_close(preset_nnx(*x, mask=mask), theirs(called, theirs_nnx, *x))


def test_sown_weights() -> None:
    (x,) = inputs(Row("", {}))
    mask = pairs(T)
    flax, ours = (module.MultiHeadAttention(**WIDE) for module in (nn, ours_linen))
    variables = randomise(theirs(jax.eval_shape, flax.init, jax.random.key(0), x))
    sown = [
        theirs(module.apply, variables, x, mask=mask, sow_weights=True, mutable=["intermediates"])
        for module in (flax, ours)
    ]
    assert structure(sown[1]) == structure(sown[0])
    for actual, expected in zip(*(jax.tree.leaves(y) for y in reversed(sown)), strict=True):
        assert_close(actual, expected)

    settings = {**WIDE, "in_features": DQ, "decode": False, "kernel_init": by_numpy}
    layers = [
        theirs(module.MultiHeadAttention, rngs=nnx.Rngs(3), **settings)
        for module in (nnx, ours_nnx)
    ]
    trees = []
    for layer in layers:
        run = nnx.capture(lambda m, x: m(x, mask=mask, sow_weights=True), nnx.Intermediate)
        trees.append(plain(theirs(run, layer, x)[1]))
    assert list(trees[1]) == list(trees[0])
    assert len(trees[0]) == 1
    for name in trees[0]:
        assert_close(trees[1][name], trees[0][name], name)
