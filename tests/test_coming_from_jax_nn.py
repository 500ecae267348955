"""Every row of the page "Coming from jax.nn", run with the live function."""

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask
from jaxmha.implementations import small_query
from tests import drawn, tolerance
from tests.cases import shaped
from tests.drawn import to_jax

PAGE = Path(__file__).parent.parent / "docs" / "pages" / "how_to" / "jax_nn.md"
B, T, N, H = 2, 5, 4, 3
RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((B, T, N, H)).astype(np.float32) for _ in range(3))
BIAS = RNG.standard_normal((B, N, T, T)).astype(np.float32)
LENGTHS = np.array([3, 0], np.int32)
LOW = -0.7 * float(np.finfo(np.float32).max)

pytestmark = pytest.mark.usefixtures("no_shape_hook", "implicit_promotion")


def ours(*heads: Any, **options: Any) -> Any:
    return jaxmha.dot_product_attention(*(heads or (Q, K, V)), **options)


def theirs(*heads: Any, **options: Any) -> Any:
    return jax.nn.dot_product_attention(*(heads or (Q, K, V)), **options)


def compiled(*heads: Any, **options: Any) -> Any:
    """`theirs` as one program: else each of its operations is one."""
    return jax.jit(lambda *x: theirs(*x, **options))(*(heads or (Q, K, V)))


def same(a: Any, b: Any, atol: float = 2e-6) -> None:
    chex.assert_trees_all_equal_dtypes(a, b)
    chex.assert_trees_all_close(a, b, atol=atol, rtol=1e-5)


ALIKE: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": BIAS},
    "mask": {"mask": np.tri(T, dtype=bool)},
    "mask by batch": {"mask": RNG.random((B, 1, 1, T)) < 0.7},
    "causal": {"is_causal": True},
    "NumPy's bool": {"is_causal": np.bool_(True)},
    "lengths": {"key_value_seq_lengths": np.array([3, 5], np.int32)},
    "both lengths": {
        "query_seq_lengths": np.array([2, 5], np.int32),
        "key_value_seq_lengths": np.array([3, 5], np.int32),
    },
    "window": {"local_window_size": (2, 1)},
    "window of one number": {"local_window_size": 1},
    "window as a list": {"local_window_size": [2, 1]},
    "scale": {"scale": 0.3},
    "scale of NumPy": {"scale": np.float32(0.3)},
    "scale of shape ()": {"scale": np.asarray(0.3)},
    "scale of JAX": {"scale": jnp.asarray(0.3)},
    "integer scale": {"scale": 2},
}


@pytest.mark.parametrize("name", ALIKE)
def test_arguments_mean_the_same(name: str) -> None:
    same(ours(**ALIKE[name]), compiled(**ALIKE[name]))


