"""Score and mask functions against a materialised float64 oracle, and against `reference`."""

from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import attention as attention_arguments
from jaxmha.implementations.tiled import attention
from tests import drawn
from tests.drawn import to_jax

Arrays: TypeAlias = tuple[jax.Array, ...]
# Tiles smaller than T and S, which are no multiples of them.
SMALL_TILES = {"target": 4 * 7 * 9 * 2, "least_rows": 7, "side": 9}
B, N, K, H, h = 2, 4, 2, 6, 5
IMPLEMENTATIONS = ("reference", "blocked")


def operands(T: int, S: int, dtype: str = "float32") -> Arrays:
    """Query, key, value, bias, and one captured array with an entry per head."""
    rng = np.random.default_rng(T)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, h), (1, N, T, S), (N,)
    return tuple(to_jax(rng.standard_normal(shape), dtype) for shape in shapes)


def documents(S: int) -> jax.Array:
    return to_jax(np.sort(np.random.default_rng(1).integers(0, 4, (B, S)), 1), "int32")


def call(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array,
    temperature: jax.Array,
    **options: Any,
) -> Arrays:
    """Output and lse under a document mask, with a temperature and a distance per head."""
    ids = documents(key.shape[1])

    def score_mod(score: jax.Array, b: Any, n: Any, i: Any, j: Any) -> jax.Array:
        distance = jnp.abs(i - j).astype(score.dtype)
        found: jax.Array = score * jnp.cos(temperature[n]) - 0.1 * temperature[n] * distance
        return found

    def mask_mod(b: Any, n: Any, i: Any, j: Any) -> jax.Array:
        found: jax.Array = (ids[b, i] == ids[b, j]) & ((i + j + n) % 5 != 0)
        return found

    found: Arrays = jaxmha.dot_product_attention(
        query, key, value, bias, score_mod=score_mod, mask_mod=mask_mod, return_lse=True, **options
    )
    return found


def loss(*arrays: jax.Array, **options: Any) -> jax.Array:
    out, lse = call(*arrays, **options)
    total = (out.astype("float32") ** 2).sum().astype(lse.dtype)
    return total + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()


def relative_error(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "lengths": {
        "key_value_seq_lengths": np.array([19, 11], np.int32),
        "query_seq_lengths": np.array([17, 5], np.int32),
    },
    "window and soft cap": {"local_window_size": (7, 3), "logits_soft_cap": 2.0},
    "dropout": {"dropout_rate": 0.3, "dropout_key": jnp.asarray([0, 7], "uint32")},
}


@pytest.mark.slow  # in every run: finite differences here, float32 in `test_named_mods`
@pytest.mark.parametrize("name", OPTIONS)
def test_blocked_is_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = OPTIONS[name]
    monkeypatch.setattr(attention, "SIZES", SMALL_TILES)
    arrays = operands(17, 19)
    every = tuple(range(len(arrays)))
    want, got = (
        jax.jit(jax.value_and_grad(partial(loss, **options, implementation=x), every))(*arrays)
        for x in IMPLEMENTATIONS
    )
    assert relative_error(got[0], want[0]) < 1e-6
    for x, y in zip(got[1], want[1], strict=True):
        assert relative_error(x, y) < 3e-6


