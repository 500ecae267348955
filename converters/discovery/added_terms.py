"""Positional terms that models add to their scaled logits.

Every class has a method `bias(T, S, query, key)` that returns `N T S` or `B N T S`. `query`
(`B T N H`) and `key` (`B S N H`) are the projected queries and keys before rotation; terms that
do not depend on them ignore them.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmha.arrays import Array
from jaxmha.converters.layout.arrays import NDArray


def _distances(T: int, S: int) -> NDArray:
    """Query position minus key position, `T S`; the last query has the position of the last key."""
    return np.arange(T)[:, None] + S - T - np.arange(S)


def _rounded(bias: NDArray, query: Array | None) -> NDArray:
    """Casts a bias that was computed in float64 to float32, unless the queries are float64."""
    wide = query is not None and query.dtype == np.float64
    return bias if wide else bias.astype(np.float32)


class Alibi(NamedTuple):
    """ALiBi: a bias of `-rates[n] * distance`."""

    rates: tuple[float, ...]

    def bias(self, T: int, S: int, query: Array | None = None, key: Array | None = None) -> NDArray:
        """The bias, `N T S`."""
        found: NDArray = -np.asarray(self.rates)[:, None, None] * _distances(T, S)
        return _rounded(found, query)


def alibi(heads: int, model_type: str, own: Mapping[str, Any]) -> Alibi:
    """The ALiBi of a model. Source: Press et al., "Train Short, Test Long" (2022).

    Falcon rounds the rates to bfloat16, and scales the bias as it scales the logits.

    >>> alibi(4, "bloom", {}).rates
    (0.25, 0.0625, 0.015625, 0.00390625)
    """
    below = 2 ** int(math.log2(heads))
    rates = [2.0 ** (-8 * (i + 1) / below) for i in range(below)]
    rates += [2.0 ** (-4 * (2 * i + 1) / below) for i in range(heads - below)]
    if model_type == "falcon":
        scale = (own["hidden_size"] // heads) ** -0.5
        rates = [float(jnp.bfloat16(rate)) * scale for rate in rates]
    return Alibi(tuple(rates))


class Buckets(NamedTuple):
    """A learned bias for every bucket of distances (T5).

    `table` is `buckets N`. In each direction, half of the buckets stand for one distance each; the
    others stand for logarithmic ranges up to the distance `most`. `both`: True if keys after the
    query have buckets of their own.
    """

    table: NDArray
    both: bool
    most: int = 128

    def bias(self, T: int, S: int, query: Array | None = None, key: Array | None = None) -> NDArray:
        """The bias, `N T S`."""
        distance = _distances(T, S)
        count = len(self.table) // (2 if self.both else 1)
        bucket = np.where(distance < 0, count, 0) if self.both else 0
        distance = abs(distance) if self.both else np.maximum(distance, 0)
        exact = count // 2
        far = np.log(np.maximum(distance, 1) / exact) / math.log(self.most / exact)
        rough = np.minimum(exact + (far * (count - exact)).astype(np.int64), count - 1)
        found = bucket + np.where(distance < exact, distance, rough)
        return np.asarray(np.moveaxis(self.table[found], -1, 0))


class Window(NamedTuple):
    """A learned bias for every pair of row and column differences in a square window (Swin).

    `table` is `(2 width - 1)**2 N` for a window of `width * width` tokens.
    """

    table: NDArray

    def bias(self, T: int, S: int, query: Array | None = None, key: Array | None = None) -> NDArray:
        """The bias, `N T S`; raises ValueError if T or S is not the window's number of tokens."""
        span = math.isqrt(len(self.table))
        side = (span + 1) // 2
        if side * side != T or S != T:
            raise ValueError(f"T and S must be {side * side}, a window of side {side}: {T}, {S}")
        row, column = planes(side, side)
        found = self.table[(row + side - 1) * span + column + side - 1]
        return np.asarray(np.moveaxis(found, -1, 0))


class Looked(NamedTuple):
    """A learned bias for every pair of tokens.

    `table` has a row of `N` biases for each kind of pair; `rows`, `T S`, has each pair's row number.
    """

    table: NDArray
    rows: NDArray

    def bias(self, T: int, S: int, query: Array | None = None, key: Array | None = None) -> NDArray:
        """The bias, `N T S`; raises ValueError unless `rows` has shape `T S`."""
        if self.rows.shape != (T, S):
            raise ValueError(f"T and S must be {self.rows.shape}: {T}, {S}")
        return np.asarray(np.moveaxis(self.table[self.rows], -1, 0))


def classed(table: NDArray, side: int) -> Looked:
    """The bias of a class token and a square window of `side * side` tokens (BEiT).

    The last 3 rows of `table` are for pairs with the class token: as query, as key, as both.
    """
    row, column = planes(side, side)
    index = np.pad((row + side - 1) * (2 * side - 1) + column + side - 1, ((1, 0), (1, 0)))
    index[0], index[:, 0], index[0, 0] = len(table) - 3, len(table) - 2, len(table) - 1
    return Looked(table, index)