def test_arguments_have_the_same_names_and_order() -> None:
    mine, its = (
        inspect.signature(f).parameters
        for f in (jaxmha.dot_product_attention, jax.nn.dot_product_attention)
    )
    assert set(its) <= set(mine)
    for name, parameter in its.items():
        assert (mine[name].kind, mine[name].default) == (parameter.kind, parameter.default)
    positional = [n for n, p in its.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(mine)[: len(positional)] == positional


@pytest.mark.slow_variants(
    "*", "!plain-float32", "!wide-float32", "!bias-bfloat16", "!empty rows-float16"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["plain", "bias", "empty rows", "causal", "unbatched", "wide"])
def test_residual(name: str, dtype: str) -> None:
    options: dict[str, Any] = ALIKE.get(name, {})
    heads: tuple[Any, ...] = Q, K, V
    if name == "empty rows":
        options = {"key_value_seq_lengths": LENGTHS, "query_seq_lengths": np.array([2, 5], "int32")}
    if name == "unbatched":
        heads = Q[0], K[0], V[0]
    if name == "wide":  # few queries, which have an implementation of their own
        heads = tuple(np.repeat(x, 40, 1) for x in (K, V))
        heads = Q[:, :1], *heads
        assert 40 * T >= small_query.LEAST_KEYS
    heads = tuple(to_jax(x, dtype) for x in heads)
    (_, found), (_, want) = (f(*heads, **options, return_residual=True) for f in (ours, theirs))
    assert found.shape == want.shape == heads[0].shape[:-1]
    same(found, want, {"float32": 1e-5, "bfloat16": 0.04, "float16": 0.005}[dtype])


def test_residual_of_rows_that_a_bias_empties() -> None:
    bias = np.where(np.arange(T)[:, None] < [1, 1, 3, 4, 5], -np.inf, BIAS).astype(np.float32)
    bias[0, 0, 4] = -np.inf
    mask = np.tri(T, dtype=bool)[None, None]
    bias[1, 1, 2] = -np.inf
    for options in ({"bias": bias}, {"bias": bias, "mask": mask}, {"bias": bias, "mask": ~mask}):
        same(ours(**options, return_residual=True)[1], compiled(**options, return_residual=True)[1])


def test_residual_of_rows_that_a_mask_mod_empties() -> None:
    """-inf, as without a mask in `jax.nn`; with a mask, its constant."""
    for options, low in (({}, -np.inf), ({"mask": np.ones((T, T), bool)}, LOW)):
        found = ours(mask_mod=lambda b, n, i, j: i > 1, **options, return_residual=True)[1]
        np.testing.assert_allclose(found[:, :2], low)
        assert np.isfinite(found[:, 2:]).all()


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_residual_in_float64() -> None:
    heads = [x.astype(np.float64) for x in (Q, K, V)]
    found, want = (
        f(*heads, key_value_seq_lengths=LENGTHS, return_residual=True)[1] for f in (ours, theirs)
    )
    same(found, want, 1e-6)  # its own is computed in float32
    np.testing.assert_allclose(found[1], LOW)


def test_residual_and_lse() -> None:
    """Axes, gradient and empty rows differ."""
    options = {"key_value_seq_lengths": LENGTHS, "return_lse": True, "return_residual": True}
    out, lse, residual = ours(**options)
    assert out.shape == (B, T, N, H)
    assert (lse.shape, residual.shape) == ((B, N, T), (B, T, N))
    np.testing.assert_array_equal(residual[0], lse[0].T)
    assert (lse[1] == -np.inf).all()
    np.testing.assert_allclose(residual[1], LOW)

    def gradients(f: Any, *of: str) -> Any:
        """Of the sum of each of these."""
        options = dict.fromkeys(of, True)
        return jax.jit(jax.jacrev(lambda q: [x.sum() for x in f(q, K, V, **options)[1:]]))(Q)

    of_lse, of_residual = gradients(ours, "return_lse", "return_residual")
    assert np.abs(of_lse).max() > 0.1
    assert not np.asarray(of_residual).any()
    assert not np.asarray(gradients(theirs, "return_residual")[0]).any()


@pytest.mark.everyday(kind=["lengths"])
@pytest.mark.parametrize("kind", ["plain", "causal", "lengths", "mask"])
def test_learned_temperature(kind: str) -> None:
    def loss(f: Any, scale: Any, q: Any) -> Any:
        return (f(q, K, V, scale=scale, **ALIKE[kind]) ** 2).sum()

    found, want = (
        jax.jit(jax.value_and_grad(lambda s, q, f=f: loss(f, s, q), (0, 1)))(jnp.float32(0.7), Q)
        for f in (ours, theirs)
    )
    same(found, want, 2e-5)


def test_learned_temperature_of_half_precision() -> None:
    """Nothing is rounded between queries and logits, and dtypes are those of the heads."""
    heads = [to_jax(x, jnp.bfloat16) for x in (Q, K, V)]
    out, weights, lse = ours(*heads, scale=jnp.float32(0.7), return_weights=True, return_lse=True)
    want = ours(*heads, scale=0.7, return_weights=True, return_lse=True)
    assert (out.dtype, weights.dtype, lse.dtype) == (jnp.bfloat16, jnp.bfloat16, np.float32)
    same((out, weights, lse), want, 1e-6)


# Differences: what the page says of each is shown here.


def test_empty_rows() -> None:
    found, want = (f(key_value_seq_lengths=LENGTHS) for f in (ours, theirs))
    assert not found[1].any()
    np.testing.assert_allclose(want[1], np.broadcast_to(V[1].mean(0), want[1].shape), atol=1e-6)
    same(ours(key_value_seq_lengths=LENGTHS, fully_masked="mean"), want)
    bias = np.full((1, 1, T, T), -np.inf, np.float32)
    assert np.isnan(theirs(bias=bias)).all()
    assert not ours(bias=bias).any()


def test_dead_keys() -> None:
    spoiled = V.copy()
    spoiled[:, 3:] = np.nan
    lengths = np.array([3, 2], np.int32)
    assert np.isnan(theirs(Q, K, spoiled, key_value_seq_lengths=lengths)).all()
    same(ours(Q, K, spoiled, key_value_seq_lengths=lengths), ours(key_value_seq_lengths=lengths))


def test_implementations() -> None:
    """Names of jax.nn are taken; its "xla" is "reference"."""
    found = ours(implementation="xla", return_weights=True)
    same(found, ours(implementation="reference", return_weights=True), 0.0)
    same(found[0], compiled(implementation="xla"))
    same(ours(implementation=("blocked", "xla"), return_weights=True), found, 0.0)
    assert jaxmha.explain(Q, K, V, implementation="xla").chosen == "reference"
    params = drawn.params(num_heads=N, features=8)
    x = np.ones((B, T, 8), np.float32)
    run = functools.partial(jaxmha.multi_head_attention, params, x)
    same(run(implementation="xla"), run(implementation="reference"), 0.0)
    with pytest.raises(ValueError, match="no implementation supports this request: cudnn"):
        ours(implementation="cudnn")
    for name in ("pallas", 3, ["xla", "pallas"]):
        with pytest.raises(ValueError, match="implementation must be among"):
            ours(implementation=name)


def test_large_numbers_of_positions_in_lengths() -> None:
    wide = np.array([2**32, 3])
    with pytest.raises(ValueError, match="int32"):
        theirs(key_value_seq_lengths=wide.astype(np.int16))
    same(
        ours(key_value_seq_lengths=wide), compiled(key_value_seq_lengths=np.array([T, 3], "int32"))
    )


def test_shapes_that_only_one_takes() -> None:
    wide = V[..., :2]
    with pytest.raises(ValueError, match="shape"):
        theirs(Q, K, wide)
    assert ours(Q, K, wide).shape == (B, T, N, 2)
    assert ours(Q[:, :0], K, V).shape == (B, 0, N, H)
    assert not ours(Q, K[:, :0], V[:, :0]).any()


@pytest.mark.parametrize("flag", [0, 1, None, np.array(True), jnp.array(True)], ids=str)
def test_flags_that_are_no_bool(flag: Any) -> None:
    same(theirs(is_causal=flag), theirs(is_causal=bool(flag)))
    with pytest.raises(TypeError, match="is_causal must be a bool, True or False, got"):
        ours(is_causal=flag)
    assert theirs(scale=True).shape == Q.shape
    with pytest.raises(TypeError, match="scale must be a Python number"):
        ours(scale=True)


def test_forms_that_only_jaxmha_takes() -> None:
    forms: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"key_value_seq_lengths": np.array(3)}, {"key_value_seq_lengths": np.full(B, 3)}),
        ({"local_window_size": np.array(2)}, {"local_window_size": 2}),
        ({"local_window_size": jnp.array(2)}, {"local_window_size": 2}),
    ]
    for form, plain in forms:
        with pytest.raises((TypeError, ValueError)):
            theirs(**form)
        same(ours(**form), ours(**plain))
    heads = [x.astype(jnp.float8_e4m3fn) for x in (Q, K, V)]
    with pytest.raises(ValueError, match="promotion"):
        theirs(*heads)
    assert ours(*heads).dtype == jnp.float8_e4m3fn


