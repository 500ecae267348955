"""attention_fn in flax's own modules, and its arguments one by one."""

import inspect
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmha import Mask, Semantics, dot_product_attention
from jaxmha.flax import attention_fn
from jaxmha.flax.settings import widened
from tests.flax.common import CAUSAL, DQ, B, H, N, S, T, normal, pairs, plain, randomise, theirs
from tests.flax.rows import WIDE, ZEROS
from tests.tolerance import LAYER, assert_close, assert_same

CONDITIONS: tuple[dict[str, Any], ...] = (
    {},
    {"bias": normal("bias", (B, N, T, S)), "mask": pairs(S)},
    {"mask": pairs(S)[:1, :1].astype(jnp.float32), "dtype": jnp.bfloat16},
    {"precision": jax.lax.Precision.HIGHEST, "mask": pairs(S)[0]},
    {"force_fp32_for_softmax": True, "dtype": jnp.float16},
    {"dropout_rate": 0.5, "deterministic": True},
)


def heads(K: int = N, lead: tuple[int, ...] = (B,), h: int = 13) -> tuple[Any, Any, Any]:
    shapes = ((*lead, T, N, H), (*lead, S, K, H), (*lead, S, K, h))
    query, key, value = (normal(f"heads {i}", shape) for i, shape in enumerate(shapes))
    return query, key, value


@pytest.mark.slow_variants("*dtype")
@pytest.mark.parametrize("arguments", CONDITIONS, ids=lambda a: "-".join(a) or "plain")
def test_arguments(arguments: dict[str, Any]) -> None:
    expected = theirs(nn.dot_product_attention, *heads(), **arguments)
    actual = attention_fn(*heads(), **arguments)
    assert actual.dtype == expected.dtype
    dtype = arguments.get("dtype", actual.dtype)
    factor = LAYER if "dtype" in arguments else 1.0
    assert_close(actual.astype(dtype), np.asarray(expected), factor=factor)


def test_arguments_of_nnx() -> None:
    q, k, v = heads(1, (2, 3), H)
    expected = theirs(nnx.dot_product_attention, q, k, v, is_causal=True)
    assert_close(attention_fn(q, k, v, is_causal=True), expected)


def test_signature_has_every_argument_of_flax() -> None:
    own = inspect.signature(attention_fn).parameters
    until = list(own).index("module") + 1
    for function in (nn.dot_product_attention, nnx.dot_product_attention):
        assert list(inspect.signature(function).parameters)[:until] == list(own)[:until]
        for name, parameter in inspect.signature(function).parameters.items():
            assert name in own
            if name != "promote_dtype":  # flax's own function is accepted
                assert own[name].default == parameter.default, name


@pytest.mark.slow_variants("False")
@pytest.mark.parametrize("dropout", [False, True])
def test_in_linen(dropout: bool) -> None:
    x = normal("x", (B, T, DQ))
    settings: dict[str, Any] = {**WIDE, **ZEROS, "dropout_rate": 0.4 if dropout else 0.0}
    flax = nn.MultiHeadDotProductAttention(**settings, deterministic=not dropout)
    swapped = flax.clone(attention_fn=attention_fn)
    variables = randomise(
        theirs(
            jax.eval_shape,
            flax.init,
            {"params": jax.random.key(0), "dropout": jax.random.key(1)},
            x,
        )
    )
    call = {"mask": pairs(T), "sow_weights": True, "mutable": ["intermediates"]}
    rngs = {"dropout": jax.random.key(5)}
    expected = theirs(flax.apply, variables, x, rngs=rngs, **call)
    actual = theirs(swapped.apply, variables, x, rngs=rngs, **call)
    for name, array in plain(expected[1]).items():
        assert_close(plain(actual[1])[name], array, name)
    if not dropout:
        assert_close(actual[0], expected[0])
        return
    again = theirs(swapped.apply, variables, x, rngs=rngs, **call)
    assert_same(again[0], actual[0])
    other = theirs(swapped.apply, variables, x, rngs={"dropout": jax.random.key(6)}, **call)
    assert not np.array_equal(other[0], actual[0])


def test_in_nnx() -> None:
    x, mask = normal("x", (B, T, DQ)), pairs(T)
    if not CAUSAL:
        mask &= jnp.tri(T, dtype=bool)[None, None]
    settings = {**WIDE, **ZEROS, "in_features": DQ, "decode": False}
    flax = theirs(nnx.MultiHeadAttention, rngs=nnx.Rngs(3), **settings)
    swapped = theirs(
        nnx.MultiHeadAttention, rngs=nnx.Rngs(3), attention_fn=attention_fn, **settings
    )
    for module in (flax, swapped):
        nnx.update(module, randomise(nnx.state(flax, nnx.Param)))
    expected = theirs(flax, x, mask=mask, **CAUSAL)
    assert_close(theirs(swapped, x, mask=mask, **CAUSAL), expected)
    run = [
        nnx.capture(lambda m, x: m(x, mask=mask, sow_weights=True), nnx.Intermediate)
        for _ in range(2)
    ]
    sown = [plain(theirs(f, m, x)[1]) for f, m in zip(run, (flax, swapped), strict=True)]
    assert list(sown[0]) == list(sown[1])
    for name in sown[0]:
        assert_close(sown[1][name], sown[0][name], name)


