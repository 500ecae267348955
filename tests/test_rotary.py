"""Rotary embedding against complex rotation in float64; whole Llama blocks are in converters."""

from functools import partial

import jax
import numpy as np
import pytest

from jaxmha.rotary import rope

B, T, N, H = 2, 7, 3, 10


def rotated(x: np.ndarray, positions: np.ndarray, base: float, interleaved: bool) -> np.ndarray:
    """Each pair of components is a complex number that is multiplied by exp(i angle)."""
    out = np.empty_like(x)
    for b, t, n in np.ndindex(B, T, N):
        for p in range(H // 2):
            one, two = (2 * p, 2 * p + 1) if interleaved else (p, p + H // 2)
            angle = positions[b, t] * base ** (-2 * p / H)
            z = complex(x[b, t, n, one], x[b, t, n, two]) * np.exp(1j * angle)
            out[b, t, n, one], out[b, t, n, two] = z.real, z.imag
    return out


@pytest.mark.slow_variants("*-500000.0-True", "*-10000.0-False", "!float64*")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_is_a_rotation_of_pairs(interleaved: bool, base: float, dtype: str) -> None:
    rng = np.random.default_rng(0)
    positions = rng.integers(0, 50, size=(B, T)).astype(np.int32)
    x = rng.normal(size=(B, T, N, H))
    with jax.enable_x64(dtype == "float64"):
        given = jax.numpy.asarray(x, dtype)
        turned = jax.jit(partial(rope, base=base, interleaved=interleaved))(given, positions)
        assert turned.dtype == given.dtype
        exact = rotated(np.asarray(given, np.float64), positions, base, interleaved)
        tolerance = {"float64": 1e-14, "float32": 1e-5, "bfloat16": 2**-7}[dtype]
        np.testing.assert_allclose(np.asarray(turned, np.float64), exact, atol=3 * tolerance)


def test_products_depend_on_the_distance_alone() -> None:
    rng = np.random.default_rng(1)
    q, k = (np.broadcast_to(rng.normal(size=(1, N, H)), (T, N, H)).copy() for _ in range(2))
    with jax.enable_x64(True):
        place = np.arange(T)
        rows = [rope(x, place + shift) for shift in (0, 11) for x in (q, k)]
        first, shifted = (
            np.einsum("tnh,snh->nts", *map(np.asarray, pair)) for pair in (rows[:2], rows[2:])
        )
    np.testing.assert_allclose(first, shifted, atol=1e-12)


def test_positions_for_all_rows_or_for_each() -> None:
    x = np.random.default_rng(2).normal(size=(B, T, N, H)).astype(np.float32)
    each = np.broadcast_to(np.arange(T), (B, T)).copy()
    np.testing.assert_array_equal(rope(x, np.arange(T)), rope(x, each))
    np.testing.assert_array_equal(rope(x, np.arange(T)[None]), rope(x, each))


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize(
    ("shape", "positions", "message"),
    [
        ((B, T, N, 5), (T,), r"even H, got shape \(2, 7, 3, 5\)"),
        ((B, T, N, H), (T + 1,), r"positions: expected axes \(T\) or .* got shape \(8,\)"),
        ((B, T, N, H), (B + 1, T), r"positions: expected axes \(T\) or .* got shape"),
        ((B, T, N, H), (1, 1, T), r"positions: expected axes \(T\) or .* got shape"),
        ((T, H), (T,), r"expected axes \(\*B, T, N, H\)"),
    ],
)
def test_bad_shapes_are_named(
    shape: tuple[int, ...], positions: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rope(np.zeros(shape, np.float32), np.zeros(positions, np.int32))


@pytest.mark.usefixtures("no_shape_hook")
def test_bad_arguments_are_named() -> None:
    x, places = np.zeros((T, N, H), np.float32), np.arange(T)
    with pytest.raises(ValueError, match="base must be positive, got 0"):
        rope(x, places, base=0)
    with pytest.raises(TypeError, match="positions must be an array, got list"):
        rope(x, places.tolist())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x must be a floating array, got int32"):
        rope(x.astype(np.int32), places)


@pytest.mark.parametrize("interleaved", [False, True])
def test_frequencies_rotate_the_first_features_alone(interleaved: bool) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(B, T, N, H + 6))
    positions = np.arange(T)
    frequency = 1000.0 ** -(np.arange(0, H, 2) / H)
    with jax.enable_x64(True):
        found = np.asarray(rope(x, positions, inv_freq=frequency, interleaved=interleaved))
        places = np.broadcast_to(positions, (B, T))
        exact = rotated(x[..., :H], places, 1000.0, interleaved)
    np.testing.assert_allclose(found[..., :H], exact, atol=1e-13)
    np.testing.assert_array_equal(found[..., H:], x[..., H:])


@pytest.mark.usefixtures("no_shape_hook")
def test_more_frequencies_than_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"H of at least 12, twice the length of inv_freq \(6,\)"):
        rope(np.zeros((B, T, N, H), np.float32), np.arange(T), inv_freq=np.ones(6, np.float32))


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize("shape", [(), (1, 2)])
def test_frequencies_of_another_rank(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"inv_freq: expected axes \(P\), got shape"):
        rope(np.zeros((B, T, N, H), np.float32), np.arange(T), inv_freq=np.ones(shape, np.float32))
