"""Structural equality of jaxprs, so that a function traced twice compiles once.

The rules of derivatives in a jaxpr, of a custom JVP or VJP, are other functions in every trace: they
are left out, and the derivatives that they give are compared as jaxprs too.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

# Variable of one jaxpr -> the corresponding variable of the other.
Names = dict[object, object]
# Primitives with a rule for their derivative -> the parameters that hold its functions.
DERIVED = {
    "custom_jvp_call": {"jvp_jaxpr_fun"},
    "custom_vjp_call": {"fwd_jaxpr_thunk", "bwd", "out_trees"},
}


def outline(jaxpr: core.Jaxpr) -> tuple[object, ...]:
    """A hashable summary of a jaxpr; equal jaxprs have equal summaries."""
    avals = tuple(str(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars))
    return avals, tuple(eqn.primitive.name for eqn in jaxpr.eqns)


def equal(a: object, b: object) -> bool:
    """True if two jaxprs have the same structure and constants, apart from the rules of derivatives;
    False if they differ, or if a parameter, such as a function, cannot be compared. Other objects are
    compared as parameters are.

    >>> one, other = (jax.make_jaxpr(lambda x: x + 1)(2.0).jaxpr for _ in range(2))
    >>> one is other, equal(one, other)
    (False, True)
    """
    return _equal(a, b)


def gradient(jaxpr: core.Jaxpr) -> object:
    """The closed jaxpr of the derivative of a floating function, if a rule for it is in its jaxpr, else
    None; where the rule raises, an object that equals no other."""
    if not _has_rule(jaxpr):
        return None
    count = len(jaxpr.constvars)

    def call(*given: jax.Array) -> list[jax.Array]:
        found: list[jax.Array] = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, given[:count]))(
            *given[count:]
        )
        return found

    def pulled(*given: jax.Array) -> object:
        out, pull = jax.vjp(call, *given)
        return pull([jnp.ones_like(x) for x in out])

    variables = *jaxpr.constvars, *jaxpr.invars
    try:
        return jax.make_jaxpr(pulled)(*(v.aval for v in variables))
    except Exception:  # noqa: BLE001  a call that is not differentiated does not need the derivative
        return object()


def _has_rule(x: object) -> bool:
    """True if a jaxpr in this parameter, or in its equations, has a rule for its derivative."""
    if isinstance(x, core.ClosedJaxpr):
        return _has_rule(x.jaxpr)
    if isinstance(x, core.Jaxpr):
        return any(e.primitive.name in DERIVED or _has_rule((*e.params.values(),)) for e in x.eqns)
    return isinstance(x, tuple | list) and any(map(_has_rule, x))


def _equal_jaxprs(a: core.Jaxpr, b: core.Jaxpr) -> bool:
    if outline(a) != outline(b):
        return False
    names: Names = {}
    _bind(names, (*a.constvars, *a.invars), (*b.constvars, *b.invars))
    for x, y in zip(a.eqns, b.eqns, strict=True):
        if not _equal_atoms(names, x.invars, y.invars) or not _equal(_compared(x), _compared(y)):
            return False
        if [str(v.aval) for v in x.outvars] != [str(v.aval) for v in y.outvars]:
            return False
        _bind(names, x.outvars, y.outvars)
    return _equal_atoms(names, a.outvars, b.outvars)


def _compared(eqn: core.JaxprEqn) -> dict[str, object]:
    """The parameters of an equation without the rule for its derivative."""
    rule = DERIVED.get(eqn.primitive.name, set())
    return {name: x for name, x in eqn.params.items() if name not in rule}


def _bind(names: Names, a: Iterable[object], b: Iterable[object]) -> None:
    names.update(zip(a, b, strict=True))


def _equal_atoms(names: Names, a: Sequence[object], b: Sequence[object]) -> bool:
    """True if the variables of `a` correspond to those of `b`, and literals are equal."""
    if len(a) != len(b):
        return False
    for x, y in zip(a, b, strict=True):
        literals = isinstance(x, core.Literal), isinstance(y, core.Literal)
        if literals == (True, True):
            if str(x.aval) != str(y.aval) or not _equal(x.val, y.val):  # type: ignore[attr-defined]
                return False
        elif any(literals) or names.get(x) is not y:
            return False
    return True


def _equal(a: object, b: object) -> bool:
    """True if two parameters of an equation are equal."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, core.Jaxpr) and isinstance(b, core.Jaxpr):
        return _equal_jaxprs(a, b)
    if isinstance(a, core.ClosedJaxpr) and isinstance(b, core.ClosedJaxpr):
        return _equal_jaxprs(a.jaxpr, b.jaxpr) and _equal(tuple(a.consts), tuple(b.consts))
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, jax.Array):  # constants: compared only by identity, above
        return False
    if isinstance(a, np.ndarray | np.generic | float):  # compares bits: NaN is equal to NaN
        x, y = np.asarray(a), np.asarray(b)
        return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    return bool(a == b)
