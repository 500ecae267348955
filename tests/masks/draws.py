"""Random masks in canonical form, and many of them evaluated by one program."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmha import Mask
from jaxmha.converters.arrays import NDArray, to_numpy
from jaxmha.converters.masks.argument import Masks

B, N, T, S = 3, 2, 5, 7
KINDS = ("causal", "offset", "window", "lengths", "padding", "segments", "array", "heads")

draws = given(
    number=st.integers(0, 2**32 - 1),
    kinds=st.sets(st.sampled_from(KINDS)),
    excluded=st.sampled_from((0.0, 0.3, 1.0)),
)
many = settings(max_examples=400, deadline=None, database=None)


def random_mask(number: int, kinds: set[str], excluded: float) -> Mask:
    """One of every kind named; rows with nothing left, batch axes of 1 and odd offsets included."""
    rng = np.random.default_rng(number)

    def kept(*shape: int) -> NDArray:
        full = rng.random(shape) >= excluded
        return full if rng.random() < 0.7 else full[:1]

    def ids(size: int) -> NDArray:
        return rng.integers(0, 2, (B, size))

    mask = Mask()
    if "causal" in kinds:
        mask &= Mask.causal()
    if "offset" in kinds:
        one = int(rng.integers(-T, S))
        mask &= Mask.causal(one if rng.random() < 0.5 else rng.integers(-T, S, B))
    if "window" in kinds:
        left, right = (int(side) for side in rng.integers(0, S, 2))
        mask &= Mask.window(None if left > T else left, None if right > T else right)
    if "lengths" in kinds:
        mask &= Mask.lengths(rng.integers(0, T + 2, B), rng.integers(0, S + 2, B))
    if "padding" in kinds:
        mask &= Mask.padding(query=kept(B, T)) & Mask.padding(key_value=kept(B, S))
    if "segments" in kinds:
        mask &= Mask.segments(ids(T), ids(S))
    if "array" in kinds:
        mask &= Mask.dense(kept(B, 1, T, S))
    if "heads" in kinds:
        mask &= Mask.dense(rng.random((N, T, S)) >= excluded)
    return mask


def pairs(mask: Mask | None, bias: NDArray | None = None) -> NDArray:
    """The pairs that may attend, `(B, N, T, S)`."""
    allowed = np.broadcast_to(to_numpy((mask or Mask()).to_array(T, S)), (B, N, T, S))
    return allowed if bias is None else allowed & (bias != -np.inf)


def numbers(*shape: int, seed: int = 0) -> NDArray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def stacked(made: list[Masks]) -> dict[str, Any]:
    """Masks of many calls as one `(C, B, N, T, S)`."""
    masks = np.stack([pairs(mask) for mask, _ in made])
    biases = [np.zeros((1, 1, 1, 1), "f") if bias is None else bias for _, bias in made]
    full = [np.broadcast_to(np.asarray(bias, np.float32), (B, N, T, S)) for bias in biases]
    return {"mask": masks, "bias": np.stack(full)}


def emptied_by_bias(actual: NDArray, made: list[Masks], value: NDArray) -> NDArray:
    """The answers `(C, B, T, N, h)`, as jax.nn and flax give them where a bias ends a row.

    Where -inf excludes every key that the mask leaves, what the mask blocks is a finite constant,
    and the row is the mean of the blocked values.
    """
    actual = np.array(actual)
    for c, (mask, bias) in enumerate(made):
        if bias is None:
            continue
        allowed, kept = pairs(mask), pairs(mask, np.broadcast_to(bias, (B, N, T, S)))
        for b, n, i in np.argwhere(~kept.any(-1) & allowed.any(-1)):
            blocked = ~allowed[b, n, i]
            actual[c, b, i, n] = value[b, blocked, n % value.shape[2]].mean(0)
    return actual


def flat(array: NDArray) -> Any:
    """`(C, B, ...)` as `(C * B, ...)`: heads have one batch axis."""
    return np.reshape(array, (-1, *array.shape[2:]))


def repeated(count: int, *arrays: NDArray) -> list[Any]:
    """Each array as `(count, *shape)`."""
    return [np.broadcast_to(array, (count, *array.shape)) for array in arrays]
