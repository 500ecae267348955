"""The native kernels in sizes that AMX takes where the CPU has it: several blocks of keys and panels of
rows, none of them full."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from tests import cases, conformance, tolerance
from tests.cases import Case
from tests.drawn import to_jax

pytestmark = conformance.native_built

CASES = (
    Case("plain", B=1, T=131, S=137, K=2, G=1, H=37, h=67),
    Case("causal", T=163, S=163, K=1, G=2, H=64, h=31, is_causal=True),
    Case("wide", B=1, T=97, S=89, K=1, G=2, H=131, h=129, is_causal=True),
    Case("narrow", T=33, S=701, K=3, G=1, H=1, h=2),
    Case("bounds", T=131, S=277, K=1, G=2, local_window_size=(61, 7),
         query_seq_lengths=(131, 67), key_value_seq_lengths=(277, 71)),
    Case("bias", T=131, S=137, K=1, G=2, H=16, h=33, bias="1NTS", bias_excludes=True,
         logits_soft_cap=3.0),
    Case("mask", T=131, S=137, K=1, G=2, mask="B1TS", empty_rows=True, dead_keys=True),
    Case("panels", B=1, T=2113, S=5, K=8, G=1, H=3, h=2),
    Case("chunks", B=1, T=137, S=1123, K=1, G=2, local_window_size=(90, 590)),
    Case("segments", T=257, S=131, K=1, G=2, segments="pair", scale=-0.7),
)  # fmt: skip
# Sizes for other types, which are sums of three bfloat16.
LARGE = (
    Case("plain", B=1, T=307, S=313, K=2, G=1, H=37, h=67),
    Case("causal", T=331, S=331, K=1, G=2, H=64, h=31, is_causal=True),
    Case("wide", B=1, T=173, S=541, K=1, G=2, H=131, h=129, is_causal=True),
    Case("narrow", T=131, S=701, K=3, G=1, H=1, h=47),
    Case("bounds", T=331, S=277, K=1, G=2, H=29, h=31, local_window_size=(61, 7),
         query_seq_lengths=(331, 67), key_value_seq_lengths=(277, 71)),
    Case("bias", T=307, S=313, K=1, G=2, H=17, h=37, bias="1NTS", bias_excludes=True,
         logits_soft_cap=3.0),
    Case("cap", T=311, S=307, K=1, G=1, H=29, h=31, logits_soft_cap=2.0, scale=1.7, is_causal=True),
    Case("mask", T=307, S=311, K=1, G=2, H=29, h=31, mask="B1TS", empty_rows=True, dead_keys=True),
    Case("chunks", B=1, T=137, S=1123, K=1, G=2, H=29, h=31, local_window_size=(90, 590)),
    Case("segments", T=701, S=131, K=1, G=2, H=29, h=31, segments="pair", scale=-0.7),
    Case("panels", B=1, T=701, S=131, K=4, G=2, H=251, h=257),
)  # fmt: skip
BY_NAME, LARGE_BY_NAME = ({case.name: case for case in some} for some in (CASES, LARGE))


def compared(case: Case, arrays: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Output, lse and gradients, found and of the reference in float64."""

    def of(implementation: str, arrays: dict[str, Any]) -> Any:
        inside, others = conformance.split(arrays)
        run = conformance.call(case, implementation, return_lse=True)

        def both(inside: dict[str, Any], cotangent: Any) -> Any:
            (out, lse), pull = jax.vjp(lambda x: run(x | others), inside)
            found = pull((cotangent.astype(out.dtype), jnp.where(jnp.isfinite(lse), 0.5, 0)))
            return run(arrays)[0], lse, found[0]

        shape = *arrays["query"].shape[:-1], case.h
        drawn = np.random.default_rng(3).standard_normal(shape).astype(arrays["query"].dtype)
        return jax.tree.map(np.asarray, jax.jit(both)(inside, drawn))

    out, lse, grads = of("native", arrays)
    with jax.enable_x64(True):
        wide = {
            n: x.astype(np.float64) if n in conformance.DIFFERENTIABLE else x
            for n, x in arrays.items()
        }
        exact_out, exact_lse, exact = of("reference", wide)
    yield "output", out, exact_out
    yield "lse", lse, exact_lse
    for name, grad in grads.items():
        yield f"gradient of {name}", grad, exact[name]