class Grid(NamedTuple):
    """Dot products of queries with learned vectors of row and column differences (SAM).

    `rows` is `2 height - 1, H` and `columns` is `2 width - 1, H`.
    """

    rows: NDArray
    columns: NDArray

    def bias(self, T: int, S: int, query: Array | None = None, key: Array | None = None) -> NDArray:
        """The bias, `B N T S`.

        Raises ValueError if `query` is None, or T or S is not `height * width`.
        """
        height, width = (len(x) // 2 + 1 for x in self)
        if height * width != T or S != T or query is None:
            raise ValueError(f"T and S must be {height * width}, and query is needed: {T}, {S}")
        row, column = planes(height, width)
        near = self.rows[row + height - 1] + self.columns[column + width - 1]
        return np.asarray(np.einsum("btnh,tsh->bnts", np.asarray(query), near))


def planes(height: int, width: int) -> tuple[NDArray, NDArray]:
    """Row differences and column differences of all pairs of tokens in a grid, `T T` each."""
    row, column = (x.reshape(-1) for x in np.indices((height, width)))
    return row[:, None] - row, column[:, None] - column


class Computed(NamedTuple):
    """A bias that a network of two layers computes from row and column differences (timm).

    The inputs are `sign(d) * log(1 + abs(d))` of both differences `d`; `inner` is `I 2`, its bias `I`,
    `outer` is `N I`, its bias `N`.
    """

    inner: NDArray
    inner_bias: NDArray
    outer: NDArray
    outer_bias: NDArray

    def bias(self, T: int, S: int, query: Array | None = None, key: Array | None = None) -> NDArray:
        """The bias, `N T S`, of a square of tokens, which a class token may precede.

        Raises ValueError for other numbers of tokens.
        """
        side = math.isqrt(T)
        first = int(side * side != T)
        if (T - first) != math.isqrt(T - first) ** 2 or S != T:
            raise ValueError(f"T and S must be the tokens of a square: {T}, {S}")
        side = math.isqrt(T - first)
        near = np.stack(planes(side, side), -1).astype(np.float64)
        hidden = np.sign(near) * np.log1p(abs(near)) @ self.inner.T + self.inner_bias
        found = np.maximum(hidden, 0) @ self.outer.T + self.outer_bias
        padded = np.pad(np.moveaxis(found, -1, 0), ((0, 0), (first, 0), (first, 0)))
        return _rounded(padded, query)


class Distances(NamedTuple):
    """Scaled products of queries with a learned vector per clipped distance (Shaw et al., 2018).

    `table` is `left + right + 1, H`, from keys `left` positions before the query to keys `right`
    positions after it.
    """

    table: NDArray
    left: int

    def bias(self, T: int, S: int, query: Array | None = None, key: Array | None = None) -> NDArray:
        """The bias, `B N T S`; raises ValueError if `query` is None."""
        if query is None:
            raise ValueError("query is needed: the term is a product with queries")
        near = np.clip(-_distances(T, S), -self.left, len(self.table) - 1 - self.left) + self.left
        found = np.einsum("btnh,tsh->bnts", np.asarray(query), self.table[near])
        return np.asarray(found * self.table.shape[-1] ** -0.5)


class Waves(NamedTuple):
    """Dot products with projected sines and cosines of the distance (Transformer-XL, conformers).

    The logits become `((q + u) k + (q + v) R(distance)) * H ** -0.5`; this term is their difference
    from `q k * H ** -0.5`. `u` and `v` are learned biases, `N H`. `kernel`, `D N H`, projects the
    sines and cosines to R.
    """

    u: NDArray
    v: NDArray
    kernel: NDArray

    def bias(self, T: int, S: int, query: Array | None = None, key: Array | None = None) -> NDArray:
        """The bias, `B N T S`; raises ValueError if `query` or `key` is None."""
        if query is None or key is None:
            raise ValueError("query and key are needed: the term has products with both")
        width = len(self.kernel)
        rates = 10000.0 ** -(np.arange(0, width, 2) / width)
        angles = np.arange(-S, T + S)[:, None] * rates
        waves = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(len(angles), width)
        relative = np.einsum("rd,dnh->rnh", waves, self.kernel)[_distances(T, S) + S]
        found = np.einsum("nh,bsnh->bns", self.u, np.asarray(key))[:, :, None]
        found = found + np.einsum("btnh,tsnh->bnts", np.asarray(query) + self.v, relative)
        return _rounded(found * self.u.shape[-1] ** -0.5, query)


Term = Alibi | Buckets | Window | Looked | Computed | Grid | Distances | Waves