def test_dtypes_that_differ() -> None:
    with pytest.raises(ValueError, match="dtype"):
        theirs(Q, K.astype(np.float16), V)
    assert ours(Q, K.astype(np.float16), V).dtype == np.float32
    same(theirs(Q, K, V.astype(np.float64)), theirs())
    with pytest.raises(TypeError, match=r"value is float64.*round"):
        ours(Q, K, V.astype(np.float64))
    assert theirs(*(x.astype(np.int32) for x in (Q, K, V))).shape == Q.shape
    with pytest.raises(TypeError, match="query must be a floating array, got int32"):
        ours(*(x.astype(np.int32) for x in (Q, K, V)))


def test_lists() -> None:
    assert theirs(Q.tolist(), K, V).shape == Q.shape
    with pytest.raises(TypeError, match="query must be an array, got list"):
        ours(Q.tolist(), K, V)


@pytest.mark.parametrize("dtype", [np.int32, bool])
def test_bias_that_is_no_float(dtype: Any) -> None:
    """A Boolean one is added as 0 and 1, which is hardly ever meant."""
    bias = BIAS > 0
    same(theirs(bias=bias.astype(dtype)), theirs(bias=bias.astype(np.float32)))
    calls: list[Callable[[Any], Any]] = [
        lambda x: ours(bias=x),
        lambda x: jaxmha.multi_head_attention(
            drawn.params(num_heads=N, features=8),
            np.ones((B, T, 8), np.float32),
            bias=x,
        ),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="bias must be a floating array"):
            call(bias.astype(dtype))


def test_masks_that_are_not_boolean() -> None:
    for f in (ours, theirs):
        with pytest.raises((TypeError, ValueError), match=r"mask.*(int32|Boolean)"):
            f(mask=np.ones((1, 1, T, T), np.int32))


def test_causality_is_top_left_in_both() -> None:
    same(ours(Q[:, :3], K, V, is_causal=True), compiled(Q[:, :3], K, V, is_causal=True))
    same(ours(Q[:, :3], K, V, mask=Mask.causal(2)),
         compiled(Q[:, :3], K, V, mask=np.tri(3, T, 2, dtype=bool)))  # fmt: skip


