"""Functions as papers and FlexAttention's examples write them, against a materialised oracle."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha.implementations.tiled import attention
from tests.test_mods import SMALL_TILES, relative_error

B, N, T, S, H = 2, 4, 24, 24, 6
RNG = np.random.default_rng(5)
BIAS = RNG.standard_normal((B, N, T, S))
DIAGONALS = RNG.standard_normal((2 * T, N))
TABLE = RNG.standard_normal((9, N))
RATES = 2.0 ** -np.arange(1, N + 1)
IDS = np.sort(RNG.integers(0, 4, (B, T)), 1).astype("int32")
OFFSETS = np.array([0, 7, 15, 24], "int32")
ALLOWED = RNG.random((T, S)) < 0.5
LENGTHS = np.array([17, 9], "int32")
GLOBAL = RNG.random(T) < 0.2
WIDTH = 6  # of images of 4 x 6 patches


def document_of(i: Any) -> Any:
    return jnp.searchsorted(jnp.asarray(OFFSETS), i, side="right")


def near(i: Any, j: Any, most: int) -> Any:
    return (abs(i // WIDTH - j // WIDTH) <= most) & (abs(i % WIDTH - j % WIDTH) <= most)


def strided(i: Any, j: Any) -> Any:  # Child et al. (2019)
    return (j <= i) & ((i - j < 4) | ((i - j) % 4 == 0))


def as_float(x: Any, score: Any) -> Any:
    return jnp.asarray(x).astype(score.dtype)


def at(array: Any, score: Any) -> Any:
    return jnp.asarray(array, score.dtype)


SCORES: dict[str, Any] = {
    "no-op": lambda score, b, n, i, j: score,
    "relative": lambda score, b, n, i, j: score + as_float(i - j, score),
    "relative, even positions": lambda score, b, n, i, j: jnp.where(
        i % 2 == 0, score + as_float(i - j, score), score
    ),
    "relative by head": lambda score, b, n, i, j: score + at(DIAGONALS, score)[i - j + T, n],
    "alibi": lambda score, b, n, i, j: score + at(RATES, score)[n] * as_float(j - i, score),
    "symmetric alibi": lambda score, b, n, i, j: (
        score - at(RATES, score)[n] * as_float(jnp.abs(i - j), score)
    ),
    "full bias": lambda score, b, n, i, j: score + at(BIAS, score)[b, n, i, j],
    "tanh cap": lambda score, b, n, i, j: 2.0 * jnp.tanh(score / 2.0),
    "causal by score": lambda score, b, n, i, j: jnp.where(i >= j, score, -jnp.inf),
    "temperature by head": lambda score, b, n, i, j: score * at(RATES, score)[n],
    "log distance": lambda score, b, n, i, j: (
        score - jnp.log1p(as_float(jnp.abs(i - j), score))
    ),  # KERPLE
    "power distance": lambda score, b, n, i, j: (
        score - 0.3 * as_float(jnp.abs(i - j), score) ** 0.5
    ),
    "clipped distance": lambda score, b, n, i, j: (
        score + at(TABLE, score)[jnp.clip(j - i, -4, 4) + 4, n]
    ),  # Shaw et al. (2018)
    "gaussian": lambda score, b, n, i, j: score - as_float(i - j, score) ** 2 / 18.0,
    "document bonus": lambda score, b, n, i, j: (
        score
        + jnp.where(jnp.asarray(IDS)[b, i] == jnp.asarray(IDS)[b, j], 1.0, 0.0).astype(score.dtype)
    ),
    "decay": lambda score, b, n, i, j: (
        score + as_float(i - j, score) * jnp.log(1.0 - at(RATES, score)[n] / 2)
    ),  # RetNet
}
MASKS: dict[str, Any] = {
    "causal": lambda b, n, i, j: i >= j,
    "sliding window": lambda b, n, i, j: (i >= j) & (i - j <= 5),
    "prefix": lambda b, n, i, j: (j < 5) | (i >= j),
    "document": lambda b, n, i, j: document_of(i) == document_of(j),
    "causal document": lambda b, n, i, j: (document_of(i) == document_of(j)) & (i >= j),
    "ids of a batch": lambda b, n, i, j: jnp.asarray(IDS)[b, i] == jnp.asarray(IDS)[b, j],
    "neighbours in an image": lambda b, n, i, j: near(i, j, 1),  # NATTEN
    "tiles of an image": lambda b, n, i, j: (i // 12 == j // 12) & (i % 6 // 3 == j % 6 // 3),
    "dilated": lambda b, n, i, j: (i - j) % 3 == 0,
    "strided": lambda b, n, i, j: strided(i, j),
    "random": lambda b, n, i, j: jnp.asarray(ALLOWED)[i, j],
    "global tokens": lambda b, n, i, j: (
        jnp.asarray(GLOBAL)[i] | jnp.asarray(GLOBAL)[j] | (jnp.abs(i - j) <= 2)
    ),  # Longformer
    "lengths": lambda b, n, i, j: j < jnp.asarray(LENGTHS)[b],
    "another window per head": lambda b, n, i, j: jnp.abs(i - j) <= 2 * n,
    "first tokens and a window": lambda b, n, i, j: (j < 2) | ((i >= j) & (i - j < 6)),  # Xiao
    "chunks": lambda b, n, i, j: (i // 8 == j // 8) & (i >= j),  # Llama 4
}
NAMES = (*SCORES, *MASKS)


@pytest.mark.everyday(name=["causal by score"])
@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_its_oracle(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SIZES", SMALL_TILES)
    score_mod, mask_mod = SCORES.get(name), MASKS.get(name)
    with jax.enable_x64(True):
        heads = [jnp.asarray(RNG.standard_normal((B, T, N, H))) for _ in range(3)]
        got, want = (
            jax.jit(jax.value_and_grad(of, (0, 1, 2)), static_argnums=(3, 4))(
                *heads, score_mod, mask_mod
            )
            for of in (total, oracle)
        )
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert relative_error(x, y) < 1e-11


def total(query: Any, key: Any, value: Any, score_mod: Any, mask_mod: Any) -> Any:
    out = jaxmha.dot_product_attention(
        query, key, value, score_mod=score_mod, mask_mod=mask_mod, implementation="blocked"
    )
    return (out**2).sum()


def oracle(query: Any, key: Any, value: Any, score_mod: Any, mask_mod: Any) -> Any:
    """Every score is materialised, and functions read whole index arrays."""
    pair = [jnp.asarray(x, "int32") for x in np.ogrid[:B, :N, :T, :S]]
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * H**-0.5
    if score_mod is not None:
        scores = score_mod(scores, *pair)
    if mask_mod is not None:
        scores = jnp.where(mask_mod(*pair), scores, -jnp.inf)
    exps = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    weights = exps / exps.sum(-1, keepdims=True)
    return (jnp.einsum("bnts,bsnh->btnh", weights, value) ** 2).sum()