def oracle(q: Any, k: Any, v: Any, bias: Any, temperature: Any) -> tuple[Any, Any]:
    """Output and lse of `call` in NumPy, with every score materialised."""
    T, S = q.shape[1], k.shape[1]
    ids = np.asarray(documents(S))
    b, n, i, j = np.ogrid[:B, :N, :T, :S]
    k, v = (np.repeat(x, N // K, 2) for x in (k, v))
    score = np.einsum("btnh,bsnh->bnts", q, k) * H**-0.5 + bias
    score = score * np.cos(temperature[n]) - 0.1 * temperature[n] * np.abs(i - j)
    allowed = (ids[b, i] == ids[b, j]) & ((i + j + n) % 5 != 0)
    exps = np.where(allowed, np.exp(score), 0.0)
    total = exps.sum(-1)
    weights = exps / np.where(total == 0, 1, total)[..., None]
    with np.errstate(divide="ignore"):
        return np.einsum("bnts,bsnh->btnh", weights, v), np.log(total)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_are_those_of_a_materialised_oracle(implementation: str) -> None:
    arrays = operands(21, 26)
    out, lse = call(*arrays, implementation=implementation)
    want = oracle(*(np.asarray(x, np.float64) for x in arrays))
    assert relative_error(out, want[0]) < 1e-6
    assert np.array_equal(np.isinf(lse), np.isinf(want[1]))
    finite = np.isfinite(want[1])
    assert relative_error(np.asarray(lse)[finite], want[1][finite]) < 1e-6


@pytest.mark.slow_variants("reference")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_finite_differences_in_float64(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SIZES", SMALL_TILES)
    with jax.enable_x64(True):
        arrays = tuple(np.asarray(x) for x in operands(17, 19, "float64"))
        function: Any = partial(loss64, is_causal=True, implementation=implementation)
        run = jax.jit(jax.value_and_grad(function, tuple(range(5))))
        gradients = map(np.asarray, run(*arrays)[1])
        for place, gradient in enumerate(gradients):
            direction = np.random.default_rng(place).standard_normal(gradient.shape)
            step = 1e-6
            plus, minus = (
                run(*(x + s * direction if n == place else x for n, x in enumerate(arrays)))[0]
                for s in (step, -step)
            )
            got, want = float((gradient * direction).sum()), float(plus - minus) / (2 * step)
            assert abs(got - want) < 1e-6 * max(abs(want), 1)


def loss64(*arrays: jax.Array, **options: Any) -> jax.Array:
    out, lse = call(*arrays, **options)
    return (out**2).sum() + jnp.where(jnp.isfinite(lse), lse, 0.0).sum()


@pytest.mark.slow_variants("reference")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_in_excluded_positions_has_no_influence(implementation: str) -> None:
    query, key, value, bias, temperature = operands(17, 19)
    dead = np.arange(19) % 7 == 3
    nan = partial(np.where, dead.reshape(1, 19, 1, 1), np.float32(np.nan))
    bias = to_jax(np.where(dead, np.float32(np.nan), bias))
    dead = to_jax(dead)

    def total(query: jax.Array, key: jax.Array, value: jax.Array, t: jax.Array) -> jax.Array:
        out = jaxmha.dot_product_attention(
            query, key, value, bias,
            score_mod=lambda score, b, n, i, j: score * t[n],
            mask_mod=lambda b, n, i, j: ~dead[j],
            implementation=implementation,
        )  # fmt: skip
        return out.sum()

    value_and_gradients = jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))
    found = value_and_gradients(query, nan(key), nan(value), temperature)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(found))
    clean = value_and_gradients(query, key, value, temperature)
    assert relative_error(found[0], clean[0]) < 1e-6


@pytest.mark.usefixtures("x64")  # the derivative is large near 0
@pytest.mark.parametrize("lengths", [False, True])
def test_rows_that_are_none_spoil_no_gradient(lengths: bool, monkeypatch: Any) -> None:
    """The derivative of the score function is infinite at 0, the score of padded rows, and of those
    beyond a length, whose bias is NaN. (The captured array reads their 0 in `reference` too.)"""
    monkeypatch.setattr(attention, "SIZES", SMALL_TILES)
    *heads, bias, temperature = operands(17, 19, "float64")
    options: dict[str, Any] = {"mask_mod": lambda b, n, i, j: j >= 0}
    if lengths:
        bias = bias.at[:, :, 13:].set(jnp.nan)
        options = {"query_seq_lengths": np.array([13, 8]), "bias": bias}

    def total(heads: Any, t: jax.Array, implementation: str) -> Any:
        return jaxmha.dot_product_attention(
            *heads, **options, implementation=implementation,
            score_mod=lambda score, b, n, i, j: jnp.sqrt(jnp.abs(score * t[n])),
        ).sum()  # fmt: skip

    places = (0,) if lengths else (0, 1)
    gradients = jax.jit(jax.grad(total, places), static_argnums=2)
    want, got = (gradients(heads, temperature, x) for x in IMPLEMENTATIONS)
    for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert relative_error(x, y) < 1e-5  # NaN is not


def test_a_few_queries_of_a_long_cache() -> None:
    """`few_queries`, the first choice for a single query."""
    query, key, value, _, temperature = operands(1, 96)

    def total(implementation: str | None, t: jax.Array) -> jax.Array:
        return jaxmha.dot_product_attention(
            query, key, value,
            score_mod=lambda score, b, n, i, j: score - t[n] * j.astype(score.dtype),
            mask_mod=lambda b, n, i, j: j % 3 != b,
            implementation=implementation,
        ).sum()  # fmt: skip

    chosen = jaxmha.explain(query, key, value, score_mod=lambda score, *_: score).chosen
    assert chosen == "few_queries"
    both = (jax.jit(jax.value_and_grad(partial(total, x))) for x in ("reference", None))
    want, got = (run(temperature) for run in both)
    for x, y in zip(got, want, strict=True):
        assert relative_error(x, y) < 1e-6


