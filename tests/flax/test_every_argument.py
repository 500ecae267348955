"""No argument of flax is forgotten: gradients, decoding and dropout for the whole grid."""

import inspect
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization

from jaxmha import Semantics
from jaxmha.flax import attention_fn
from jaxmha.flax import linen as ours_linen
from jaxmha.flax import nnx as ours_nnx
from tests.flax import test_same as same
from tests.flax.common import CAUSAL, DQ, N, Row, T, inputs, normal, pairs, plain, randomise, theirs
from tests.tolerance import FLOORS, LAYER, assert_same, error, floor

MODULES: tuple[tuple[Any, Any], ...] = (
    (nn.MultiHeadDotProductAttention, ours_linen.MultiHeadDotProductAttention),
    (nn.MultiHeadAttention, ours_linen.MultiHeadAttention),
    (nnx.MultiHeadAttention, ours_nnx.MultiHeadAttention),
)
# flax's own functions, and draws shared unless semantics say otherwise.
DEFAULTS = {"attention_fn", "broadcast_dropout", "kernel_init", "qkv_promote_dtype",
            "out_promote_dtype", "ln_promote_dtype"}  # fmt: skip
# Arguments that tests other than the grid of test_same.py are about.
ELSEWHERE = {
    "self", "parent", "name", "rngs",
    "decode",  # test_decode.py, and here
    "kernel_metadata", "out_kernel_metadata", "bias_metadata", "out_bias_metadata",
    "query_ln_scale_metadata", "key_ln_scale_metadata",  # test_transforms.py
    # Refused: test_hooks_are_refused_by_*.
    "qkv_dot_general", "out_dot_general", "qkv_dot_general_cls", "out_dot_general_cls",
    "qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls",
    "qkv_promote_dtype", "out_promote_dtype", "ln_promote_dtype",
}  # fmt: skip


@pytest.mark.parametrize(("flax", "ours"), MODULES, ids=lambda m: f"{m.__module__}.{m.__name__}")
@pytest.mark.parametrize("call", ["__init__", "__call__"])
def test_no_argument_is_missing(flax: Any, ours: Any, call: str) -> None:
    known = inspect.signature(getattr(ours, call)).parameters
    asked = inspect.signature(getattr(flax, call)).parameters
    for mine, (name, parameter) in zip(known, asked.items(), strict=False):
        if parameter.kind == parameter.POSITIONAL_OR_KEYWORD and name not in ("parent", "name"):
            assert mine == name, "places of arguments"
    for name, parameter in asked.items():
        assert name in known
        assert known[name].kind == parameter.kind, name
        if name not in DEFAULTS:
            assert known[name].default == parameter.default, name


@pytest.mark.parametrize(
    ("flax", "rows"), [(MODULES[0][0], same.LINEN), (MODULES[2][0], same.NNX)], ids=["linen", "nnx"]
)
def test_every_argument_is_in_the_grid(flax: Any, rows: tuple[Row, ...]) -> None:
    named = {"in_features", "in_kv_features", *ELSEWHERE}.union(*(row.settings for row in rows))
    assert set(inspect.signature(flax.__init__).parameters) - named == set()


def grads(expected: Any, actual: Any, row: Row) -> None:
    """Asserts that gradients agree, in floors of the dtype that the row computes in.

    The gradient of a key bias is 0 but for noise at the scale of the others.
    """
    dtype = np.dtype(row.settings.get("dtype", row.dtype))
    allowed = FLOORS[dtype.name] * (4 * LAYER if dtype.itemsize == 2 else 4)
    wanted = {name: e.astype(np.float64) for name, e in plain(expected).items()}
    largest = np.array([max(np.abs(e).max() for e in wanted.values())])
    for (name, a), (_, e) in zip(plain(actual).items(), wanted.items(), strict=True):
        assert a.dtype == plain(expected)[name].dtype
        if "key" in name and "bias" in name:
            assert np.abs(a.astype(np.float64) - e).max() <= allowed * floor(largest, dtype), name
        else:
            assert error(a, e, dtype) <= allowed, name


@pytest.mark.everyday(row=[])
@pytest.mark.slow
@pytest.mark.parametrize("row", same.LINEN)
def test_gradients_of_linen(row: Row) -> None:
    flax, ours = (m.MultiHeadDotProductAttention(**row.settings) for m in (nn, ours_linen))
    x = inputs(row, same.widths(row))
    variables = randomise(theirs(jax.eval_shape, flax.init, jax.random.key(0), *x))
    mask = pairs(x[-1].shape[1])

    def loss(module: Any) -> Any:
        def of(variables: Any, x: Any) -> Any:
            out = module.apply(variables, *x, mask=mask).astype(jnp.float32)
            return jnp.vdot(out, normal("cotangent", out.shape))

        return jax.jit(jax.grad(of, (0, 1)))

    grads(theirs(loss(flax), variables, x), loss(ours)(variables, x), row)


