"""Errors of gradients are those of `jax.nn` or less, over shapes, causality and distributions.

The unit is the RMS error of the exact result when it is rounded to float32.
"""

import functools
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha.implementations.tiled import feature_order
from jaxmha.implementations.tiled.tiling import tiling_for
from tests import conformance
from tests.drawn import to_jax

OPTIMISED = True  # compiled as users compile it
OURS = [name for name in ("blocked", "native") if name not in conformance.ABSENT]

SHAPES = (  # B T S N H
    (1, 7, 7, 1, 8),
    (1, 10, 10, 1, 512),
    (1, 33, 65, 3, 16),
    (8, 64, 64, 8, 64),
    (2, 5, 200, 4, 32),
    (1, 200, 300, 2, 32),
    (2, 127, 127, 4, 64),
    (1, 512, 512, 2, 80),
    (1, 257, 509, 2, 64),
    (1, 1031, 1031, 2, 64),
)
Arrays = tuple[Any, ...]


def _outliers(x: Any) -> Any:
    """One feature is 30 times as large as the others."""
    return x * np.where(np.arange(x.shape[-1]) == 1, 30.0, 1.0)


# Queries, keys and values of a generator and their shapes.
DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, Any, Any], Arrays]] = {
    "normal": lambda r, q, k: (r.standard_normal(q), r.standard_normal(k), r.standard_normal(k)),
    "queries x 8": lambda r, q, k: (
        8 * r.standard_normal(q), r.standard_normal(k), r.standard_normal(k),
    ),
    "queries x 30": lambda r, q, k: (
        30 * r.standard_normal(q), r.standard_normal(k), r.standard_normal(k),
    ),
    "uniform 0 1": lambda r, q, k: (r.random(q), r.random(k), r.random(k)),
    "uniform 1 2": lambda r, q, k: (1 + r.random(q), 1 + r.random(k), 1 + r.random(k)),
    "student t": lambda r, q, k: (
        r.standard_t(2, q), r.standard_t(2, k), r.standard_normal(k),
    ),
    "lognormal": lambda r, q, k: (r.lognormal(size=q), r.lognormal(size=k), r.lognormal(size=k)),
    "outlier feature": lambda r, q, k: (
        _outliers(r.standard_normal(q)), _outliers(r.standard_normal(k)), r.standard_normal(k),
    ),
    "constant and noise": lambda r, q, k: (
        3 + 0.1 * r.standard_normal(q), 3 + 0.1 * r.standard_normal(k),
        3 + 0.1 * r.standard_normal(k),
    ),
    "one hot": lambda r, q, k: (
        20.0 * (r.integers(q[-1], size=q[:-1])[..., None] == np.arange(q[-1])),
        1.0 * (r.integers(k[-1], size=k[:-1])[..., None] == np.arange(k[-1])),
        r.standard_normal(k),
    ),
}  # fmt: skip


class Case(NamedTuple):
    """One configuration of the grid."""

    shape: tuple[int, ...]
    causal: bool
    distribution: str


GRID = [Case(s, c, d) for s in SHAPES for c in (False, True) for d in DISTRIBUTIONS]


def draw(case: Case) -> Arrays:
    """Queries, keys, values and the cotangent of the output, in float32."""
    B, T, S, N, H = case.shape
    kind = [*DISTRIBUTIONS].index(case.distribution)
    rng = np.random.default_rng([*case.shape, case.causal, kind])
    heads = DISTRIBUTIONS[case.distribution](rng, (B, T, N, H), (B, S, N, H))
    return *(x.astype(np.float32) for x in heads), rng.standard_normal((B, T, N, H)).astype("f")


