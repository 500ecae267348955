"""`jaxmha.haiku` in the place of haiku's own layer."""

import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask, Semantics
from jaxmha.converters import haiku as converter
from jaxmha.haiku import MultiHeadAttention
from tests.drawn import to_jax
from tests.masks.draws import numbers
from tests.promotion import foreign
from tests.tolerance import assert_close, assert_same

N, T, S = 2, 5, 7
SIZES: dict[str, Any] = {"num_heads": N, "key_size": 19, "value_size": 23, "model_size": 17}
HAIKU = Semantics.haiku()


def inputs(*batch: int, others: tuple[Any, ...] = ()) -> list[jax.Array]:
    """`others`: batch axes of key and value, if they have their own."""
    rows = zip((batch, *(others or (batch, batch))), ((T, 11), (S, 13), (S, 3)), strict=True)
    drawn = [numbers(*lead, *size, seed=i) for i, (lead, size) in enumerate(rows)]
    return [to_jax(x, jnp.float32) for x in drawn]


def model(made: type[hk.Module], **settings: Any) -> Any:
    """A pure function with one layer; its parameters are drawn, biases too."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        draw = {
            "w_init": hk.initializers.VarianceScaling(),
            "b_init": hk.initializers.RandomNormal(),
        }
        return made(**SIZES | draw | settings)(*arguments, **keywords)

    return hk.without_apply_rng(hk.transform(call))


def pair(**settings: Any) -> tuple[Any, Any]:
    return model(MultiHeadAttention, semantics=HAIKU, **settings), model(
        hk.MultiHeadAttention, **settings
    )


@cache
def drawn(**settings: Any) -> Any:
    """Parameters of both layers, whose sizes do not depend on the batch."""
    own, other = pair(**settings)
    with foreign():
        expected = other.init(jax.random.key(0), *inputs())
    params = own.init(jax.random.key(0), *inputs())
    jax.tree.map(assert_same, params, expected)  # names too
    return params


def masks(*batch: int) -> dict[str, Any]:
    """Masks of several shapes, in which the third query attends no key."""
    full = numbers(*batch, N, T, S) < 0.3
    full[..., 2, :] = False
    ones = (1,) * len(batch)
    return {"none": None, "full": full, "TS": full[..., :1, :, :], "floats": 1.0 * full} | {
        "one": full.reshape(-1, N, T, S)[:1].reshape(*ones, N, T, S)
    }


@pytest.mark.slow_variants("*", "!()-*none", "!(3, 2)-*full", "!(3, 2)-*floats", "!(3, 2)-*-one")
@pytest.mark.parametrize("form", ["none", "full", "TS", "floats", "one"])
@pytest.mark.parametrize(
    ("batch", "others"), [((), ()), ((3,), ()), ((3, 2), ((2,), (3, 1)))], ids=str
)
def test_the_same_as_haiku(batch: tuple[int, ...], others: tuple[Any, ...], form: str) -> None:
    own, other = pair()
    arguments = (*inputs(*batch, others=others), masks(*batch)[form])
    params = drawn()
    with foreign():
        expected = np.asarray(jax.jit(other.apply)(params, *arguments))
    if batch == ():
        assert_close(own.apply(params, *arguments), expected)
    assert_close(jax.jit(own.apply)(params, *arguments), expected)


def test_without_biases_and_gradients() -> None:
    own, other = pair(with_bias=False)
    arguments = (*inputs(3), masks(3)["full"])
    params = drawn(with_bias=False)
    assert {name for arrays in params.values() for name in arrays} == {"w"}

    def gradients(one: Any) -> Any:
        return jax.jit(jax.grad(lambda p: jnp.sum(one.apply(p, *arguments) ** 2)))(params)

    with foreign():
        expected = gradients(other)
    jax.tree.map(assert_close, gradients(own), jax.tree.map(np.asarray, expected))


def test_masks_biases_and_semantics_that_haiku_lacks() -> None:
    """Against the layer of jaxmha, with two batch axes; a row of nothing is 0."""
    options = Semantics(logits_soft_cap=2.0, local_window_size=(2, None))
    layer = model(MultiHeadAttention, semantics=options, implementation="reference")
    arrays = inputs(3, 2)
    lengths = jnp.array([7, 3, 0, 5, 1, 2])
    bias = to_jax(numbers(3, 2, N, T, S), jnp.float32)
    mask = Mask.lengths(key_value=lengths)
    params = drawn()
    found = jax.jit(layer.apply)(params, *arrays, mask, bias=bias)
    held, _ = converter.from_module(params, num_heads=N)
    flat = [np.asarray(x).reshape(6, *x.shape[2:]) for x in (*arrays, bias)]
    call = partial(
        jaxmha.multi_head_attention, semantics=options, implementation="reference", mask=mask
    )
    expected = jax.jit(call)(held, *flat[:3], bias=flat[3])
    assert_close(found.reshape(6, T, -1), np.asarray(expected))
    assert_same(found[1, 0, 0], to_jax(params["multi_head_attention/linear"]["b"]))


def test_score_and_mask_functions() -> None:
    """b is the index into all batch axes, flattened."""
    own = model(MultiHeadAttention, with_bias=False)
    arguments, rates = inputs(3, 2), to_jax(numbers(6, N), jnp.float32)
    allowed = (np.arange(T)[:, None] + np.arange(S)) % 3 != 0
    bias = np.asarray(rates).reshape(3, 2, N, 1, 1) * np.arange(S, dtype="f")
    params = drawn(with_bias=False)
    expected = jax.jit(own.apply)(
        params, *arguments, bias=np.where(allowed[None, None, None], bias, -np.inf)
    )
    functions = partial(
        own.apply,
        score_mod=lambda score, b, n, i, j: score + rates[b, n] * j.astype("float32"),
        mask_mod=lambda b, n, i, j: (i + j) % 3 != 0,
    )
    assert_close(jax.jit(functions)(params, *arguments), np.asarray(expected))


def test_no_queries() -> None:
    query, key, value = inputs(2)
    assert model(MultiHeadAttention).apply(drawn(), query[:, :0], key, value).shape[:2] == (2, 0)


def test_padding_may_hold_nan() -> None:
    """Gradients of the parameters are those of zeros in the padding; rows of a batch share keys, so
    that the longest row counts."""
    own, params = model(MultiHeadAttention), drawn()
    arrays = [np.array(x) for x in inputs(3, 2, others=((2,), (3, 1)))]
    valid = np.array([[4, 6], [3, 1], [5, 0]])
    mask = Mask.lengths(key_value=jnp.array(valid.ravel()))
    found = []
    call = jax.jit(jax.grad(lambda p, *x: jnp.sum(own.apply(p, *x, mask) ** 2)))
    for padding in (0.0, np.nan):
        for x, lengths in zip(arrays[1:], (valid.max(0), valid.max(1)[:, None]), strict=True):
            x[np.arange(S) >= lengths[..., None]] = padding
        found.append(call(params, *arrays))
    jax.tree.map(assert_same, *found)


def test_additive_masks_are_refused() -> None:
    own, _ = pair()
    arrays = inputs(3)
    added = np.where(numbers(3, N, T, S) < 0.3, 0.0, -1e9).astype(np.float32)
    params = drawn()
    for call in (own.apply, jax.jit(lambda params, *x: own.apply(params, *x[:3], added))):
        with pytest.raises(
            ValueError, match=r"float32 values from -1000000000.0 to 0.0.*mask == 0"
        ):
            call(params, *arrays, added)


@pytest.mark.usefixtures("no_shape_hook")
def test_refused() -> None:
    def call(semantics: Semantics = HAIKU, arrays: Any = None, **more: Any) -> None:
        layer = model(MultiHeadAttention, semantics=semantics)
        jax.eval_shape(layer.init, jax.random.key(0), *(arrays or inputs(3)), **more)

    with pytest.raises(ValueError, match=r"semantics may set scale, .* got .*clip_qkv=2"):
        call(Semantics(clip_qkv=2.0))
    with pytest.raises(
        ValueError, match=r"mask must have the 4 axes of the logits.*got .*\(5, 7\)"
    ):
        call(mask=jnp.ones((T, S), bool))
    with pytest.raises(ValueError, match="bias must have the 4 axes"):
        call(bias=jnp.ones((N, T, S)))
    with pytest.raises(TypeError, match="mask must be an array, got list"):
        call(mask=[[True]])
    for batch, lead in (((2, 3), (3, 2)), ((2, 3), (6,)), ((1,), (2,)), ((), (2,))):
        for name, others in (("key", (lead, lead)), ("value", (batch, lead))):
            with pytest.raises(ValueError, match=rf"{name}: .* broadcast to \*B=.* of query, got"):
                call(arrays=inputs(*batch, others=others))
    with pytest.raises(ValueError, match="mask: expected batch axes"):
        call(arrays=inputs(2, 3), mask=jnp.ones((4, 3, N, T, S)))


OWN_TESTS = """
import sys
from haiku._src import attention, attention_test
import jaxmha.haiku as ours
attention.MultiHeadAttention = ours.MultiHeadAttention
calls, own = [], ours.dot_product_attention
ours.dot_product_attention = lambda *a, **k: calls.append(1) or own(*a, **k)
import unittest
found = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromModule(attention_test))
print(found.testsRun, len(found.failures) + len(found.errors), len(calls) > 10)
"""


@pytest.mark.slow
def test_tests_of_haiku() -> None:
    """They travel with haiku; in a process of their own, since they change its module."""
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", OWN_TESTS], cwd=root, check=False, capture_output=True, text=True
    )
    assert done.stdout.split() == ["13", "0", "True"], done.stderr
