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
from tests.flax.common import CAUSAL, DQ, N, Row, T, inputs, pairs, plain, randomise, theirs
from tests.flax.rows import LINEN, NNX, WIDE, agree, both, narrow, widths
from tests.tolerance import assert_same

MODULES: tuple[tuple[Any, Any], ...] = (
    (nn.MultiHeadDotProductAttention, ours_linen.MultiHeadDotProductAttention),
    (nn.MultiHeadAttention, ours_linen.MultiHeadAttention),
    (nnx.MultiHeadAttention, ours_nnx.MultiHeadAttention),
)
# flax's own functions, and draws shared unless semantics say otherwise.
DEFAULTS = {"attention_fn", "broadcast_dropout", "kernel_init", "qkv_promote_dtype",
            "out_promote_dtype", "ln_promote_dtype"}  # fmt: skip
# Arguments that are not in the grid of rows.py.
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
    ("flax", "rows"), [(MODULES[0][0], LINEN), (MODULES[2][0], NNX)], ids=["linen", "nnx"]
)
def test_every_argument_is_in_the_grid(flax: Any, rows: tuple[Row, ...]) -> None:
    named = {"in_features", "in_kv_features", *ELSEWHERE}.union(*(row.settings for row in rows))
    assert set(inspect.signature(flax.__init__).parameters) - named == set()


@pytest.mark.slow
@pytest.mark.parametrize("row", narrow(LINEN))
def test_decoding_of_linen(row: Row) -> None:
    settings = {**row.settings, "decode": True}
    (x,) = inputs(row, widths(row))
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
        agree(mine, out, row, f"step {t}")
        for name, array in plain(left).items():
            assert plain(right)[name].dtype == array.dtype


@pytest.mark.slow
@pytest.mark.parametrize("row", narrow(NNX))
def test_decoding_of_nnx(row: Row) -> None:
    flax, ours, (x,) = both(row, decode=True)
    dtype = row.settings.get("dtype", x.dtype)
    for module in (flax, ours):
        module.init_cache(x.shape, dtype)
    step = nnx.jit(lambda module, token: module(token))
    for t in range(T):
        out = theirs(step, flax, x[:, t : t + 1])
        mine = step(ours, x[:, t : t + 1])
        agree(mine, out, row, f"step {t}")


@pytest.mark.slow
@pytest.mark.parametrize("row", narrow(NNX))
def test_attention_fn_in_nnx(row: Row) -> None:
    """With every argument that flax hands on, decoding too."""
    swapped = {name: x for name, x in row.settings.items() if name != "attention_fn"}
    flax, _, (x,) = both(row._replace(settings=swapped))
    mask = np.repeat(pairs(T), row.settings["num_heads"] // N, axis=1)
    mask &= jnp.tri(T, dtype=bool)[None, None]
    expected = [theirs(flax, x, mask=mask, **CAUSAL)]
    flax.init_cache(x.shape, row.settings.get("dtype", x.dtype))
    expected += [theirs(flax, x[:, t : t + 1], decode=True) for t in range(T)]
    shared = () if row.settings.get("broadcast_dropout") is False else ("B", "N")
    semantics = Semantics.flax(dropout_broadcast=shared)
    flax.attention_fn = partial(attention_fn, semantics=semantics)
    flax.init_cache(x.shape, row.settings.get("dtype", x.dtype))
    actual = [theirs(flax, x, mask=mask, **CAUSAL)]
    actual += [theirs(flax, x[:, t : t + 1], decode=True) for t in range(T)]
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        agree(a, e, row, str(i))


@pytest.mark.slow
@pytest.mark.parametrize("row", narrow(LINEN))
def test_attention_fn_in_linen(row: Row) -> None:
    settings = {**row.settings, "attention_fn": nn.dot_product_attention, "decode": True}
    (x,) = inputs(row, widths(row))
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
        agree(a, e, row, str(i))


def test_checkpoints_load_both_ways() -> None:
    """As bytes of flax.serialization (linen), and as the pure dict that orbax stores (nnx)."""
    settings = {**WIDE, "normalize_qk": True}
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
