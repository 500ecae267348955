"""The blocks of pairs within which a function of scalars is constant, read off its jaxpr.

A block-sparse mask reads `i // rows` and `j // keys` alone: one evaluation serves a whole block.
"""

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxmha.implementations import jaxpr_equality


def grain(jaxpr: core.Jaxpr, argument: int) -> int:
    """A number g such that the function is constant for x in `[m * g, (m + 1) * g)`, for any m.

    x is the argument number `argument`, an integer of at least 0. Returns 1 if the jaxpr shows no
    larger number, or does not read x.

    >>> made = jax.make_jaxpr(lambda i, j: (i // 12 == j) | (i // 8 == 2))
    >>> [grain(made(jnp.int32(0), jnp.int32(0)).jaxpr, argument) for argument in (0, 1)]
    [4, 1]
    """
    x = jaxpr.invars[argument]
    if x in jaxpr.outvars:
        return 1
    found = 0
    for eqn in jaxpr.eqns:
        if x in eqn.invars:
            found = math.gcd(found, _divisor(eqn, x))
    return found or 1


def _divisor(eqn: Any, x: object) -> int:
    """The positive constant by which an equation divides x, rounding down; 1: it does something else
    with x."""
    if len(eqn.invars) != 2 or eqn.invars[0] is not x:
        return 1
    by = eqn.invars[1]
    if not isinstance(by, core.Literal) or not isinstance(by.val, int | np.integer):
        return 1
    called = eqn.params.get("jaxpr")
    divides = eqn.primitive.name == "div" or (
        called is not None
        and any(jaxpr_equality.equal(called.jaxpr, known) for known in _floor_divisions())
    )
    return int(by.val) if divides and by.val > 0 else 1


@cache
def _floor_divisions() -> tuple[core.Jaxpr, ...]:
    """The inner jaxprs to which JAX traces `x // y`, for y a Python integer or a NumPy integer."""
    one = jax.ShapeDtypeStruct((), np.dtype(np.int32))  # type: ignore[no-untyped-call]
    found = []
    for by in (2, np.int32(2)):
        made = jax.make_jaxpr(lambda x, by=by: jnp.asarray(x // by))(one)
        found += [eqn.params["jaxpr"].jaxpr for eqn in made.eqns if "jaxpr" in eqn.params]
    return tuple(found)
