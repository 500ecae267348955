"""The inputs of every implementation, and the error of its output.

Projections are permutations of features times a power of two, and thus exact in every dtype, so
that only attention itself rounds. Queries, keys and values come from the same rows, since torch's
native path supports only self-attention; the first T rows of the output are compared.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from jaxmha import MHAParams, Projection, Semantics
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.verify import oracle

N, H, T = 2, 32, 16
E = N * H
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float64": np.float64,
}
# Runs one layer: parameters, features `(1, S, E)`, keys that may be attended `(S,)`, additive
# mask `(S,)`; the first T rows.
Run = Callable[[MHAParams, NDArray, NDArray | None, NDArray | None], NDArray]


# Implementation -> dtypes that it cannot be compiled for, so that it ran operation by operation.
UNCOMPILED: dict[str, set[str]] = {}


def params(dtype: str, scale: float = 1.0, seed: int = 0) -> MHAParams:
    """Permutations; queries times `scale`, a power of two, and biases of zero."""
    rng, kind = np.random.default_rng(seed), DTYPES[dtype]

    def permutation(factor: float) -> Projection:
        kernel = (factor * np.eye(E)[rng.permutation(E)]).astype(kind)
        return Projection(kernel.reshape(E, N, H), np.zeros((N, H), kind))

    query, key, value = permutation(scale), permutation(1.0), permutation(1.0)
    out = Projection(np.eye(E).astype(kind).reshape(N, H, E), np.zeros(E, kind))
    return MHAParams(query, key, value, out)


def features(dtype: str, S: int, seed: int = 0) -> NDArray:
    """`(1, S, E)`, normal, as the dtype holds them."""
    rng = np.random.default_rng([seed, S])
    drawn: NDArray = rng.standard_normal((1, S, E)).astype(DTYPES[dtype])
    return drawn


def exact(weights: MHAParams, x: NDArray, keep: NDArray | None = None) -> NDArray:
    """The first T rows in float64."""
    mask = None if keep is None else keep[None, None, None]
    query = x[:, : min(T, x.shape[1])]
    return oracle.run(weights, Semantics(), query, x, x, mask=mask).output[0]  # type: ignore[no-any-return]


def floors(out: NDArray, expected: NDArray, dtype: str) -> float | None:
    """RMS error in those that rounding the exact output makes; None where it is not finite."""
    error = out.astype(np.float64) - expected
    if not np.isfinite(error).all():
        return None
    floor = oracle.rounding_floor(expected, np.dtype(DTYPES[dtype]))
    return float(np.sqrt(np.mean(np.square(error)))) / floor
