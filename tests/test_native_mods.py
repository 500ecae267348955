"""Mask and score functions in the native kernels: a bit per pair, and a bias per distance."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask, mods
from jaxmha.implementations.mods import trace
from jaxmha.implementations.native import masked, primitives
from tests import conformance, tolerance
from tests.drawn import to_jax

pytestmark = conformance.native_built
B, N, K, H, h, T, S = 2, 4, 2, 6, 5, 197, 211
rng = np.random.default_rng(0)
IDS = to_jax(np.sort(rng.integers(0, 4, (B, max(T, S))), 1), jnp.int32)
LAYOUT = to_jax(rng.random((N, 7, 7)) < 0.25)
FUNCTIONS: dict[str, Any] = {
    "documents": lambda b, n, i, j: (IDS[b, i] == IDS[b, j]) & ((i + j + n) % 5 != 0),
    "window": mods.window(17, 3),
    "heads": lambda b, n, i, j: (i - j) % (n + 2) != 0,
    "blocks": mods.block_sparse(LAYOUT, 32),
    "nothing": lambda b, n, i, j: (i < 64) & (j > 100),
    "everything": lambda b, n, i, j: i >= 0,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"is_causal": True},
    "lengths": {
        "key_value_seq_lengths": np.array([173, 20], np.int32),
        "query_seq_lengths": np.array([197, 12], np.int32),
    },
    "window and soft cap": {"local_window_size": (70, 30), "logits_soft_cap": 2.0},
    "a dense mask": {"mask": Mask.dense(rng.random((B, 1, T, S)) < 0.7)},
    "documents": {
        "mask": Mask.segments(query_ids=IDS[:, :T], key_value_ids=IDS[:, :S]) & Mask.causal(11)
    },
}
EVERYDAY = [("documents", "causal"), ("blocks", "a dense mask"), ("heads", "window and soft cap")]


def arrays(dtype: str = "float32") -> tuple[jax.Array, ...]:
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, h)
    given = np.random.default_rng(1)
    return tuple(to_jax(given.standard_normal(shape), dtype) for shape in shapes)


def attend(function: Any, options: Any, implementation: str, *arrays: jax.Array) -> Any:
    return jaxmha.dot_product_attention(
        *arrays, mask_mod=function, implementation=implementation, return_lse=True, **options
    )


def loss(*given: Any) -> jax.Array:
    out, lse = attend(*given)
    total: jax.Array = (out.astype("float32") ** 2).sum()
    return total + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()


def loss_and_outputs(*given: Any) -> Any:
    out, lse = attend(*given)
    return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum(), (out, lse)


def by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluates the mask of 64 queries at a time."""
    for name in ("MASK_BYTES", "WHOLE", "PARTS"):
        monkeypatch.setattr(masked, name, 0)