def test_a_function_traced_again_compiles_once() -> None:
    query, key, value, _, temperature = operands(5, 6)
    core: Any = attention_arguments._dot_product_attention

    def run(t: jax.Array) -> jax.Array:
        return jaxmha.dot_product_attention(
            query, key, value, score_mod=lambda score, b, n, i, j: score * t[n]
        )

    run(temperature)
    before = core._cache_size()
    assert relative_error(run(2 * temperature), run(temperature)) > 1e-3
    assert core._cache_size() == before


def test_batched_and_traced_captured_arrays() -> None:
    query, key, value, _, temperature = operands(5, 6)

    def run(t: jax.Array) -> jax.Array:
        return jaxmha.dot_product_attention(
            query, key, value, score_mod=lambda score, b, n, i, j: score * t[n]
        )

    many = jnp.stack([temperature, 2 * temperature])
    assert relative_error(jax.vmap(run)(many)[1], run(2 * temperature)) < 1e-6
    assert relative_error(jax.jit(run)(temperature), run(temperature)) < 1e-6
    bound: Any = jax.tree_util.Partial
    mod = bound(lambda t, score, b, n, i, j: score * t[n], temperature)
    jitted = jax.jit(lambda mod: jaxmha.dot_product_attention(query, key, value, score_mod=mod))
    assert relative_error(jitted(mod), run(temperature)) < 1e-6


