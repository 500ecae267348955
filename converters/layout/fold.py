"""Folds the logit scale into the query when the target layout has another scale.

`scale * (q . k) == target_scale * (f q . k)` with f = scale / target_scale. Kernel and bias of the
query are multiplied by f, or scale and bias of the query norm if there is one. A power of two is
exact; any other factor rounds every number once. If queries are clipped, or their norm has no
scales or an offset, no array can be multiplied: the query is not proportional to any.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from jaxmha import MHAParams, Semantics
from jaxmha.arrays import to_dtype
from jaxmha.converters.layout.arrays import NDArray, is_traced, to_numpy
from jaxmha.converters.layout.base import Layout
from jaxmha.params import NORMS, check, from_leaves, leaves
from jaxmha.semantics import logit_scale


def ratio(semantics: Semantics, other: Semantics, H: int) -> float:
    """Logit scale of `semantics` over that of `other`; 1.0 if they differ by rounding only."""
    found = logit_scale(semantics, H) / logit_scale(other, H)
    return 1.0 if math.isclose(found, 1.0, rel_tol=1e-12) else _power(found)


def factor(semantics: Semantics, target: Layout, H: int) -> float:
    """The factor for the queries; 1.0 if the target layout has the same scale.

    Raises ValueError if no array of the layer can be multiplied by a factor other than 1.
    """
    ours, found = logit_scale(semantics, H), ratio(semantics, target.semantics, H)
    if found == 1.0:
        return 1.0
    after = {
        "qk_norm_learned=False": semantics.qk_norm is not None and not semantics.qk_norm_learned,
        f"qk_norm_offset={semantics.qk_norm_offset:g}": semantics.qk_norm_offset != 0,
        f"clip_qkv={semantics.clip_qkv}": semantics.clip_qkv is not None,
    }
    if reasons := [name for name, holds in after.items() if holds]:
        raise ValueError(
            f"the scale cannot be folded into the query of a layer with {' and '.join(reasons)}, "
            f"which follows every array of the query: keep Semantics(scale={ours!r})"
        )
    return found


def _power(found: float) -> float:
    """The nearest power of two if `found` differs from it by rounding only; else `found`."""
    near = math.copysign(2.0 ** round(math.log2(abs(found))), found) if found else found
    return near if math.isclose(near, found, rel_tol=1e-12) else found


def is_exact(factor: float) -> bool:
    """True if the factor is a power of two: then multiplying rounds nothing.

    >>> is_exact(8.0), is_exact(-0.25), is_exact(3.0)
    (True, True, False)
    """
    return abs(math.frexp(factor)[0]) == 0.5


def which(present: Mapping[str, Any]) -> frozenset[str]:
    """Names of the leaves that `fold` multiplies: the query norm, or else query kernel and bias."""
    norms = frozenset(name for name in NORMS if name.startswith("query"))
    return norms if norms & present.keys() else frozenset(["query.kernel", "query.bias"])


def times(array: NDArray, factor: float, name: str) -> NDArray:
    """The array times the factor, in the array's dtype.

    Raises ValueError if the product overflows or underflows that dtype.
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
    """Returns parameters and semantics of the same function, with the scale of the target layout.

    Raises:
      ValueError: a multiplied leaf overflows or underflows its dtype.
      TypeError: JAX traces a leaf that is to be multiplied.
    """
    by = factor(semantics, target, check(params, np.ndim(params.query.kernel) - 3)["H"])
    found = dict(leaves(params))
    folded = which(found) & found.keys() if by != 1.0 else frozenset()
    if traced := sorted(name for name in folded if is_traced(found[name])):
        raise TypeError(
            f"fold_scale multiplies {' and '.join(traced)} by {by:g}, and checks their range, which "
            "needs values, and jit, grad or vmap traces them: export outside of the traced function"
        )
    changed = {
        name: times(to_numpy(array), by, name) if name in folded else array
        for name, array in found.items()
    }
    return from_leaves(changed), replace(semantics, scale=target.semantics.scale)


def is_folded(x: Mapping[str, NDArray], y: Mapping[str, NDArray], factor: float) -> bool:
    """True if the leaves `y` are `x` with the query multiplied by the factor, up to rounding.

    The product is rounded once, and once more where a cast preceded or followed it.
    """
    queries = which(x)
    if x.keys() != y.keys() or not queries & x.keys():
        return False
    for name, array in x.items():
        other = y[name]
        if array.shape != other.shape or array.dtype != other.dtype:
            return False
        if name not in queries or not jnp.issubdtype(array.dtype, jnp.floating):
            if array.tobytes() != other.tobytes():
                return False
            continue
        limits = ml_dtypes.finfo(array.dtype)  # type: ignore[no-untyped-call]
        product = array.astype(np.float64) * factor
        allowed = float(limits.eps) * np.abs(product) + float(limits.smallest_subnormal)
        if not (np.abs(other.astype(np.float64) - product) <= allowed).all():
            return False
    return True


def note(semantics: Semantics, factor: float, dtype: DTypeLike, H: int) -> str:
    """A sentence that gives the factor of the queries, and the rounding error in this dtype."""
    done = f"the scale {logit_scale(semantics, H):.6g} is folded into the query, which is multiplied by {factor:.6g}"
    if is_exact(factor):
        return f"{done}: a power of two, so that no digit changes"
    half = float(ml_dtypes.finfo(dtype).eps) / 2  # type: ignore[no-untyped-call]
    return f"{done}: each number is rounded by up to {half:.2g} of itself ({to_dtype(dtype)})"
