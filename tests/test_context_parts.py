"""The parts of context parallelism that need no devices: which parts of queries and keys meet."""

from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmha.implementations.context_parallel import common, ring
from jaxmha.implementations.tiled.block_mask import NO_CONDITIONS, Conditions
from jaxmha.implementations.tiled.tile import Config

DEVICES, T, S = 4, 24, 40
WINDOWS = ((None, None), (5, 3), (1, 0), (2, 7), (None, 2), (11, None))
OFFSETS = (None, 0, -1, 9)


def static(window: Any, offset: int | None, *, zigzag: bool = False) -> common.Static:
    config = Config(None, "default", window, offset, 0.0, (), True, "cpu")
    return common.Static(config, "context", DEVICES, zigzag, T, S)


def of_each(offset: int) -> Conditions:
    """Offsets of each row of a batch, of which `offset` is the largest."""
    return NO_CONDITIONS._replace(above=jnp.asarray([offset - 2, offset]))


def positions(given: common.Static, device: int, whole: int) -> Any:
    """The positions of a device, in its order."""
    each = np.arange(whole // DEVICES // given.parts)
    starts: Any = given.starts(device, whole)
    return np.concatenate([each + start for start in starts])


def allowed(window: Any, offset: int | None) -> Any:
    """The pairs that meet, `T S`."""
    left, right = window
    i, j = np.indices((T, S))
    found = np.ones((T, S), bool)
    for bound in (right, offset):
        found &= True if bound is None else j <= i + bound
    return found & (True if left is None else j >= i - left)


@pytest.mark.parametrize("window", WINDOWS)
def test_bounds_of_parts(window: Any) -> None:
    for offset, (t, s) in product(OFFSETS, ((3, 5), (1, 1), (6, 10))):
        meet = allowed(window, offset)
        at = np.arange(0, T, t)[:, None], np.arange(0, S, s)[None]
        bounds = common.bounds(static(window, offset), NO_CONDITIONS)
        found = common.any_allowed(*bounds, at[0], t, at[1], s)
        want = meet.reshape(T // t, t, S // s, s).any((1, 3))
        np.testing.assert_array_equal(np.broadcast_to(found, want.shape), want)
        if offset is not None:
            bounds = common.bounds(static(window, None), of_each(offset))
            found = common.any_allowed(*bounds, at[0], t, at[1], s)
            np.testing.assert_array_equal(np.broadcast_to(found, want.shape), want)


@pytest.mark.parametrize("zigzag", [False, True], ids=["natural", "zigzag"])
@pytest.mark.parametrize("window", WINDOWS)
def test_hops_of_a_ring(window: Any, zigzag: bool) -> None:
    """A hop is made if a pair meets on any device; offsets that are traced may be any."""
    for offset in OFFSETS:
        given = static(window, offset, zigzag=zigzag)
        of_query, of_key = ([positions(given, d, x) for d in range(DEVICES)] for x in (T, S))
        meet = allowed(window, offset)
        want = [
            any(
                meet[np.ix_(of_query[d], of_key[(d - hop) % DEVICES])].any() for d in range(DEVICES)
            )
            for hop in range(DEVICES)
        ]
        assert visited(given, NO_CONDITIONS) == want
        if offset is not None:
            every = visited(static(window, None, zigzag=zigzag), of_each(offset))
            assert (np.asarray(every) >= want).all()


def visited(given: common.Static, traced: Conditions) -> list[bool]:
    runs = ring._runs(given, traced)
    return [any(first <= hop <= last for first, last in runs) for hop in range(DEVICES)]


@pytest.mark.parametrize("keys", [31, 12])
def test_arrays_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch, keys: int) -> None:
    monkeypatch.setattr(ring, "SMALL", 0)
    sizes, x = [], np.random.default_rng(0).standard_normal((3, keys, 2)).astype("f")

    def send(piece: Any) -> Any:
        sizes.append(piece.shape[-2])
        return piece + 1

    found = ring._in_place(send, jnp.asarray(x))
    np.testing.assert_array_equal(found, x + np.float32(1))
    assert set(sizes) == {31 if keys == 31 else 1}