@pytest.mark.parametrize("policy", ["zero", "nan", "mean"])
def test_fully_masked_rows(policy: Any) -> None:
    query, key, value, *_ = operands(9, 11)
    got = jaxmha.dot_product_attention(
        query, key, value, mask_mod=lambda b, n, i, j: i % 3 != 0, fully_masked=policy,
        implementation="blocked",
    )  # fmt: skip
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    k, v = (np.repeat(x, N // K, 2) for x in (k, v))
    exps = np.exp(np.einsum("btnh,bsnh->bnts", q, k) * H**-0.5)
    want = np.einsum("bnts,bsnh->btnh", exps / exps.sum(-1, keepdims=True), v)
    want[:, ::3] = {"zero": 0, "nan": np.nan, "mean": v.mean(1, keepdims=True)}[policy]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_half_precision_scores_are_float32() -> None:
    query, key, value, *_ = operands(9, 11, "bfloat16")
    dtypes = []

    def score_mod(score: jax.Array, *_: Any) -> jax.Array:
        dtypes.append(score.dtype)
        return score

    out = jaxmha.dot_product_attention(query, key, value, score_mod=score_mod)
    assert (dtypes[0], out.dtype) == (jnp.float32, jnp.bfloat16)


def test_a_layer_with_extra_positions() -> None:
    params = drawn.params(num_heads=N, features=8, use_bias_kv=True)
    x = to_jax(np.random.default_rng(0).standard_normal((B, 7, 8)), "float32")
    rates = jnp.arange(1.0, N + 1)
    i, j = np.ogrid[:7, :7]
    bias = -rates[:, None, None] * to_jax(np.abs(i - j), "float32")[None]
    want = jaxmha.multi_head_attention(params, x, bias=bias, mask=to_jax(j % 3 != 1))
    got = jaxmha.multi_head_attention(
        params, x, implementation="blocked",
        score_mod=lambda score, b, n, i, j: score - rates[n] * jnp.abs(i - j).astype("float32"),
        mask_mod=lambda b, n, i, j: j % 3 != 1,
    )  # fmt: skip
    assert relative_error(got, want) < 1e-6


def test_a_traced_scale_and_poisoned_queries() -> None:
    query, key, value, *_ = operands(9, 11)
    query = query.at[:, 4].set(jnp.nan)

    def total(scale: jax.Array) -> jax.Array:
        return jaxmha.dot_product_attention(
            query, key, value, scale=scale, mask_mod=lambda b, n, i, j: i != 4
        ).sum()

    assert np.isfinite(jax.grad(total)(jnp.float32(0.3)))


Wrong: TypeAlias = tuple[dict[str, Any], type[Exception], str]
WRONG: dict[str, Wrong] = {
    "a score as mask": ({"mask_mod": lambda b, n, i, j: i}, TypeError, "mask_mod must return a B"),
    "a mask as score": (
        {"score_mod": lambda score, b, n, i, j: i > j},
        TypeError,
        "score_mod must return a score",
    ),
    "a row": (
        {"score_mod": lambda score, b, n, i, j: jnp.zeros(3)},
        ValueError,
        r"one value per pair.*got \(3,\)",
    ),
    "several": ({"mask_mod": lambda b, n, i, j: (i > j, i < j)}, TypeError, "one array, got tuple"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_functions_are_refused(wrong: Wrong) -> None:
    arguments, kind, message = wrong
    with pytest.raises(kind, match=message):
        jaxmha.dot_product_attention(*operands(5, 6)[:3], **arguments)


def test_kernels_refuse_by_name() -> None:
    shaped: Any = jax.ShapeDtypeStruct
    shape = shaped((2, 512, 4, 64), "bfloat16")
    names = "cudnn", "native", "blocked"
    explain = partial(jaxmha.explain, shape, shape, shape, implementation=names, platform="h100")
    reasons = dict(explain(score_mod=lambda score, *_: score).reasons)
    assert (reasons["cudnn"], reasons["blocked"]) == (
        "cuDNN takes no function, got a score_mod",
        None,
    )
    reasons = dict(explain(mask_mod=lambda b, n, i, j: i > j).reasons)
    assert (reasons["cudnn"], reasons["blocked"]) == (
        "cuDNN takes no function, got a mask_mod",
        None,
    )


def test_functions_with_custom_gradients_and_inner_jit() -> None:
    query, key, value, _, temperature = operands(5, 6)

    @jax.jit
    def score_mod(score: jax.Array, b: Any, n: Any, i: Any, j: Any) -> jax.Array:
        return jax.nn.softplus(score) + jax.nn.relu(temperature)[n]

    def total(name: str, query: jax.Array) -> jax.Array:
        return (
            jaxmha.dot_product_attention(
                query, key, value, score_mod=score_mod, implementation=name
            )
            ** 2
        ).sum()

    want, got = (jax.jit(jax.grad(partial(total, name)))(query) for name in IMPLEMENTATIONS)
    assert relative_error(got, want) < 1e-6


@pytest.mark.slow_variants("False")
@pytest.mark.parametrize("paged", [False, True])
def test_decoding_is_a_causal_layer(paged: bool) -> None:
    params = drawn.params(num_heads=N, num_kv_heads=K, features=8)
    x = to_jax(np.random.default_rng(0).standard_normal((B, 9, 8)), "float32")
    rates = jnp.arange(1.0, N + 1)

    def score_mod(score: jax.Array, b: Any, n: Any, i: Any, j: Any) -> jax.Array:
        found: jax.Array = score * jnp.cos(rates[n]) - rates[n] * (i - j + b).astype(score.dtype)
        return found

    def mask_mod(b: Any, n: Any, i: Any, j: Any) -> jax.Array:
        found: jax.Array = ((i + j + n + b) % 3 != 0) | (i == j)
        return found

    functions: dict[str, Any] = {"score_mod": score_mod, "mask_mod": mask_mod}
    want = jaxmha.multi_head_attention(params, x, is_causal=True, **functions)
    cache: Any = jaxmha.KVCache.empty(params, B, 16)
    if paged:
        cache = jaxmha.PagedKVCache.empty(params, B, 16, pages=8, page_size=4)
    out, cache = jaxmha.prefill(params, x[:, :5], cache, **functions)
    assert relative_error(out, want[:, :5]) < 2e-6
    for start, stop in ((5, 6), (6, 7)):
        out, cache = jaxmha.decode_step(params, x[:, start:stop], cache, **functions)
        assert relative_error(out, want[:, start:stop]) < 2e-6


def test_attention_fn_of_flax() -> None:
    function = pytest.importorskip("jaxmha.flax").attention_fn
    query, key, value, *_ = operands(9, 11)
    functions: dict[str, Any] = {
        "score_mod": lambda score, b, n, i, j: score + (i - j).astype(score.dtype),
        "mask_mod": lambda b, n, i, j: (i + j) % 3 != 0,
    }
    want = jaxmha.dot_product_attention(query, key, value, **functions)
    assert relative_error(function(query, key, value, **functions), want) < 1e-6