def both(row: Row, **more: Any) -> tuple[Any, Any, Any]:
    """nnx modules of flax and of jaxmha with the same random weights, and inputs."""
    Dq, Dk, _ = same.widths(row)
    settings = {"in_features": Dq, "decode": False, **row.settings, **more}
    if row.inputs == 2:
        settings["in_kv_features"] = Dk
    flax, ours = (
        theirs(module.MultiHeadAttention, rngs=nnx.Rngs(3), **settings)
        for module in (nnx, ours_nnx)
    )
    state = randomise(nnx.state(flax, nnx.Param))
    nnx.update(flax, state)
    nnx.update(ours, state)
    return flax, ours, inputs(row, same.widths(row))


@pytest.mark.everyday(row=[])
@pytest.mark.slow
@pytest.mark.parametrize("row", same.NNX)
def test_gradients_of_nnx(row: Row) -> None:
    flax, ours, x = both(row)
    mask = np.repeat(pairs(x[-1].shape[1]), row.settings["num_heads"] // N, axis=1)

    def loss(module: Any, x: Any) -> Any:
        out = module(*x, mask=mask).astype(jnp.float32)
        return jnp.vdot(out, normal("cotangent", out.shape))

    step = nnx.jit(nnx.grad(loss, argnums=(0, 1)))
    grads(theirs(step, flax, x), step(ours, x), row)


def narrow(rows: tuple[Row, ...]) -> list[Row]:
    """Decoding is self-attention."""
    return [row._replace(inputs=1) for row in rows]


@pytest.mark.everyday(row=[])
@pytest.mark.slow
@pytest.mark.parametrize("row", narrow(same.LINEN))
def test_decoding_of_linen(row: Row) -> None:
    settings = {**row.settings, "decode": True}
    (x,) = inputs(row, same.widths(row))
    flax, ours = (m.MultiHeadDotProductAttention(**settings) for m in (nn, ours_linen))
    made = theirs(jax.eval_shape, flax.init, jax.random.key(0), x)
    params = {"params": randomise(made["params"])}
    caches = [jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made["cache"])] * 2
    steps = [jax.jit(partial(module.apply, mutable=["cache"])) for module in (flax, ours)]
    for t in range(T):
        token = x[:, t : t + 1]
        (out, left), (mine, right) = (
            theirs(step, {**params, "cache": cache}, token)
            for step, cache in zip(steps, caches, strict=True)
        )
        caches = [left["cache"], right["cache"]]
        same.agree(mine, out, row, f"step {t}")
        for name, array in plain(left).items():
            assert plain(right)[name].dtype == array.dtype


@pytest.mark.everyday(row=[])
@pytest.mark.slow
@pytest.mark.parametrize("row", narrow(same.NNX))
def test_decoding_of_nnx(row: Row) -> None:
    flax, ours, (x,) = both(row, decode=True)
    dtype = row.settings.get("dtype", x.dtype)
    for module in (flax, ours):
        module.init_cache(x.shape, dtype)
    step = nnx.jit(lambda module, token: module(token))
    for t in range(T):
        out = theirs(step, flax, x[:, t : t + 1])
        mine = step(ours, x[:, t : t + 1])
        same.agree(mine, out, row, f"step {t}")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["module", "attention_fn"])
@pytest.mark.parametrize("broadcast", [False, True])
def test_dropout_of_nnx_is_distributed_as_in_flax(broadcast: bool, how: str) -> None:
    """With values of one, an output is the kept weight of its row over the rate kept."""
    rate, T, S = 0.3, 101, 103
    settings: dict[str, Any] = {
        "num_heads": 2, "in_features": 2, "dropout_rate": rate, "deterministic": False,
        "use_bias": False, "decode": False, "broadcast_dropout": broadcast,
    }  # fmt: skip
    own = nnx.MultiHeadAttention(rngs=nnx.Rngs(1), **settings)
    if how == "module":
        other = ours_nnx.MultiHeadAttention(rngs=nnx.Rngs(1), **settings)
    else:
        other = nnx.MultiHeadAttention(rngs=nnx.Rngs(1), attention_fn=attention_fn, **settings)
    x, y = jnp.zeros((2, T, 2)), jnp.ones((2, S, 2))
    deviation = (rate / (1 - rate) / ((1 if broadcast else 4) * T * S)) ** 0.5
    for layer in (own, other):
        for side in (layer.query, layer.key, layer.value):
            side.kernel.set_value(jnp.eye(2).reshape(2, 2, 1))
        layer.out.kernel.set_value(jnp.eye(2).reshape(2, 1, 2))
        first, second = theirs(layer, x, y), theirs(layer, x, y)
        assert not np.array_equal(first, second)
        assert bool(jnp.array_equal(first[0], first[1])) == broadcast
        assert bool(jnp.array_equal(first[..., 0], first[..., 1])) == broadcast
        assert abs(float(first.mean()) - 1) < 5 * deviation
        row = (rate / (1 - rate) / S) ** 0.5
        assert abs(float(first.std()) / row - 1) < 5 / (2 * (1 if broadcast else 4) * T) ** 0.5


