"""Mask functions that are constant within blocks are evaluated once for each block."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmha import mods
from jaxmha.implementations.mods import Extent, allowed, trace
from tests.drawn import to_jax

LAYOUT = to_jax(np.random.default_rng(0).random((3, 9, 11)) < 0.4)
# Name -> function, and the blocks of queries and keys within which it is constant.
FUNCTIONS: dict[str, tuple[Any, int, int]] = {
    "layout": (mods.block_sparse(LAYOUT, 12), 12, 12),
    "layout of all heads": (mods.block_sparse(LAYOUT[0], 5), 5, 5),
    "written by hand": (lambda b, n, i, j: LAYOUT[n, i // 16, jax.lax.div(j, 8)], 16, 8),
    "two divisors": (lambda b, n, i, j: (i // 12 + i // 8 + j // 6) % 2 == 0, 4, 6),
    "and causal": (mods.all_of(mods.block_sparse(LAYOUT, 12), mods.causal()), 1, 1),
    "a remainder": (lambda b, n, i, j: (i // 4 == 2) | (i % 4 == j // 4), 1, 4),
    "divides by it": (lambda b, n, i, j: (100 // (i + 1) > 3) & (j // 4 != i), 1, 4),
    "below zero": (lambda b, n, i, j: i // -4 + j // 4 < 0, 1, 4),
    "queries alone": (lambda b, n, i, j: i // 3 % 2 == 0, 3, 1),
    "a position itself": (lambda b, n, i, j: (j & 1).astype(bool) | (i // 2 == 1), 2, 1),
    "a function of its own": (jax.jit(lambda b, n, i, j: i // 4 == j // 4), 1, 1),
}
EVERYDAY = ("layout", "two divisors")
# Starts and sizes along T and S, of 47 queries and 53 keys.
TILES = [(0, 48, 0, 53), (12, 29, 0, 53), (24, 24, 40, 13), (5, 9, 12, 12)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_blocks_are_found(name: str) -> None:
    function, rows, keys = FUNCTIONS[name]
    mod = trace("mask_mod", function, None)
    assert mod is not None
    assert (mod.program.grain("i"), mod.program.grain("j")) == (rows, keys)


@pytest.mark.parametrize(
    "name", [x if x in EVERYDAY else pytest.param(x, marks=pytest.mark.slow) for x in FUNCTIONS]
)
def test_a_tile_is_that_of_every_pair(name: str) -> None:
    function = FUNCTIONS[name][0]
    mod = trace("mask_mod", function, None)
    assert mod is not None
    extents = [Extent((0, 0, t, s), (1, 3, rows, keys), 47, 53) for t, rows, s, keys in TILES]
    shifted = mod.shift(0, 0, 0, 0)  # by traced zeros: every pair is evaluated
    got, want = jax.jit(lambda: [[allowed(x, e) for e in extents] for x in (mod, shifted)])()
    for x, y, extent in zip(got, want, extents, strict=True):
        one, other = (np.broadcast_to(z, extent.sizes) for z in (x, y))
        np.testing.assert_array_equal(one, other)
    places: list[Any] = [np.arange(size, dtype="int32") for size in (1, 3, 48, 53)]
    places[2] = places[2].clip(0, 46)
    pairs = jax.jit(jnp.vectorize(function))(*np.ix_(*places))
    np.testing.assert_array_equal(np.broadcast_to(got[0], (1, 3, 48, 53)), pairs)
