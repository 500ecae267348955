"""Structural equality of jaxprs, so that a function traced twice compiles once."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

# Variable of one jaxpr -> the corresponding variable of the other.
Names = dict[object, object]
# Parameters that hold rules of custom derivatives. `Program.alike` skips them, because JAX makes
# new functions for them in every trace.
DERIVATIVES = frozenset(("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"))


def outline(jaxpr: core.Jaxpr) -> tuple[object, ...]:
    """A hashable summary of a jaxpr: types of inputs and names of primitives. Jaxprs that `equal`
    calls equal have equal summaries."""
    avals = tuple(str(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars))
    return avals, tuple(eqn.primitive.name for eqn in jaxpr.eqns)


def equal(a: core.Jaxpr, b: core.Jaxpr, skipped: frozenset[str] = frozenset()) -> bool:
    """True if two jaxprs have the same equations and types of inputs, and their inner jaxprs the same
    constants. Their own constants are not compared: they are inputs of a `Program`.

    `skipped`: names of parameters of equations that are not compared. Functions among the others
    must be one object.

    >>> one, other = (jax.make_jaxpr(lambda x: x + 1)(2.0).jaxpr for _ in range(2))
    >>> one is other, equal(one, other)
    (False, True)
    """
    return a is b or _equal_jaxprs(a, b, skipped)


def _equal_jaxprs(a: core.Jaxpr, b: core.Jaxpr, skipped: frozenset[str]) -> bool:
    if outline(a) != outline(b):
        return False
    names: Names = {}
    _bind(names, (*a.constvars, *a.invars), (*b.constvars, *b.invars))
    for x, y in zip(a.eqns, b.eqns, strict=True):
        if not _equal_atoms(names, x.invars, y.invars):
            return False
        if not _equal(_kept(x.params, skipped), _kept(y.params, skipped), skipped):
            return False
        if [str(v.aval) for v in x.outvars] != [str(v.aval) for v in y.outvars]:
            return False
        _bind(names, x.outvars, y.outvars)
    return _equal_atoms(names, a.outvars, b.outvars)


def _inner(closed: Any) -> core.Jaxpr:
    jaxpr: core.Jaxpr = getattr(closed, "jaxpr", closed)
    return jaxpr


def _kept(params: dict[str, object], skipped: frozenset[str]) -> dict[str, object]:
    return {name: x for name, x in params.items() if name not in skipped}


def _bind(names: Names, a: Iterable[object], b: Iterable[object]) -> None:
    names.update(zip(a, b, strict=True))


def _equal_atoms(names: Names, a: Sequence[object], b: Sequence[object]) -> bool:
    """True if `names` maps the variables of `a` to those of `b`, and literals are equal."""
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        literals = isinstance(x, core.Literal), isinstance(y, core.Literal)
        if literals == (True, True):
            if str(x.aval) != str(y.aval) or not _equal(x.val, y.val, frozenset()):  # type: ignore[attr-defined]
                return False
        elif any(literals) or names.get(x) is not y:
            return False
    return True


def _equal(a: object, b: object, skipped: frozenset[str]) -> bool:
    """True if two parameters, literals or constants are equal: NumPy arrays and floats by their bits,
    JAX arrays only if they are one object. `skipped`: as in `equal`, for inner jaxprs."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, core.Jaxpr | core.ClosedJaxpr):  # from JAX 0.11 on, both are one class
        x, y = (tuple(getattr(one, "consts", ())) for one in (a, b))
        return _equal(x, y, skipped) and _equal_jaxprs(_inner(a), _inner(b), skipped)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_equal(x, y, skipped) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k], skipped) for k in a)
    if isinstance(a, jax.Array):  # a captured constant, equal only to itself: its data is not read
        return False
    if isinstance(a, np.ndarray | np.generic | float):  # compares bits: NaN is equal to NaN
        c, d = np.asarray(a), np.asarray(b)
        return c.dtype == d.dtype and c.shape == d.shape and c.tobytes() == d.tobytes()
    return bool(a == b)
