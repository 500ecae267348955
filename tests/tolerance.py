"""How far a result may be from the specification: the one place where tolerances come from.

The unit is the rounding floor of the output: half a unit in the last place of its dtype, at the
scale of the output (its largest finite value). A result that was computed without error and then
rounded to that dtype is at most one floor away.
"""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from jaxmha.arrays import to_dtype

# Floors allowed. The half precisions accumulate in float32, so that little beyond the rounding of
# the output remains; float32 and float64 accumulate in themselves, over products whose terms are
# a few times the output. float64: 1e-14 of the scale.
FLOORS: dict[str, float] = {
    "bfloat16": 2.0,
    "float16": 2.0,
    "float32": 32.0,
    "float64": 1e-14 * 2.0**53,
}
# A layer in half precision rounds projected heads and attended heads to its dtype too.
LAYER = 8.0
# Central differences of this step err by about STEP**2 (curvature) and 1e-16 / STEP (rounding),
# and gradients pass the rounding of the dtype once more on their way back.
STEP = 1e-5
GRADIENTS = 1e-9
# Where a gradient is zero because terms cancel, half precision leaves what float32, in which they
# are summed, cannot tell from zero: half a unit at the scale of the terms, which is 1.
CANCELLED = 2.0**-24
BACKWARD = 2.0


def floor(expected: NDArray[Any], dtype: DTypeLike) -> float:
    """Half a unit in the last place of `dtype` at the scale of `expected`."""
    finite = np.abs(np.asarray(expected, np.float64)[np.isfinite(expected)])
    eps = float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
    return float(finite.max(initial=0.0)) * eps / 2


def error(actual: Any, expected: NDArray[Any], dtype: DTypeLike | None = None) -> float:
    """Largest difference in floors of `dtype`, default that of `actual`.

    Infinite where shapes differ, or where NaN and infinities are not in the same places.
    """
    dtype = np.asarray(actual).dtype if dtype is None else to_dtype(dtype)
    actual = np.asarray(actual).astype(np.float64)
    expected = np.asarray(expected).astype(np.float64)
    if actual.shape != expected.shape:
        return np.inf
    finite = np.isfinite(expected)
    if not np.array_equal(actual[~finite], expected[~finite], equal_nan=True):
        return np.inf
    difference = np.abs(actual[finite] - expected[finite]).max(initial=0.0)
    if not difference:
        return 0.0
    scale = floor(expected, dtype)
    return float(difference) / scale if scale and np.isfinite(difference) else np.inf


def assert_close(
    actual: Any, expected: NDArray[Any], what: str = "", *, factor: float = 1.0
) -> None:
    """Asserts that the error is within `factor` times the floors that the dtype may have."""
    dtype = np.asarray(actual).dtype
    assert np.asarray(actual).shape == np.asarray(expected).shape, (
        f"{what}: shape {np.asarray(actual).shape}, specification {np.asarray(expected).shape}"
    )
    floors, allowed = error(actual, expected), FLOORS[dtype.name] * factor
    assert floors <= allowed, f"{what}: {floors:.1f} floors of {dtype}, allowed {allowed:.1f}"


def assert_same(actual: Any, expected: Any, what: str = "") -> None:
    """Asserts that dtype and every value agree (NaN equals NaN)."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    same = np.array_equal(actual.astype(np.float64), expected.astype(np.float64), equal_nan=True)
    assert same, f"{what} differs"


def assert_gradients(actual: Any, grads: NDArray[Any], what: str = "") -> None:
    """Asserts that gradients are the gradients found by central differences of step STEP."""
    actual = np.asarray(actual)
    floors = FLOORS[actual.dtype.name] * BACKWARD * floor(grads, actual.dtype)
    allowed = floors + GRADIENTS * float(np.abs(grads).max(initial=1.0))
    allowed += CANCELLED if actual.dtype.itemsize == 2 else 0.0
    worst = float(np.abs(actual.astype(np.float64) - grads).max(initial=0.0))
    assert worst <= allowed, f"{what}: {worst:.2e} from the gradients, allowed {allowed:.2e}"
