"""Modules of jaxmha are flax's own, for every constructor argument that both have."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmha import Semantics
from jaxmha.flax import attention_fn
from jaxmha.flax import linen as ours_linen
from jaxmha.flax import nnx as ours_nnx
from tests.flax.common import (
    DK,
    DO,
    DQ,
    B,
    H,
    N,
    Row,
    T,
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
from tests.tolerance import FLOORS, LAYER, assert_close, assert_same, error

WIDE: dict[str, Any] = {"num_heads": N, "qkv_features": N * H}
ZEROS: dict[str, Any] = {"kernel_init": nn.initializers.zeros_init()}
INITS: dict[str, Any] = {
    "kernel_init": nn.initializers.he_normal(),
    "out_kernel_init": nn.initializers.xavier_normal(),
    "bias_init": nn.initializers.normal(0.5),
    "out_bias_init": nn.initializers.constant(2.0),
}
NORM = {"normalize_qk": True}
DROPOUT = {"dropout_rate": 0.5, "deterministic": True}
BOTH = (
    Row("as wide as the input", {"num_heads": N}),
    Row("out_features, precision, initialisers",
        {**WIDE, **INITS, "out_features": DO, "precision": jax.lax.Precision.HIGHEST}, 2),
    Row("no biases, no dropout", {**WIDE, **DROPOUT, "use_bias": False,
                                  "broadcast_dropout": False}),
    Row("normalize_qk", {**WIDE, **NORM}, 2),
    Row("dtype", {**WIDE, "dtype": jnp.bfloat16}),
    Row("half", {**WIDE, **NORM, "param_dtype": jnp.bfloat16}, 2, "bfloat16"),
)  # fmt: skip
LINEN = (
    *BOTH,
    Row("three widths", {**WIDE, "attention_fn": nn.dot_product_attention}, 3),
    Row("half parameters, force_fp32_for_softmax",
        {**WIDE, "param_dtype": jnp.bfloat16, "force_fp32_for_softmax": True}, 1, "bfloat16"),
)  # fmt: skip
NNX = (
    *BOTH,
    Row("num_kv_heads", {**DROPOUT, "num_heads": 2 * N, "qkv_features": 2 * N * H,
                         "num_kv_heads": N, "keep_rngs": False,
                         "attention_fn": nnx.dot_product_attention}, 2),
)  # fmt: skip


def widths(row: Row) -> tuple[int, int, int]:
    Dq = DQ if "qkv_features" in row.settings else 7 * N
    return (Dq, DK, 23) if row.inputs == 3 else (Dq, DK, DK)


def agree(actual: Any, expected: Any, row: Row, what: str = "") -> None:
    """Asserts equal outputs, in floors of the dtype that the row computes in.

    Two results in half precision have each their own roundings, also those of flax's heads where
    the output is float32.
    """
    assert actual.dtype == expected.dtype
    dtype = np.dtype(row.settings.get("dtype", row.dtype))
    allowed = FLOORS[dtype.name] * (LAYER if dtype.itemsize == 2 else 1)
    assert error(actual, np.asarray(expected), dtype) <= allowed, what or row.name


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
        plain(theirs(jax.jit(module.MultiHeadAttention(**settings).init), jax.random.key(3), *x))
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
        state_of(theirs(module.MultiHeadAttention, rngs=nnx.Rngs(3), **settings))
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
    expected = theirs(flax.apply, variables, *x, mask=mask)
    preset = ours_linen.MultiHeadAttention(**WIDE, semantics=Semantics.flax())
    assert_close(preset.apply(variables, *x, mask=mask), expected)

    one_head = mask[:, 1:2]  # head 1 of row (0, 2) is empty: now every head is
    own = ours_linen.MultiHeadAttention(**WIDE)
    out = jax.jit(own.apply)(variables, *x, mask=one_head)
    assert_same(out[0, 2], variables["params"]["out"]["bias"])
    assert_close(out[1], theirs(flax.apply, variables, *x, mask=one_head)[1])

    settings = {**WIDE, "in_features": DQ, "in_kv_features": DK, "decode": False}
    theirs_nnx = theirs(nnx.MultiHeadAttention, rngs=nnx.Rngs(3), **settings)
    preset_nnx = ours_nnx.MultiHeadAttention(
        rngs=nnx.Rngs(3), semantics=Semantics.flax("fused"), **settings
    )
    assert_close(preset_nnx(*x, mask=mask), theirs(theirs_nnx, *x, mask=mask))


def test_gradients_of_linen() -> None:
    settings = {**WIDE, **ZEROS, "normalize_qk": True, "out_features": DO}
    flax, ours = (module.MultiHeadAttention(**settings) for module in (nn, ours_linen))
    x = inputs(Row("", {}, 3))
    variables = randomise(theirs(jax.eval_shape, flax.init, jax.random.key(0), *x))
    mask = pairs(x[1].shape[1])
    cotangent = normal("cotangent", (B, T, DO))

    def loss(module: Any) -> Any:
        return jax.grad(lambda v, x: jnp.vdot(module.apply(v, *x, mask=mask), cotangent), (0, 1))

    expected = theirs(jax.jit(loss(flax)), variables, x)
    actual = jax.jit(loss(ours))(variables, x)
    assert structure(actual) == structure(expected)
    for (name, a), e in zip(plain(actual).items(), plain(expected).values(), strict=True):
        # The gradient of a bias of keys is 0 but for noise at the scale of the others.
        if "key" in name and "bias" in name:
            assert np.abs(a - e).max() < 1e-5
        else:
            assert_close(a, e, name, factor=2)


@pytest.mark.slow
def test_gradients_of_nnx() -> None:
    settings = {**WIDE, "in_features": DQ, "decode": False}
    flax = theirs(nnx.MultiHeadAttention, rngs=nnx.Rngs(3), **settings)
    ours = ours_nnx.MultiHeadAttention(rngs=nnx.Rngs(3), **settings)
    (x,) = inputs(Row("", {}))
    cotangent = normal("cotangent", (B, T, DQ))

    def grads(module: Any) -> Any:
        return nnx.grad(lambda m, x: jnp.vdot(m(x, mask=pairs(T)), cotangent))(module, x)

    expected, actual = theirs(nnx.jit(grads), flax), nnx.jit(grads)(ours)
    for (name, a), e in zip(plain(actual).items(), plain(expected).values(), strict=True):
        if "key" in name and "bias" in name:
            assert np.abs(a - e).max() < 1e-5
        else:
            assert_close(a, e, name, factor=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broadcast", "how"),
    [
        (False, "module"),
        pytest.param(None, "module", marks=pytest.mark.slow),
        pytest.param(False, "attention_fn", marks=pytest.mark.slow),
        pytest.param(True, "attention_fn", marks=pytest.mark.slow),
    ],
)
def test_dropout_is_distributed_as_in_flax(broadcast: bool | None, how: str) -> None:
    """With values of one, an output is the kept weight of its row over the rate kept."""
    rate, T, S = 0.3, 101, 103
    settings: dict[str, Any] = {"num_heads": 2, "qkv_features": 2, "dropout_rate": rate, "deterministic": False,
                "use_bias": False, "out_features": 2}  # fmt: skip
    if broadcast is not None:
        settings["broadcast_dropout"] = broadcast
    flax = nn.MultiHeadAttention(**settings)
    if how == "module":
        other = ours_linen.MultiHeadAttention(**settings)
    else:
        other = flax.clone(attention_fn=attention_fn)
    x, y = jnp.zeros((2, T, 2)), jnp.ones((2, S, 2))
    params = {name: {"kernel": jnp.eye(2).reshape(2, 2, 1)} for name in ("query", "key", "value")}
    params["out"] = {"kernel": jnp.eye(2).reshape(2, 1, 2)}
    outs = [
        theirs(layer.apply, {"params": params}, x, y, rngs={"dropout": jax.random.key(1)})
        for layer in (flax, other)
    ]
    kept = 1 - rate
    for out in outs:
        shared = broadcast is not False
        assert bool(jnp.array_equal(out[0], out[1])) == shared
        assert bool(jnp.array_equal(out[..., 0], out[..., 1])) == shared
        rows = 1 if shared else 4
        deviation = (rate / kept / (rows * T * S)) ** 0.5
        assert abs(float(out.mean()) - 1) < 5 * deviation
        row = (rate / kept / S) ** 0.5
        assert abs(float(out.std()) / row - 1) < 5 / (2 * rows * T) ** 0.5


def test_dropout_needs_to_be_asked_for() -> None:
    (x,) = inputs(Row("", {}))
    layer = ours_nnx.MultiHeadAttention(N, 21, dropout_rate=0.5, rngs=nnx.Rngs(0))
    x = normal("x", (B, T, 21))
    with pytest.raises(ValueError, match="deterministic"):
        layer(x)
    first, second = layer(x, deterministic=False), layer(x, deterministic=False)
    assert not np.array_equal(first, second)
    layer.eval()
    assert_same(layer(x), layer(x, deterministic=True))
    bare = ours_nnx.MultiHeadAttention(
        N, 21, dropout_rate=0.5, keep_rngs=False, rngs=nnx.Rngs(0), deterministic=False
    )
    with pytest.raises(ValueError, match="rngs"):
        bare(x)
    assert_same(bare(x, rngs=nnx.Rngs(5)), bare(x, rngs=nnx.Rngs(5)))
    assert_same(bare(x, rngs=nnx.Rngs(5).dropout), bare(x, rngs=nnx.Rngs(5)))
    linen = ours_linen.MultiHeadAttention(N, dropout_rate=0.5)
    with pytest.raises(ValueError, match="deterministic"):
        linen.init(jax.random.key(0), x)
    variables = linen.init(jax.random.key(0), x, deterministic=True)
    given = linen.apply(variables, x, deterministic=False, dropout_rng=jax.random.key(7))
    again = linen.apply(variables, x, deterministic=False, dropout_rng=jax.random.key(7))
    assert_same(given, again)
    assert not np.array_equal(given, linen.apply(variables, x, deterministic=True))


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

    settings = {**WIDE, "in_features": DQ, "decode": False}
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


HOOK = {"match": "computes this itself"}


@pytest.mark.parametrize(
    "name",
    ["attention_fn", "qkv_dot_general", "out_dot_general", "qkv_dot_general_cls",
     "out_dot_general_cls", "qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"],
)  # fmt: skip
def test_hooks_are_refused_by_linen(name: str) -> None:
    layer = ours_linen.MultiHeadAttention(N, **{name: print})
    with pytest.raises(ValueError, match=f"{name}=print.*{HOOK['match']}"):
        layer.init(jax.random.key(0), jnp.ones((T, N)))


@pytest.mark.parametrize(
    "name",
    ["attention_fn", "qkv_dot_general", "out_dot_general", "qkv_dot_general_cls",
     "out_dot_general_cls", "qkv_promote_dtype", "out_promote_dtype", "ln_promote_dtype"],
)  # fmt: skip
def test_hooks_are_refused_by_nnx(name: str) -> None:
    hook: dict[str, Any] = {name: print}
    with pytest.raises(ValueError, match=f"{name}=print.*{HOOK['match']}"):
        ours_nnx.MultiHeadAttention(N, N, rngs=nnx.Rngs(0), **hook)


def test_shardings_of_a_call_are_refused() -> None:
    layer = ours_nnx.MultiHeadAttention(N, N, rngs=nnx.Rngs(0))
    for name in ("out_sharding", "qkv_sharding"):
        call: dict[str, Any] = {name: "data"}
        with pytest.raises(ValueError, match=name):
            layer(jnp.ones((T, N)), **call)
