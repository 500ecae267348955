"""The same random arrays for every peer."""

import math
import zlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxmha import MHAParams, Projection
from jaxmha.bench.case import Case

Array = NDArray[Any]  # float32
# Largest numbers of batch rows, and of queries in each, that are compared with float64.
BATCHES, ROWS = 2, 32
# Larger arrays repeat this many drawn numbers; it is a prime, so that no two heads are equal.
DRAWN = 4_194_301


class Data(NamedTuple):
    """Inputs of one case.

    For a layer: `params`, and query `B T E`, key = value `B S E` (self-attention: the same object;
    decoding: all tokens so far, of which the last is the query's own).
    For the core: params is None, query `B T N H`, key and value `B S K H`. `cotangent` has the
    shape of the output; `bias` is `1 N T S`.
    """

    params: MHAParams | None
    query: Array
    key: Array
    value: Array
    cotangent: Array
    bias: Array | None = None

    @property
    def distinct(self) -> tuple[Array, ...]:
        """Query, key and value without repeated arrays; gradients are with respect to these."""
        arrays: dict[int, Array] = {id(x): x for x in (self.query, self.key, self.value)}
        return tuple(arrays.values())


def make(case: Case) -> Data:
    """Draws standard normal inputs, weights that keep the scale of features, and nonzero biases.

    All are float32 arrays of numbers that the dtype of the case represents exactly.
    """
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    dtype = np.dtype(case.dtype)

    def draw(*shape: int, scale: float = 1.0) -> Array:
        drawn = rng.standard_normal(min(math.prod(shape), DRAWN), np.float32)
        drawn *= np.float32(scale)
        if dtype != np.float32:
            drawn = drawn.astype(dtype).astype(np.float32)
        return np.resize(drawn, shape)

    B, T, S, N, K, H, E = case.B, case.T, case.S, case.N, case.K, case.H, case.E
    h = case.value_features
    if case.scope == "core":
        heads = draw(B, T, N, H), draw(B, S, K, H), draw(B, S, K, h), draw(B, T, N, h)
        return Data(None, *heads, draw(1, N, T, S) if case.bias else None)
    params = MHAParams(
        query=Projection(draw(E, N, H, scale=E**-0.5), draw(N, H, scale=0.3)),
        key=Projection(draw(E, K, H, scale=E**-0.5), draw(K, H, scale=0.3)),
        value=Projection(draw(E, K, H, scale=E**-0.5), draw(K, H, scale=0.3)),
        out=Projection(draw(N, H, E, scale=E**-0.5), draw(E, scale=0.3)),
    )
    query = draw(B, T, E)
    key = query if case.is_self_attention else draw(B, S, E)
    if case.kind == "decode" and case.lengths is not None:  # the query is the last token
        key[:, case.lengths[0] - 1] = query[:, 0]
    return Data(params, query, key, key, draw(B, T, E))


def compared(case: Case) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices of the batch rows and of the queries to compare with float64, first and last included."""
    batches = np.unique(np.linspace(0, case.B - 1, min(case.B, BATCHES)).astype(np.intp))
    queries = np.unique(np.linspace(0, case.T - 1, min(case.T, ROWS)).astype(np.intp))
    return batches, queries


def only_compared(case: Case, cotangent: Array) -> Array:
    """The cotangent, with zeros outside the compared rows."""
    where = np.ix_(*compared(case))
    kept = np.zeros_like(cotangent)
    kept[where] = cotangent[where]
    return kept
