"""Rotary positions in NumPy: an oracle for those of jaxmha, which costs no compilation."""

import jax
import numpy as np

from jaxmha.converters.discovery.axial import Axial
from jaxmha.converters.discovery.positions import Positions, Rotary, squares, turned
from jaxmha.converters.layout.arrays import NDArray


def rotated(positions: Positions, query: NDArray, key: NDArray) -> tuple[NDArray, NDArray]:
    """Queries and keys, `B T N H`, at the positions 0, 1, 2, ... or the places of square images."""
    if not isinstance(positions.rotary, Rotary | Axial | None):  # of other libraries
        with jax.enable_x64(True), jax.disable_jit():
            both = turned(positions, query, key)
        return np.asarray(both[0]), np.asarray(both[1])
    T = query.shape[1]
    if positions.query_scale is not None:
        query = np.asarray(positions.query_scale(query, np.arange(T)))
    return _turned(positions, query), _turned(positions, key)


def _turned(positions: Positions, x: NDArray) -> NDArray:
    rotary = positions.rotary
    if not isinstance(rotary, Rotary | Axial):
        return x
    rates = np.asarray(rotary.inv_freq, np.float64)
    if isinstance(rotary, Axial):
        places = squares(rotary, x.shape[1])
        angle, factor = places[:, np.asarray(rotary.axis)] * rates, 1.0
    else:
        angle, factor = np.arange(x.shape[1])[:, None] * rates, rotary.factor
    front, rest = x[..., : 2 * len(rates)], x[..., 2 * len(rates) :]
    axis = -1 if rotary.interleaved else -2
    pairs = front.reshape(*x.shape[:-1], *((-1, 2) if rotary.interleaved else (2, len(rates))))
    turn = factor * np.exp(1j * angle)[:, None]
    whole = (np.take(pairs, 0, axis) + 1j * np.take(pairs, 1, axis)) * turn
    found = np.stack([whole.real, whole.imag], axis).reshape(front.shape)
    return np.concatenate([found, rest], -1)
