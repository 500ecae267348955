"""Mask functions that say what a `Mask` says are computed as one."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask, implementations, mods
from jaxmha.implementations import structure
from jaxmha.implementations.mods import trace
from tests.drawn import to_jax
from tests.tolerance import assert_close

B, T, S = 2, 13, 17
RNG = np.random.default_rng(0)
IDS = to_jax(np.sort(RNG.integers(0, 4, (B, S)), 1), "int32")
ROWS, ONE = IDS[:, :T] + 0, IDS[0] + 0
# Name -> function, and whether it is known to compare documents and to be causal.
FUNCTIONS: dict[str, tuple[Any, bool, bool]] = {
    "causal": (mods.causal(), False, True),
    "causal by hand": (lambda b, n, i, j: i >= j, False, True),
    "documents": (mods.document(ROWS, IDS), True, False),
    "the same ids": (mods.document(ONE), True, False),
    "by hand": (lambda b, n, i, j: IDS[b, i] == IDS[b, j], True, False),
    "small ids": (mods.document(ONE.astype("int8")), True, False),
    "both": (mods.all_of(mods.document(ONE), mods.causal()), True, True),
    "causal first": (mods.all_of(mods.causal(), mods.document(ROWS, IDS)), True, True),
    "both by hand": (lambda b, n, i, j: (i >= j) & (ROWS[b, i] == IDS[b, j]), True, True),
    "another order": (lambda b, n, i, j: i > j, False, False),
    "an offset": (mods.causal(2), False, False),
    "other documents": (lambda b, n, i, j: ONE[i] != ONE[j], False, False),
    "either": (lambda b, n, i, j: (i >= j) | (ONE[i] == ONE[j]), False, False),
    "the wrong axis": (lambda b, n, i, j: ONE[j] == ONE[j], False, False),
    "numbers": (lambda b, n, i, j: ONE.astype("float32")[i] == ONE.astype("float32")[j], False, False),
    "too few": (lambda b, n, i, j: ONE[:9][i] == ONE[:9][j], False, False),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_recognised(name: str) -> None:
    function, documents, causal = FUNCTIONS[name]
    mod = trace("mask_mod", function, None)
    mask, rest = structure.as_structure(Mask(), mod, (B, T, 1, 1), S)
    assert (mask.query_segments is not None, mask.causal_offset == 0) == (documents, causal)
    assert (rest is None) == (documents or causal)
    if rest is None:
        pairs = np.ix_(*(np.arange(size, dtype="int32") for size in (B, 1, T, S)))
        want = np.broadcast_to(jax.jit(jnp.vectorize(function))(*pairs), (B, 1, T, S))
        np.testing.assert_array_equal(np.broadcast_to(mask.to_array(T, S, np), want.shape), want)


def test_segments_of_the_call_stay() -> None:
    mod = trace("mask_mod", FUNCTIONS["documents"][0], None)
    given = Mask.segments(query_ids=ROWS, key_value_ids=IDS)
    assert structure.as_structure(given, mod, (B, T, 1, 1), S) == (given, mod)


@pytest.mark.parametrize("name", ["both by hand", "too few"])
def test_a_call(name: str) -> None:
    function, known, _ = FUNCTIONS[name]
    query, key = (to_jax(RNG.standard_normal((B, x, 2, 8)), "float32") for x in (T, S))
    pairs = np.ix_(*(np.arange(size, dtype="int32") for size in (B, 1, T, S)))
    allowed = np.broadcast_to(jax.jit(jnp.vectorize(function))(*pairs), (B, 1, T, S))
    want = jaxmha.dot_product_attention(query, key, key, mask=allowed, implementation="reference")
    own = implementations.attend
    with mock.patch.object(implementations, "attend", wraps=own) as called:
        got = jaxmha.dot_product_attention(query, key, key, mask_mod=function)
    assert_close(got, np.asarray(want))
    assert (called.call_args[0][0].mask_mod is None) == known