def exact(case: Case, arrays: Arrays) -> dict[str, Any]:
    """Output and gradients in float64, by the softmax Jacobian."""
    q, k, v, g = (np.moveaxis(x.astype(np.float64), 2, 1) for x in arrays)
    scale = case.shape[-1] ** -0.5
    logits = scale * q @ np.swapaxes(k, -1, -2)
    if case.causal:
        logits = np.where(np.tri(*logits.shape[-2:]) > 0, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = g @ np.swapaxes(v, -1, -2)
    delta = (weights * d_weights).sum(-1, keepdims=True)
    d_logits = scale * weights * (d_weights - delta)
    turned = np.swapaxes(d_logits, -1, -2)
    found = {"out": weights @ v, "dq": d_logits @ k, "dk": turned @ q}
    found |= {"out_alone": found["out"], "dv": np.swapaxes(weights, -1, -2) @ g}
    return {name: np.moveaxis(x, 1, 2) for name, x in found.items()}


@cache
def program(name: str, causal: bool, kind: str) -> Callable[..., dict[str, Any]]:
    """The output `alone`, or with the gradients, of `jax.nn` or of an implementation of ours."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        if name == "jax.nn":
            return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="xla")
        return jaxmha.dot_product_attention(q, k, v, is_causal=causal, implementation=name)

    def both(q: Any, k: Any, v: Any, g: Any) -> dict[str, Any]:
        out, back = jax.vjp(attend, q, k, v)
        return {"out": out, **dict(zip(("dq", "dk", "dv"), back(g), strict=True))}

    return jax.jit(both if kind == "gradients" else lambda *x: {"out_alone": attend(*x[:3])})


def rms_error(found: Any, wanted: Any) -> float:
    """The RMS error in units of rounding."""
    rounding = wanted.astype(np.float32) - wanted
    unit = max(float(np.sqrt((rounding**2).mean())), float(np.finfo(np.float32).tiny))
    error = np.asarray(found, np.float64) - wanted
    return float(np.sqrt((error**2).mean())) / unit


def measure(
    case: Case, implementations: tuple[str, ...], kinds: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    """RMS errors of every implementation of one configuration, in units of rounding."""
    arrays = draw(case)
    wanted = exact(case, arrays)
    given = [to_jax(x) for x in arrays]
    return {
        implementation: {
            name: rms_error(found, wanted[name])
            for kind in kinds
            for name, found in program(implementation, case.causal, kind)(*given).items()
        }
        for implementation in implementations
    }


# Small products, and large ones of odd sizes; `test_the_grid` has every combination.
QUICK = [
    case
    for case in GRID
    if (case.shape, case.causal) in (((1, 33, 65, 3, 16), False), ((1, 257, 509, 2, 64), True))
    and case.distribution in ("queries x 30", "student t", "uniform 1 2", "outlier feature")
]


KINDS = ("alone", "gradients")


def ratios(ours: str, grid: list[Case], kinds: tuple[str, ...] = KINDS) -> dict[str, Any]:
    """Errors in those of `jax.nn`."""
    found = [measure(case, (ours, "jax.nn"), kinds) for case in grid]
    return {
        name: np.array([errors[ours][name] / errors["jax.nn"][name] for errors in found])
        for name in found[0][ours]
    }


@pytest.mark.slow_variants("*blocked", "both*")
@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("grid", [QUICK[-4:], QUICK], ids=["odd", "both"])
def test_large_logits_and_offsets(ours: str, grid: list[Case]) -> None:
    """Weights computed again from the lse, or from logits that round differently, lose digits."""
    found = ratios(ours, grid, ("gradients",))
    for name in ("dq", "dk", "dv"):
        assert np.exp(np.log(found[name]).mean()) <= 1.0, name
        assert found[name].max() <= 2.0, name


# A few queries and keys; a scale that is no power of two; sums over keys of odd sizes, and over
# features of logits of 1,000. `test_the_grid` has them with and without causality.
WORST = {
    "few": [case for case in GRID if case.shape == (1, 7, 7, 1, 8) and not case.causal],
    "512 features": [case for case in GRID if case.shape == (1, 10, 10, 1, 512) and case.causal],
    "80 features": [Case((1, 512, 512, 2, 80), True, "outlier feature")],
    "odd": [Case((1, 257, 509, 2, 64), False, "uniform 0 1")],
}


@pytest.mark.everyday(sizes=["512 features"])
@pytest.mark.slow_variants("*blocked")
@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("sizes", WORST)
def test_the_worst_of_small_and_odd_sizes(ours: str, sizes: str) -> None:
    """Rounding of logits, scaled queries and delta, and long sums, cost up to 4 times the error."""
    for name, found in ratios(ours, WORST[sizes]).items():
        assert found.max() <= 2.0, (name, WORST[sizes][int(found.argmax())])


def test_the_largest_feature_is_added_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one feature is far larger, each sum of a logit after it rounds to its digits."""
    case = Case((1, 307, 311, 1, 64), False, "outlier feature")
    arrays, attend = (
        draw(case),
        functools.partial(jaxmha.dot_product_attention, implementation="blocked"),
    )
    monkeypatch.setattr(feature_order, "LEAST", 100)
    gradient = jax.jit(lambda q, k, v, g: jax.vjp(attend, q, k, v)[1](g)[1])
    wanted = exact(case, arrays)["dk"]
    found = {}
    for name, order in (("second", np.arange(64)), ("last", np.roll(np.arange(64), -2))):
        query, key, value = arrays[0][..., order], arrays[1][..., order], arrays[2]
        found[name] = rms_error(gradient(query, key, value, arrays[3]), wanted[..., order])
    assert found["second"] < 1.5 * found["last"]


@pytest.mark.slow_variants("2-2")
@pytest.mark.parametrize(("N", "K"), [(2, 2), (6, 2)])
def test_exchanged_features(N: int, K: int) -> None:
    """Each key head has a largest feature of its own, and exchanging twice changes nothing."""
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((3, n, 1031, 5)).astype("f") for n in (N, K))
    largest = rng.integers(5, size=(3, K))
    for b, k in np.ndindex(3, K):
        key[b, k, 7, largest[b, k]] = 1e6
    tiling = tiling_for(to_jax(query), to_jax(key), platform="cpu", plain=True)
    feature = feature_order.largest_feature(tiling, to_jax(query), to_jax(key), "cpu")
    np.testing.assert_array_equal(feature, largest)
    given = to_jax(query), to_jax(key)
    moved = feature_order.exchanged(feature, given)
    for x, y in zip((query, key), moved, strict=True):
        of_head = largest if x.shape[1] == K else np.repeat(largest, N // K, 1)
        for b, n in np.ndindex(3, x.shape[1]):
            order = [*range(5)]
            order[of_head[b, n]], order[4] = 4, of_head[b, n]
            np.testing.assert_array_equal(y[b, n], x[b, n][:, order])
    for before, after in zip(given, feature_order.exchanged(feature, moved), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.slow
@pytest.mark.parametrize("ours", OURS)
def test_the_grid(ours: str) -> None:
    for name, found in ratios(ours, GRID).items():
        assert np.exp(np.log(found).mean()) <= 1.0, name
        assert found.max() <= 2.0, (name, GRID[int(found.argmax())])


@pytest.mark.slow
def test_gradients_that_are_zero() -> None:
    """A saturated softmax: uniform inputs and weights, one head of 512 features."""
    rng = np.random.default_rng(1)
    x = rng.random((1, 10, 512)).astype(np.float32)
    weights = [rng.random((512, 512)).astype(np.float32) for _ in range(3)]

    def gradients(name: str) -> list[float]:
        def loss(weights: Any) -> Any:
            heads = [(x @ w)[:, :, None] for w in weights]
            if name == "jax.nn":
                return jax.nn.dot_product_attention(*heads).sum()
            return jaxmha.dot_product_attention(*heads, implementation=name).sum()

        d_query, d_key, d_value = (np.abs(d).max() for d in jax.jit(jax.grad(loss))(weights))
        return [float(d_query / d_value), float(d_key / d_value)]

    theirs = gradients("jax.nn")
    for implementation in (*OURS, "reference"):
        for mine, limit in zip(gradients(implementation), theirs, strict=True):
            assert mine <= limit


# Batch, queries, keys, heads, key heads; features are 40. Blocks of rows and of keys differ in
# size wherever keys are cut.
SUMS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one block": ((1, 499, 431, 1, 1), {}),
    "one block, bias": (
        (1, 499, 431, 1, 1), {"bias": np.linspace(-3, 3, 431, dtype="f").reshape(1, 1, 1, 431)},
    ),
    "grouped, padded": ((2, 53, 149, 6, 2), {"key_value_seq_lengths": np.array([101, 149])}),
    "causal": ((1, 307, 701, 1, 1), {"is_causal": True}),
    "causal, grouped, padded": (
        (1, 521, 1031, 3, 1), {"is_causal": True, "key_value_seq_lengths": np.array([997])},
    ),
    "window": ((1, 523, 701, 1, 1), {"local_window_size": (307, 61)}),
}  # fmt: skip


@pytest.mark.everyday(name=["one block, bias", "causal", "window"])
@pytest.mark.slow_variants("causal-300.0", "one block, bias-1000000000.0", "window-*")
@pytest.mark.parametrize("size", [300.0, 1e9])
@pytest.mark.parametrize("name", [*SUMS])
def test_weights_of_the_gradient_sum_to_one(name: str, size: float) -> None:
    """Products round large logits by their shape; of 1e9 by more than an exponential holds."""
    (B, T, S, N, K), options = SUMS[name]
    rng = np.random.default_rng(0)
    q, k = (
        to_jax(x * rng.standard_normal((B, n, heads, 40)), jnp.float32)
        for x, n, heads in ((size, T, N), (1.0, S, K))
    )
    v, cotangent = jnp.zeros((B, S, K, 40)), jnp.ones((B, T, N, 40))

    def attend(v: Any) -> Any:
        return jaxmha.dot_product_attention(q, k, v, implementation="blocked", **options)

    (dv,) = jax.jit(lambda v, g: jax.vjp(attend, v)[1](g))(v, cotangent)
    rows = T * N // K
    np.testing.assert_allclose(np.asarray(dv, np.float64).sum(1), rows, rtol=2e-6)


@pytest.mark.slow  # `test_weights_of_the_gradient_sum_to_one` has causal logits of 1e9
def test_weights_of_huge_logits_are_at_most_one() -> None:
    """The gradient rounds logits of 1e9 in another way than the output, by more than 60."""
    rng = np.random.default_rng(0)
    q, k, v, cotangent = (
        to_jax(rng.standard_normal((1, size, 1, 64)), jnp.float32) for size in (300, 700, 700, 300)
    )
    attend = functools.partial(
        jaxmha.dot_product_attention, is_causal=True, implementation="blocked"
    )
    gradient = jax.jit(lambda *x: jax.vjp(attend, *x[:3])[1](x[3])[2])
    found = gradient(1e9 * q, k, v, cotangent)
    assert float(jnp.abs(found).max()) <= float(jnp.abs(cotangent).sum(1).max())


HUGE: dict[str, tuple[int, dict[str, Any]]] = {
    "one feature": (1, {}),
    "one feature, mask function": (1, {"mask_mod": lambda b, n, i, j: j < 9}),
    "soft cap": (8, {"logits_soft_cap": 1e10}),
    "scale": (8, {"scale": 0.3}),
    "score function": (8, {"score_mod": lambda score, b, n, i, j: 1.3 * score}),
    "score function, mask": (
        8,
        {"score_mod": lambda score, b, n, i, j: 1.3 * score, "is_causal": True},
    ),
}


# One feature shows a product that is fused with what follows, a score function a fused score.
@pytest.mark.everyday(name=["one feature", "score function"])
@pytest.mark.slow_variants("one feature-blocked", "score function-reference")
@pytest.mark.parametrize("implementation", ["blocked", "reference"])
@pytest.mark.parametrize("name", HUGE)
def test_huge_logits_round_once(name: str, implementation: str) -> None:
    """An FMA would round `a * b - row_max` in another way than the row max: NaN, or weights of 0."""
    H, options = HUGE[name]
    rng = np.random.default_rng(0)
    q, k, v = (to_jax(rng.standard_normal((1, 40, 2, size)), jnp.float32) for size in (H, H, 3))
    attend = functools.partial(
        jaxmha.dot_product_attention, implementation=implementation, **options
    )

    @jax.jit
    def both(*heads: Any) -> Any:
        out, pull = jax.vjp(attend, *heads)
        return out, pull(jnp.ones_like(out))[2].sum()

    out, total = both(1e12 * q, k, jnp.ones_like(v))
    np.testing.assert_allclose(out, 1.0, rtol=1e-6)
    np.testing.assert_allclose(total, out.size, rtol=1e-6)