def test_dropout_is_that_of_the_core() -> None:
    key = jax.random.key(3)
    actual = attention_fn(*heads(), dropout_rng=key, dropout_rate=0.4)
    expected = dot_product_attention(
        *heads(), dropout_key=key, dropout_rate=0.4, dropout_broadcast=("B", "N")
    )
    assert_same(actual, expected)


def test_fully_masked_rows() -> None:
    mask = pairs(S, empty=True)
    expected = theirs(nn.dot_product_attention, *heads(), mask=mask)
    preset = partial(attention_fn, semantics=Semantics.flax())
    assert_close(preset(*heads(), mask=mask), expected)
    own = np.array(attention_fn(*heads(), mask=mask))
    assert (own[0, 2, 1] == 0).all()
    own[0, 2, 1] = expected[0, 2, 1]
    assert_close(own, expected)


def test_masks_and_implementations_of_jaxmha() -> None:
    mask = Mask.causal() & Mask.lengths(key_value=jnp.array([3, 6]))
    actual = attention_fn(*heads(), mask=mask, implementation="blocked")
    assert_same(actual, dot_product_attention(*heads(), mask=mask, implementation="blocked"))
    soft = Semantics(logits_soft_cap=0.7)
    actual = attention_fn(*heads(), semantics=soft, is_causal=True)
    assert_same(actual, dot_product_attention(*heads(), logits_soft_cap=0.7, is_causal=True))


@pytest.mark.slow
def test_float64(x64: None) -> None:
    q, k, v = (x.astype(jnp.float64) for x in heads())
    mask = pairs(S)
    expected = theirs(nn.dot_product_attention, q, k, v, mask=mask)
    assert_close(attention_fn(q, k, v, mask=mask), expected)
    forced = attention_fn(q, k, v, mask=mask, force_fp32_for_softmax=True)
    assert forced.dtype == jnp.float64
    assert 1e-9 < float(jnp.abs(forced - expected).max()) < 1e-6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"einsum_dot_general": print}, "einsum_dot_general=print: jaxmha computes this itself"),
        ({"qk_attn_weights_einsum": print}, "qk_attn_weights_einsum=print"),
        ({"attn_weights_value_einsum": print}, "attn_weights_value_einsum=print"),
        ({"promote_dtype": print}, "promote_dtype=print"),
        ({"dropout_rate": 0.5}, "needs a dropout_rng"),
        ({"semantics": Semantics(add_zero_attn=True)}, "belong to a layer"),
        ({"semantics": Semantics(qk_norm="rms")}, "belong to a layer"),
        ({"semantics": Semantics(clip_qkv=2.0)}, "belong to a layer"),
        ({"semantics": Semantics(dropout_rate=0.2), "dropout_rate": 0.5}, "differ"),
        ({"semantics": Semantics(dropout_rate=0.2), "deterministic": True}, "alone has no effect"),
        ({"semantics": Semantics(precision="high"), "precision": "highest"}, "differ"),
        ({"mask": jnp.ones((B, N, T, S + 1))}, "mask: expected axes"),
        ({"implementation": "flash"}, "implementation must be among"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_fn(*heads(), **arguments)


def test_arguments_after_module_have_names(no_shape_hook: None) -> None:
    """Their order differs between linen and nnx."""
    function: Any = attention_fn
    until: Any = (None, None, True, None, 0.0, True, None, None, None)
    with pytest.raises(TypeError, match="arguments after module are given by name"):
        function(*heads(), *until, print)


def test_wrong_shapes(no_shape_hook: None) -> None:
    q, k, v = heads()
    for wrong in ((q, k[:1], v[:1]), (q, k, v[:, :2]), (q[..., :3], k, v), (q[0], k, v)):
        with pytest.raises(ValueError, match="expected query"):
            attention_fn(*wrong)
    with pytest.raises(ValueError, match="multiple of key/value heads"):
        attention_fn(q, k[:, :, :2], v[:, :, :2])


def test_half_precision_is_widened_where_nothing_is_wider() -> None:
    half, single = np.ones(3, jnp.bfloat16), np.ones(3, np.float32)
    assert widened([half, half])[0].dtype == np.float32
    assert [x.dtype for x in widened([half, single])] == [half.dtype, single.dtype]