@pytest.mark.slow_variants("heads-window and soft cap-True", "documents-causal-True")
@pytest.mark.parametrize("parts", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("name", "option"),
    [
        pytest.param(*pair, marks=[] if pair in EVERYDAY else pytest.mark.slow)
        for pair in [(x, y) for x in FUNCTIONS for y in OPTIONS]
    ],
)
def test_native_is_reference(
    name: str, option: str, *, parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All queries at once, and some at a time, of which the last are fewer."""
    if parts:
        by_parts(monkeypatch)
    given = FUNCTIONS[name], OPTIONS[option]
    of: Any = partial(jax.grad, argnums=(0, 1, 2), has_aux=True)
    (got_gradients, got), (gradients, want) = (
        of(partial(loss_and_outputs, *given, which))(*arrays()) for which in ("native", "reference")
    )
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=2e-6)
    for x, y in zip(got_gradients, gradients, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6 * float(jnp.abs(y).max()))


@pytest.mark.parametrize("S", [pytest.param(8192, marks=pytest.mark.slow), 1031])
def test_parts_of_the_keys(S: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients by parts of queries and of keys, whose last ones are longer."""
    by_parts(monkeypatch)
    shapes = (1, 131, 2, 3), (1, S, 1, 3), (1, S, 1, 4)
    heads = [to_jax(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    ids = to_jax(np.sort(rng.integers(0, 3, (1, S)), 1), jnp.int32)

    def function(b: Any, n: Any, i: Any, j: Any) -> Any:
        return (ids[b, S // 131 * i] == ids[b, j]) | (j // 64 % 5 == i // 64 + n)

    dense = rng.random((1, 1, 131, S)) < 0.9
    mask = Mask.lengths(key_value=np.array([S - 5])) & Mask.causal(S - 140) & Mask.dense(dense)
    got, want = (
        jax.jit(jax.grad(partial(loss, function, {"mask": mask}, which), (0, 1, 2)))(*heads)
        for which in ("native", "reference")
    )
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6 * float(jnp.abs(y).max()))


def test_both_passes_know_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of other sizes would choose other kernels, which sum logits in another order."""
    by_parts(monkeypatch)
    seen: list[tuple[str, bool]] = []
    originals = {name: getattr(primitives, name) for name in ("attend", "attend_backward")}
    for name, original in originals.items():

        def watched(settings: Any, *given: Any, name: str = name, original: Any = original) -> Any:
            seen.append((name, settings.in_parts))
            return original(settings, *given)

        monkeypatch.setattr(primitives, name, watched)
    gradients = jax.grad(partial(loss, FUNCTIONS["everything"], {}, "native"), (0, 1, 2))
    # No other test has this dtype: JAX would not trace a program that it has traced before.
    jax.eval_shape(gradients, *arrays("float16"))
    assert ("attend", True) in seen  # and False, where JAX traces it without a gradient
    assert {parts for name, parts in seen if name == "attend_backward"} == {True}


def test_half_precision_gradients_are_sums_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of keys are rounded once, not for every part of the queries."""
    by_parts(monkeypatch)
    half = arrays("bfloat16")
    given: Any = FUNCTIONS["everything"], {}
    got, want = (
        jax.jit(jax.grad(partial(loss, *given, which), (0, 1, 2)))(*half)
        for which in ("native", "blocked")
    )
    for x, y in zip(got, want, strict=True):
        assert x.dtype == jnp.bfloat16
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        assert np.abs(x - y).max() <= 2.0**-7 * np.abs(y).max()


def test_nan_in_excluded_positions_has_no_influence() -> None:
    query, key, value = arrays()
    function = FUNCTIONS["nothing"]
    want = attend(function, {}, "native", query, key, value)
    poisoned = query.at[:, 64:].set(jnp.nan), *(x.at[:, :100].set(jnp.nan) for x in (key, value))
    got = attend(function, {}, "native", *poisoned)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
    gradients = jax.jit(jax.grad(partial(loss, function, {}, "native"), (0, 1, 2)))(*poisoned)
    assert all(bool(jnp.isfinite(x).all()) for x in gradients)


@pytest.mark.slow
def test_mapped_arrays_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """vmap over captured arrays, whose mask gets one more axis; and the portable program."""
    by_parts(monkeypatch)
    ids = jnp.stack([IDS, IDS[::-1]])

    def one(ids: jax.Array, implementation: str) -> Any:
        function = mods.document(ids[:, :T], ids[:, :S])
        gradient = jax.grad(partial(loss, function, {}, implementation), (0, 1, 2))(*arrays())
        return attend(function, {}, implementation, *arrays()), gradient

    got, want = (
        jax.jit(jax.vmap(partial(one, implementation=x)))(ids) for x in ("native", "reference")
    )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    exported: Any = jax.export.export(jax.jit(partial(one, implementation="native")))(IDS)
    for x, y in zip(jax.tree.leaves(exported.call(IDS)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y[0], rtol=1e-5, atol=1e-5)


# Score functions of arrays, and their arrays.
DISTANCES: dict[str, tuple[Any, Any]] = {
    "alibi": (mods.alibi, mods.alibi_slopes(N)),
    "t5": (partial(mods.relative_bias, bucket=mods.t5()), rng.standard_normal((32, N))),
    "of a batch row": (
        lambda x: lambda score, b, n, i, j: score - x[b] * abs(i - j).astype(x.dtype),
        rng.standard_normal(B),
    ),
}


def biased(name: str, options: Any, implementation: str, array: Any, *arrays: Any) -> Any:
    out, lse = jaxmha.dot_product_attention(
        *arrays,
        score_mod=DISTANCES[name][0](array),
        implementation=implementation,
        return_lse=True,
        **options,
    )
    return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum(), out


@pytest.mark.everyday(name=["t5", "of a batch row"])
@pytest.mark.parametrize("name", DISTANCES)
@pytest.mark.parametrize("queries", [pytest.param(1, marks=pytest.mark.slow), T])
def test_biases_of_distances(name: str, queries: int) -> None:
    """Values and all gradients, mapped, and by the portable program."""
    option = {"alibi": "causal", "t5": "window and soft cap", "of a batch row": "lengths"}[name]
    options = OPTIONS[option] if queries == T else {}
    query, *keys = arrays()
    given = to_jax(DISTANCES[name][1], jnp.float32), query[:, :queries], *keys
    of = (0, 1, 2, 3)
    got = jax.value_and_grad(partial(biased, name, options, "native"), of, has_aux=True)(*given)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(jnp.float64), given)
        want = jax.value_and_grad(partial(biased, name, options, "reference"), of, has_aux=True)(
            *wide
        )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        tolerance.assert_close(x, np.asarray(y), factor=2)


@pytest.mark.slow
def test_mapped_and_exported_biases_of_distances() -> None:
    def one(array: Any, implementation: str) -> Any:
        run = partial(biased, "t5", {}, implementation)
        return jax.value_and_grad(run, has_aux=True)(array, *arrays())

    tables = to_jax(np.random.default_rng(2).standard_normal((2, 32, N)), jnp.float32)
    got, want = (
        jax.jit(jax.vmap(partial(one, implementation=x)))(tables) for x in ("native", "reference")
    )
    exported: Any = jax.export.export(jax.jit(partial(one, implementation="native")))(tables[0])
    first = jax.tree.map(lambda x: x[0], want)
    for x, y in zip(
        jax.tree.leaves((got, exported.call(tables[0]))),
        jax.tree.leaves((want, first)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6 * float(jnp.abs(y).max()))


@pytest.mark.parametrize(
    ("function", "adds"),
    [
        (lambda x, b, n, i, j: x + 2.0 * (j - i).astype("float32"), True),
        (lambda x, b, n, i, j: x - abs(i - j).astype(x.dtype), True),
        (lambda x, b, n, i, j: (j - i).astype("float32") + x, True),
        (lambda x, b, n, i, j: (j - i).astype("float32") - x, False),
        (lambda x, b, n, i, j: x + (j - i).astype("float32") * x, False),
        (lambda x, b, n, i, j: x + j.astype("float32"), False),
        (lambda x, b, n, i, j: x + (j.astype("bfloat16") - i.astype("bfloat16")), False),
        (lambda x, b, n, i, j: jnp.where(i - j > 3, x, x + 1), False),
        (lambda x, b, n, i, j: x + (i - j).astype("float32") + i.astype("float32"), False),
        (lambda x, b, n, i, j: x + x, False),
        (lambda x, b, n, i, j: x, False),
    ],
)
def test_which_functions_add_a_bias_of_distances(function: Any, adds: bool) -> None:
    with jax.numpy_dtype_promotion("standard"):
        made = trace("score_mod", function, np.dtype(np.float32))
    assert made is not None
    assert made.program.adds_bias == adds


@pytest.mark.parametrize("heads", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gradient", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_memory_is_that_of_the_call_without_functions(*, gradient: bool, heads: int) -> None:
    """Outputs and temporary arrays, for heads of 64 features and T = S = 16,384."""
    x: Any = jax.eval_shape(lambda: jnp.zeros((1, 16384, heads, 64)))
    ids = jnp.arange(16384) // 1000

    def bytes_of(**functions: Any) -> int:
        def run(*given: Any) -> Any:
            return jaxmha.dot_product_attention(*given, implementation="native", **functions)

        function: Any = jax.grad(lambda *given: run(*given).sum(), (0, 1, 2)) if gradient else run
        held: Any = jax.jit(function).lower(x, x, x).compile().memory_analysis()
        return int(held.temp_size_in_bytes + held.output_size_in_bytes)

    most = 1.3 * bytes_of()
    table = jnp.zeros((32, heads))
    assert bytes_of(score_mod=mods.relative_bias(table, mods.t5())) < most
    # A mask for each head.
    assert bytes_of(mask_mod=lambda b, n, i, j: abs(ids[i] - ids[j]) < 1 + n) < most
