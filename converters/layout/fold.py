"""The scale of the logits, folded into the query where a layout has another one.

`scale * (q . k)` is `theirs * (f q . k)` with f = scale / theirs: kernel and bias of the query are
multiplied by f, or the scale of its norm where queries are normalised after them. A power of two
changes no digit; any other factor rounds every number once.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from jaxmha import MHAParams, Semantics
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.layout.base import Layout
from jaxmha.params import check, from_leaves, leaves


def factor(semantics: Semantics, target: Layout, H: int) -> float:
    """The factor of the queries; 1.0 where the layout has this scale."""
    ours, theirs = (
        H**-0.5 if scale is None else scale for scale in (semantics.scale, target.semantics.scale)
    )
    found = ours / theirs
    return 1.0 if math.isclose(found, 1.0, rel_tol=1e-12) else _power(found)


def _power(found: float) -> float:
    """The power of two that a factor is but for the rounding of a root; else the factor."""
    near = math.copysign(2.0 ** round(math.log2(abs(found))), found) if found else found
    return near if math.isclose(near, found, rel_tol=1e-12) else found


def is_exact(factor: float) -> bool:
    """True if the factor is a power of two, which changes no digit.

    >>> is_exact(8.0), is_exact(-0.25), is_exact(3.0)
    (True, True, False)
    """
    return abs(math.frexp(factor)[0]) == 0.5


def which(present: Mapping[str, Any]) -> frozenset[str]:
    """The leaves that are multiplied."""
    return frozenset(["query_norm"] if "query_norm" in present else ["query.kernel", "query.bias"])


def times(array: NDArray, factor: float, name: str) -> NDArray:
    """The array times a factor, in its own dtype.

    Raises ValueError where its dtype has not the range for it.
    """
    if factor == 1.0:
        return array
    wide = array.astype(np.float64) * factor
    with np.errstate(over="ignore", under="ignore"):
        found: NDArray = wide.astype(array.dtype)
    lost = np.isfinite(wide) & ~np.isfinite(found)
    if is_exact(factor):
        lost |= np.isfinite(wide) & (found != wide)
    if np.any(lost):
        raise ValueError(
            f"{name} times {factor:g}, by which the scale is folded into it, leaves the range of "
            f"{array.dtype}: cast to float32 first (--dtype float32), or keep Semantics(scale=...)"
        )
    return found


def fold(params: MHAParams, semantics: Semantics, target: Layout) -> tuple[MHAParams, Semantics]:
    """The same function with the scale of a layout. Raises ValueError as `times` does."""
    by = factor(semantics, target, check(params, np.ndim(params.query.kernel) - 3)["H"])
    found = dict(leaves(params))
    changed = {
        name: times(to_numpy(array), by, name) if name in which(found) else array
        for name, array in found.items()
    }
    return from_leaves(changed), replace(semantics, scale=target.semantics.scale)


def note(semantics: Semantics, factor: float, dtype: Any, H: int) -> str:
    """In words, what was done to queries of this dtype."""
    scale = H**-0.5 if semantics.scale is None else semantics.scale
    done = f"the scale {scale:.6g} is folded into the query, which is multiplied by {factor:.6g}"
    if is_exact(factor):
        return f"{done}: a power of two, so that no digit changes"
    half = float(ml_dtypes.finfo(dtype).eps) / 2  # type: ignore[no-untyped-call]
    return f"{done}: each number is rounded by up to {half:.2g} of itself ({np.dtype(dtype)})"
