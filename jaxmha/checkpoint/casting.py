"""Casts arrays to another dtype and measures the loss."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxmha.checkpoint.tensor import BFLOAT16, FLOAT8, NUMPY

Wanted = str | np.dtype | type
DTYPES = {str(dtype): dtype for dtype in (*NUMPY, BFLOAT16, *FLOAT8)}
FLOATS = frozenset(d for d in DTYPES.values() if d.kind == "f" or d in (BFLOAT16, *FLOAT8))


class Loss(NamedTuple):
    """The loss of casting one tensor.

    Attributes:
        before, after: names of the dtypes before and after the cast.
        max_relative_error: largest relative error of the elements that stayed finite and nonzero.
        overflowed: number of finite elements that became infinite or NaN, or are outside the range
            of a new integer dtype, plus infinite or NaN elements that changed.
        underflowed: number of nonzero elements that became zero.
    """

    before: str
    after: str
    max_relative_error: float = 0.0
    overflowed: int = 0
    underflowed: int = 0

    @property
    def exact(self) -> bool:
        """True if no element changed its value."""
        return not (self.max_relative_error or self.overflowed or self.underflowed)

    def __add__(self, other: object) -> "Loss":
        """Combines the losses of two parts of one tensor."""
        if not isinstance(other, Loss):
            return NotImplemented
        return Loss(
            self.before,
            self.after,
            max(self.max_relative_error, other.max_relative_error),
            self.overflowed + other.overflowed,
            self.underflowed + other.underflowed,
        )


def target(wanted: Wanted | Mapping[str, Wanted] | None, name: str, dtype: np.dtype) -> np.dtype:
    """The dtype in which to write the tensor `name`, whose present dtype is `dtype`.

    `wanted` maps names to dtypes, or is one dtype, which applies to floating-point tensors only.

    Raises:
        TypeError: `wanted` has an unknown dtype.

    Example:
        >>> target("bfloat16", "w", np.dtype("float32")), target("bfloat16", "n", np.dtype("int64"))
        (dtype(bfloat16), dtype('int64'))
    """
    if isinstance(wanted, Mapping):
        return _dtype(wanted[name]) if name in wanted else dtype
    return dtype if wanted is None or dtype not in FLOATS else _dtype(wanted)


def _dtype(wanted: Wanted) -> np.dtype:
    named = DTYPES.get(wanted) if isinstance(wanted, str) else None
    return named or np.dtype(wanted)


def cast(array: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, Loss]:
    """Casts an array to another dtype, rounding to nearest; returns the result and the loss.

    Example:
        >>> cast(np.array([1.0, 70000.0, 1e-9]), np.dtype("float16"))[1]
        Loss(before='float64', after='float16', max_relative_error=0.0, overflowed=1, underflowed=1)
    """
    with np.errstate(all="ignore"):
        result = array.astype(dtype)
        before, after = _exactly(array), _exactly(result)
        finite, nonzero = np.isfinite(before), before != 0
        kept = (before == after) | (np.isnan(before) & np.isnan(after))
        overflowed = (finite & ~np.isfinite(after)) | (~finite & ~kept) | _wraps(array, dtype)
        underflowed = nonzero & (after == 0) & ~overflowed
        # `_exactly` chose a dtype wide enough that small differences do not round to 0.
        error = np.abs(after - before) / np.abs(before)
        error = error[finite & nonzero & ~overflowed & ~underflowed]
        worst = float(error.max()) if error.size else 0.0
    counts = int(overflowed.sum()), int(underflowed.sum())
    worst = worst if math.isfinite(worst) else math.inf
    return result, Loss(str(array.dtype), str(dtype), worst, *counts)


def _wraps(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """True for each element outside the range of an integer dtype, which a cast wraps around."""
    if dtype.kind not in "iu":
        return np.zeros(array.shape, bool)
    # Comparing integers is exact, and so is comparing floats with limits that are powers of two.
    whole = array if array.dtype.kind in "iu" else np.trunc(_exactly(array).real)
    wraps: np.ndarray = (whole < np.iinfo(dtype).min) | (whole >= np.iinfo(dtype).max + 1)
    return wraps


def _exactly(array: np.ndarray) -> np.ndarray:
    """Widens an array to compare values: complex128, longdouble (64-bit integers), else float64."""
    if array.dtype.kind == "c":
        return array.astype(np.complex128)
    wide = array.dtype.kind in "iu" and array.dtype.itemsize == 8
    return array.astype(np.longdouble if wide else np.float64)
