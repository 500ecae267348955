"""The native kernels on bfloat16, in sizes that AMX takes where the CPU has it: several blocks of
keys and panels of rows, none of them full."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from tests import conformance
from tests.cases import Case

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
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=BY_NAME)
def test_values_and_gradients(case: Case) -> None:
    conformance.values(case, "native", "bfloat16", jit=False)
    conformance.kernel(case, "native", "bfloat16", lse=True)


@pytest.mark.parametrize("name", ["bounds", "mask"])
def test_dead_keys_change_no_bit(name: str) -> None:
    conformance.poisoned_padding(BY_NAME[name], "native", "bfloat16")


def test_large_logits_and_keys_that_are_not_finite() -> None:
    """As in float32: a NaN reaches the rows that attend its key, and -inf has weight 0."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 149, 3, 64)), jnp.bfloat16) for _ in range(3))
    q = q.at[0].multiply(50)
    k = k.at[1, 100, 1, 3].set(jnp.nan).at[1, 7, 2].set(-jnp.inf)
    native, blocked = (
        jaxmha.dot_product_attention(q, k, v, is_causal=True, implementation=name)
        for name in ("native", "blocked")
    )
    np.testing.assert_array_equal(jnp.isnan(native[1, :, 1]).any(-1), np.arange(149) >= 100)
    found, want = (
        np.asarray(jnp.where(jnp.isfinite(blocked), x, 0), np.float32) for x in (native, blocked)
    )
    np.testing.assert_allclose(found, want, atol=2e-2)


def test_an_infinite_value() -> None:
    """Rows that give it a weight become infinite; other heads keep their bits."""
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 149, 2, 37)), jnp.bfloat16) for _ in range(3))
    attend = partial(jaxmha.dot_product_attention, q, k, implementation="native")
    found, clean = attend(v.at[0, 131, 1, 3].set(jnp.inf)), attend(v)
    assert (found[0, :, 1, 3] == jnp.inf).all()
    one, other = (np.asarray(x[0, :, 0], np.float32) for x in (found, clean))
    np.testing.assert_array_equal(one, other)
    assert jnp.isfinite(found[0, :, 1, 4:]).all()


def test_heads_have_the_same_bits_alone() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((3, 137, 2, 64)), jnp.bfloat16) for _ in range(3))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jaxmha.dot_product_attention(q, k, v, implementation="native")

    whole = attend(q, k, v)
    alone = jnp.stack([attend(q[i], k[i], v[i]) for i in range(3)])
    mapped = jax.vmap(attend, (2, 2, 2), 2)(*(x[..., None, :] for x in (q, k, v)))
    for found in (alone, mapped[..., 0, :]):
        np.testing.assert_array_equal(np.asarray(whole, np.float32), np.asarray(found, np.float32))
