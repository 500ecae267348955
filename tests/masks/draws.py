"""Random masks in canonical form, and many of them evaluated by one program."""

import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from jaxmha import Mask
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.masks.spec import Masks

SEED = int(os.environ["JAXMHA_PROPERTY_SEED"])


class Sizes(NamedTuple):
    """Of one call, by the dimension key."""

    B: int
    N: int
    T: int
    S: int

    def named(self, *names: str) -> Any:
        """The sizes that an exporter asks for, by its names."""
        known = {
            "batch_size": self.B,
            "num_heads": self.N,
            "query_length": self.T,
            "key_length": self.S,
        }
        return {name: known[name] for name in names or known}


B, N, T, S = USUAL = Sizes(3, 2, 5, 7)
# Single axes, none, and axes that can be taken for each other.
SIZES = (
    USUAL, Sizes(3, 3, 5, 7), Sizes(2, 2, 4, 4), Sizes(3, 3, 3, 3), Sizes(1, 1, 1, 1),
    Sizes(2, 3, 4, 1), Sizes(2, 3, 1, 4), Sizes(1, 2, 3, 5), Sizes(2, 2, 3, 0), Sizes(3, 2, 0, 4),
)  # fmt: skip
KINDS = ("causal", "offset", "window", "lengths", "padding", "segments", "array", "heads")


def property_test(check: Callable[..., None], examples: int, **more: Any) -> None:
    """Runs `check(mask, number, sizes, **more)` on so many random masks of all sizes."""

    @seed(SEED)
    @settings(max_examples=examples, deadline=None, database=None)
    @given(
        number=st.integers(0, 2**32 - 1),
        kinds=st.sets(st.sampled_from(KINDS)),
        excluded=st.sampled_from((0.0, 0.3, 1.0)),
        sizes=st.sampled_from(SIZES),
        **more,
    )
    def run(number: int, kinds: set[str], excluded: float, sizes: Sizes, **drawn: Any) -> None:
        check(random_mask(number, kinds, excluded, sizes), number, sizes, **drawn)

    run()


def spaced(stride: int, *axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Every so many of all combinations; all values of an axis, if its size is no multiple of it."""
    return list(itertools.product(*axes))[::stride]


def random_mask(number: int, kinds: set[str], excluded: float, sizes: Sizes = USUAL) -> Mask:
    """One of every kind named; rows with nothing left, batch axes of 1 and odd offsets included."""
    rng = np.random.default_rng(number)
    B, N, T, S = sizes

    def kept(*shape: int) -> NDArray:
        full = rng.random(shape) >= excluded
        return full if rng.random() < 0.7 else full[:1]

    def ids(size: int) -> NDArray:
        return rng.integers(0, 2, (B, size))

    mask = Mask()
    if "causal" in kinds:
        mask &= Mask.causal()
    if "offset" in kinds:
        one = int(rng.integers(-T, S + 1))
        mask &= Mask.causal(one if rng.random() < 0.5 else rng.integers(-T, S + 1, B))
    if "window" in kinds:
        left, right = (int(side) for side in rng.integers(0, S + 1, 2))
        mask &= Mask.window(None if left > T else left, None if right > T else right)
    if "lengths" in kinds:
        mask &= Mask.lengths(query=rng.integers(0, T + 2, B), key_value=rng.integers(0, S + 2, B))
    if "padding" in kinds:
        mask &= Mask.padding(query=kept(B, T)) & Mask.padding(key_value=kept(B, S))
    if "segments" in kinds:
        mask &= Mask.segments(query_ids=ids(T), key_value_ids=ids(S))
    if "array" in kinds:
        mask &= Mask.dense(kept(B, 1, T, S))
    if "heads" in kinds:
        mask &= Mask.dense(rng.random((N, T, S)) >= excluded)
    return mask


def pairs(mask: Mask | None, bias: Any = None, sizes: Sizes = USUAL) -> NDArray:
    """The pairs that may attend, `(B, N, T, S)`."""
    allowed = np.broadcast_to((mask or Mask()).to_array(sizes.T, sizes.S, np), sizes)
    return allowed if bias is None else allowed & (bias != -np.inf)


def emptied(mask: Mask | None, bias: Any, sizes: Sizes = USUAL) -> NDArray:
    """The rows `(B, N, T)` to which the mask leaves keys, and a bias of -inf none of them."""
    before, after = (np.asarray(pairs(mask, x, sizes).any(-1)) for x in (None, bias))
    return before & ~after


def numbers(*shape: int, seed: int = 0) -> NDArray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def stacked(made: list[Masks], sizes: Sizes = USUAL) -> dict[str, Any]:
    """Masks of many calls as one `(C, B, N, T, S)`."""
    masks = np.stack([pairs(mask, None, sizes) for mask, _ in made])
    biases = [np.zeros((1, 1, 1, 1), "f") if bias is None else bias for _, bias in made]
    full = [np.broadcast_to(np.asarray(bias, np.float32), sizes) for bias in biases]
    return {"mask": masks, "bias": np.stack(full)}


def flat(array: NDArray) -> Any:
    """`(C, B, ...)` as `(C * B, ...)`: heads have one batch axis."""
    return np.reshape(array, (len(array) * array.shape[1], *array.shape[2:]))


def repeated(count: int, *arrays: NDArray) -> list[Any]:
    """Each array as `(count, *shape)`."""
    return [np.broadcast_to(array, (count, *array.shape)) for array in arrays]