@pytest.mark.slow_variants("*", "!mask")
@pytest.mark.parametrize("case", CASES, ids=BY_NAME)
def test_values_and_gradients(case: Case) -> None:
    conformance.values(case, "native", "bfloat16", jit=False)
    conformance.kernel(case, "native", "bfloat16", lse=True)


@pytest.mark.slow_variants("*", "!mask-*", "!cap-*", "!segments-*", "!panels-*")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", LARGE, ids=LARGE_BY_NAME)
@pytest.mark.everyday(dtype=["float32"])
def test_values_and_gradients_of_large_cases(case: Case, dtype: str) -> None:
    arrays = cases.arrays(case, dtype)
    for name, found, want in compared(case, arrays):
        assert np.isfinite(found).all() or name == "lse"
        tolerance.assert_close(found, want, name, factor=2)


@pytest.mark.slow_variants("*", "!bfloat16-mask")
@pytest.mark.parametrize("name", ["bounds", "mask"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dead_keys_change_no_bit(name: str, dtype: str) -> None:
    by_name = BY_NAME if dtype == "bfloat16" else LARGE_BY_NAME
    conformance.poisoned_padding(by_name[name], "native", dtype)


TYPES = pytest.mark.parametrize(("dtype", "T"), [("bfloat16", 149), ("float32", 331)])


def heads(seed: int, *shape: int, dtype: str) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [to_jax(rng.standard_normal(shape), dtype) for _ in range(3)]


@TYPES
def test_large_logits_and_keys_that_are_not_finite(dtype: str, T: int) -> None:
    """A NaN reaches the rows that attend its key, and -inf has weight 0."""
    q, k, v = heads(0, 2, T, 3, 64, dtype=dtype)
    q = q.at[0].multiply(50)
    k = k.at[1, 100, 1, 3].set(jnp.nan).at[1, 7, 2].set(-jnp.inf)
    native, blocked = (
        jaxmha.dot_product_attention(q, k, v, is_causal=True, implementation=name)
        for name in ("native", "blocked")
    )
    np.testing.assert_array_equal(jnp.isnan(native[1, :, 1]).any(-1), np.arange(T) >= 100)
    found, want = (
        np.asarray(jnp.where(jnp.isfinite(blocked), x, 0), np.float32) for x in (native, blocked)
    )
    np.testing.assert_allclose(found, want, atol=2e-2 if dtype == "bfloat16" else 1e-4)


@TYPES
def test_logits_far_below_0(dtype: str, T: int) -> None:
    """Keys that fill up a block would have larger ones."""
    q, k, v = heads(5, 1, T, 2, 64, dtype=dtype)
    q, k = q.at[..., 0].set(100), k.at[..., 0].set(-100)
    native, reference = (
        np.asarray(jaxmha.dot_product_attention(q, k, v, implementation=name), np.float32)
        for name in ("native", "reference")
    )
    np.testing.assert_allclose(native, reference, atol=2e-2)  # logits near -1250 lose digits


@TYPES
def test_an_infinite_value(dtype: str, T: int) -> None:
    """Rows that give it a weight become infinite; other heads keep their bits."""
    q, k, v = heads(2, 1, T, 2, 37, dtype=dtype)
    attend = partial(jaxmha.dot_product_attention, q, k, implementation="native")
    found, clean = attend(v.at[0, 131, 1, 3].set(jnp.inf)), attend(v)
    assert (found[0, :, 1, 3] == jnp.inf).all()
    one, other = (np.asarray(x[0, :, 0], np.float32) for x in (found, clean))
    np.testing.assert_array_equal(one, other)
    assert jnp.isfinite(found[0, :, 1, 4:]).all()


@TYPES
def test_rows_of_nan_are_alone(dtype: str, T: int) -> None:
    """A query of NaN or infinity changes no bit of another row, and is no number itself."""
    q, k, v = heads(3, 1, T, 1, 37, dtype=dtype)
    attend = partial(jaxmha.dot_product_attention, implementation="native")
    all_bits = np.uint32(0xFFFFFFFF).view(np.float32)  # a NaN that rounding would carry to 0
    bad_q = (
        q.at[0, 5].set(jnp.nan).at[0, 90, :, 3].set(jnp.inf).at[0, 17].set(to_jax(all_bits, dtype))
    )
    spoiled, clean = attend(bad_q, k, v), attend(q, k, v)
    bad = np.isin(np.arange(T), [5, 17, 90])
    np.testing.assert_array_equal(np.isnan(np.asarray(spoiled, np.float32)).all((0, 2, 3)), bad)
    one, other = (np.asarray(x, np.float32)[:, ~bad] for x in (spoiled, clean))
    np.testing.assert_array_equal(one, other)


# On AVX-512 where keys or values are beyond 2**55 or, other than 0, below 2**-90.
RANGES: dict[str, dict[str, float]] = {
    "small values": {"v": 1e-15},
    "tiny values": {"v": 1e-33},
    "large values": {"v": 1e15},
    "huge values": {"v": 1e25},
    "tiny cotangents": {"g": 1e-30},
    "huge cotangents": {"g": 1e30},
    "huge keys, tiny queries": {"q": 1e-20, "k": 1e20},
    "large keys, small queries": {"q": 1e-15, "k": 1e15},
    "small keys, large queries": {"q": 1e20, "k": 1e-20},
    "tiny queries": {"q": 1e-30},
    "tiny queries and values": {"q": 1e-30, "v": 1e-6, "g": 1e25},
    "large queries and values": {"q": 1e20, "k": 1e-20, "v": 1e15, "g": 1e-20},
}


@pytest.mark.parametrize("one_feature", [False, True])
@pytest.mark.parametrize("name", RANGES)
def test_numbers_of_any_size(name: str, one_feature: bool) -> None:
    """Every feature keeps its digits, whatever the others hold, as far as float32 reaches."""
    rng = np.random.default_rng(4)
    given = {n: rng.standard_normal((1, 313, 1, 64)) for n in "qkvg"}
    for n, factor in RANGES[name].items():
        given[n][..., slice(3, 4) if one_feature else slice(None)] *= factor
    found = of_features(given, "native")
    with jax.enable_x64(True):
        want = of_features(
            {n: x.astype(np.float32).astype(np.float64) for n, x in given.items()}, "reference"
        )
    for x, y in zip(found, want, strict=True):
        scale = np.abs(y).max((0, 1, 2))
        least = 2.0**-100 * np.abs(y).max() + 1e-37  # a query or cotangent below it counts as 0
        np.testing.assert_array_less(np.abs(x - y).max((0, 1, 2)), 2e-5 * scale + least)


def test_one_row_of_any_size() -> None:
    """Both passes find the same logits, whatever one query or cotangent holds."""
    rng = np.random.default_rng(6)
    given = {n: rng.standard_normal((1, 313, 1, 64)) for n in "qkvg"}
    given["q"][0, 5] *= 1e20
    *clean, d_value = of_features(given, "native")
    assert all(np.isfinite(x).all() for x in (*clean, d_value))
    with jax.enable_x64(True):
        want = of_features(given, "reference")[-1]
    np.testing.assert_allclose(d_value, want, atol=1e-5)
    given["q"] = 1e5 * rng.standard_normal((1, 313, 1, 64))
    given["g"][0, 0, 0, 0] = 0
    clean = of_features(given, "native")
    given["g"][0, 0, 0, 0] = 1e-30
    for x, y in zip(of_features(given, "native"), clean, strict=True):
        np.testing.assert_array_equal(x, y)


def of_features(given: dict[str, Any], implementation: str) -> list[Any]:
    """Output and gradients."""
    dtype = jnp.float32 if implementation == "native" else jnp.float64
    q, k, v, g = (to_jax(given[n], dtype) for n in "qkvg")
    attend = partial(jaxmha.dot_product_attention, implementation=implementation)
    out, pull = jax.vjp(attend, q, k, v)
    return [np.asarray(x, np.float64) for x in (out, *pull(g))]


@TYPES
def test_heads_have_the_same_bits_alone(dtype: str, T: int) -> None:
    q, k, v = heads(1, 3, T, 2, 64, dtype=dtype)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jaxmha.dot_product_attention(q, k, v, implementation="native")

    whole = attend(q, k, v)
    alone = jnp.stack([attend(q[i], k[i], v[i]) for i in range(3)])
    mapped = jax.vmap(attend, (2, 2, 2), 2)(*(x[..., None, :] for x in (q, k, v)))
    for found in (alone, mapped[..., 0, :]):
        np.testing.assert_array_equal(np.asarray(whole, np.float32), np.asarray(found, np.float32))