def test_windows_that_are_traced() -> None:
    assert jax.jit(lambda w: theirs(local_window_size=(w, w)))(1).shape == Q.shape
    for window in (lambda w: w, lambda w: (w, 1), lambda w: [1, w]):
        with pytest.raises(TypeError, match=r"sides of local_window_size .*cannot be traced"):
            jax.jit(lambda w, window=window: ours(local_window_size=window(w)))(1)
    with pytest.raises(TypeError, match=r"is_causal must be a bool.*cannot be traced"):
        jax.jit(lambda c: ours(is_causal=c))(True)


def test_negative_windows() -> None:
    assert theirs(local_window_size=(-1, 2)).shape == Q.shape
    with pytest.raises(ValueError, match="sides of local_window_size must be >= 0"):
        ours(local_window_size=(-1, 2))


def test_gradient_of_a_bias_has_its_shape_in_both() -> None:
    bias = BIAS[:1, :1]
    found, want = (
        jax.jit(jax.grad(lambda x, f=f: (f(bias=x) ** 2).sum()))(bias) for f in (ours, theirs)
    )
    same(found, want, 2e-5)


def test_softmax_of_float64() -> None:
    with jax.enable_x64(True):
        heads = [x.astype(np.float64) for x in (Q, K, V)]
        gap = np.abs(ours(*heads) - theirs(*heads)).max()
        same(ours(*heads, softmax_dtype=np.float32), theirs(*heads), 1e-6)
    assert 1e-12 < gap < 1e-6


def test_linear_transpose() -> None:
    value = jnp.asarray(V)
    found = jax.linear_transpose(lambda v: theirs(Q, K, v), value)(value)
    pulled = jax.vjp(lambda v: ours(Q, K, v), value)[1](value)
    tolerance.assert_close(found[0], np.asarray(pulled[0]), factor=2)
    of_ours = jax.linear_transpose(lambda v: ours(Q, K, v, implementation="reference"), value)
    with pytest.raises(NotImplementedError, match="Transpose rule"):
        of_ours(value)


def test_forward_mode() -> None:
    assert jax.jvp(lambda q: theirs(q, K, V), (Q,), (Q,))[0].shape == Q.shape
    with pytest.raises(TypeError, match='implementation="reference"'):
        jax.jvp(lambda q: ours(q, K, V, implementation="blocked"), (Q,), (Q,))


@pytest.mark.slow  # JAX traces a program to its end before it refuses it
def test_gradient_of_a_gradient() -> None:
    heads = shaped(1, 600, 1, 2, dtype=jnp.float32)

    def twice(attend: Callable[..., Any], **options: Any) -> Any:
        once = jax.grad(lambda q: attend(q, q, q, is_causal=True, **options).sum())
        return jax.eval_shape(jax.grad(lambda q: once(q).sum()), heads)

    assert twice(theirs) == twice(ours, implementation="reference") == heads
    with pytest.raises(ValueError, match='needs implementation="reference"'):
        twice(ours, implementation="blocked")


@pytest.mark.parametrize("configured", [None, "tensorfloat32"])
def test_precision_of_products(configured: str | None) -> None:
    def precisions(attend: Callable[..., Any], **options: Any) -> set[str]:
        program = jax.jit(functools.partial(attend, **options)).lower(Q, K, V).as_text()
        return set(re.findall(r"precision = \[(\w+)", program))

    with jax.default_matmul_precision(configured):
        default = precisions(theirs)
        for name in ("reference", "blocked"):
            assert precisions(ours, implementation=name, precision="default") == {"DEFAULT"}
            assert precisions(ours, implementation=name) == (default if configured else {"HIGHEST"})
    assert default == {"HIGH" if configured else "DEFAULT"}


def test_scales_of_several_numbers() -> None:
    per_head = np.ones((1, T, T), np.float32)
    assert theirs(scale=per_head).shape == Q.shape
    with pytest.raises(ValueError, match="scale must be one number, or an array of shape"):
        ours(scale=per_head)


def test_infinities_are_looked_for() -> None:
    """jax_debug_infs stops at the lse of an empty row, which is -inf."""
    jax.config.update("jax_debug_infs", True)  # type: ignore[no-untyped-call]
    try:
        with pytest.raises(FloatingPointError):
            np.asarray(ours(key_value_seq_lengths=LENGTHS, return_lse=True)[1])
        theirs(key_value_seq_lengths=LENGTHS)
    finally:
        jax.config.update("jax_debug_infs", False)  # type: ignore[no-untyped-call]


def test_every_row_of_the_page_has_a_test() -> None:
    """Each names one, and those named are here."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 15
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        assert all(name in globals() for name in named), row