@pytest.mark.everyday(row=[])
@pytest.mark.slow
@pytest.mark.parametrize("row", narrow(same.NNX))
def test_attention_fn_in_nnx(row: Row) -> None:
    """With every argument that flax hands on, decoding too."""
    swapped = {name: x for name, x in row.settings.items() if name != "attention_fn"}
    flax, _, (x,) = both(row._replace(settings=swapped))
    mask = np.repeat(pairs(T), row.settings["num_heads"] // N, axis=1)
    mask &= jnp.tri(T, dtype=bool)[None, None]
    expected = [theirs(flax, x, mask=mask, **CAUSAL)]
    flax.init_cache(x.shape, row.settings.get("dtype", x.dtype))
    expected += [theirs(flax, x[:, t : t + 1], decode=True) for t in range(T)]
    flax.attention_fn = partial(attention_fn, semantics=Semantics.flax())
    flax.init_cache(x.shape, row.settings.get("dtype", x.dtype))
    actual = [theirs(flax, x, mask=mask, **CAUSAL)]
    actual += [theirs(flax, x[:, t : t + 1], decode=True) for t in range(T)]
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        same.agree(a, e, row, str(i))


@pytest.mark.everyday(row=[])
@pytest.mark.slow
@pytest.mark.parametrize("row", narrow(same.LINEN))
def test_attention_fn_in_linen(row: Row) -> None:
    settings = {**row.settings, "attention_fn": nn.dot_product_attention, "decode": True}
    (x,) = inputs(row, same.widths(row))
    flax = nn.MultiHeadDotProductAttention(**settings)
    made = theirs(jax.eval_shape, flax.init, jax.random.key(0), x)
    params = randomise(made["params"])
    outs = []
    for fn in (nn.dot_product_attention, attention_fn):
        whole = flax.clone(attention_fn=fn, decode=False)
        found = [theirs(whole.apply, {"params": params}, x, mask=pairs(T))]
        cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made["cache"])
        step = jax.jit(partial(flax.clone(attention_fn=fn).apply, mutable=["cache"]))
        for t in range(T):
            out, left = theirs(step, {"params": params, "cache": cache}, x[:, t : t + 1])
            cache = left["cache"]
            found.append(out)
        outs.append(found)
    for i, (e, a) in enumerate(zip(*outs, strict=True)):
        same.agree(a, e, row, str(i))


def test_checkpoints_load_both_ways() -> None:
    """As bytes of flax.serialization (linen), and as the pure dict that orbax stores (nnx)."""
    settings = {**same.WIDE, "normalize_qk": True}
    (x,) = inputs(Row("", {}))
    trees = [
        jax.tree.map(
            lambda x: np.zeros(x.shape, x.dtype),
            theirs(jax.eval_shape, module.MultiHeadAttention(**settings).init, jax.random.key(0), x),
        )
        for module in (nn, ours_linen)
    ]  # fmt: skip
    for source, target in (trees, trees[::-1]):
        drawn = randomise(source)
        back = serialization.from_bytes(target, serialization.to_bytes(drawn))
        for (name, a), e in zip(plain(back).items(), plain(drawn).values(), strict=True):
            assert_same(a, e, name)
    layers = [
        theirs(nnx.eval_shape, lambda: module.MultiHeadAttention(  # noqa: B023
            in_features=DQ, decode=False, rngs=nnx.Rngs(0), **settings))
        for module in (nnx, ours_nnx)
    ]  # fmt: skip
    for source, target in (layers, layers[::-1]):
        stored = nnx.to_pure_dict(randomise(nnx.state(source, nnx.Param)))
        state = nnx.state(target, nnx.Param)
        nnx.replace_by_pure_dict(state, stored)
        for (name, a), e in zip(
            plain(nnx.to_pure_dict(state)).items(), plain(stored).values(), strict=True
        ):
            assert_same(a, e, name)
