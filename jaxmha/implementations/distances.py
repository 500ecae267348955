"""Recognises score functions that only add a bias by batch row, head and distance `j - i`.

ALiBi and T5's relative bias are such functions. A kernel that cannot call a function of JAX reads
the bias of all T + S - 1 distances of each head instead.
"""

from typing import Any

import numpy as np
from jax.extend import core


def adds_bias(jaxpr: core.Jaxpr) -> bool:
    """True if the function surely is `score + f(b, n, j - i)` or `score - f(b, n, j - i)`, False also
    if its jaxpr has another form. `jaxpr`: of a score function of (score, b, n, i, j).

    >>> import jax, jax.numpy as jnp
    >>> scalars = jnp.float32(0), *[jnp.int32(0)] * 4
    >>> made = jax.make_jaxpr(lambda x, b, n, i, j: x - 0.5 * abs(i - j).astype(x.dtype))(*scalars)
    >>> adds_bias(made.jaxpr), adds_bias(jax.make_jaxpr(lambda x, b, n, i, j: x * 2.0)(*scalars).jaxpr)
    (True, False)
    """
    score, _, _, i, j = jaxpr.invars
    positions = {i: "i", j: "j"}
    for eqn in jaxpr.eqns:
        read = [positions.get(x) for x in eqn.invars if not isinstance(x, core.Literal)]
        if any(read) and _is_exact_cast(eqn):
            positions[eqn.outvars[0]] = read[0] or ""
        elif any(read) and (eqn.primitive.name != "sub" or set(read) != {"i", "j"}):
            return False
        if score in eqn.invars and not _adds(eqn, score, jaxpr.outvars[0]):
            return False
    out = jaxpr.outvars[0]
    return any(score in eqn.invars and out in eqn.outvars for eqn in jaxpr.eqns)


def _adds(eqn: Any, score: object, out: object) -> bool:
    """True if an equation adds a term to `score` or subtracts one, and its result is `out`."""
    name, (first, *rest) = eqn.primitive.name, eqn.invars
    once = sum(x is score for x in eqn.invars) == 1 and eqn.outvars == [out]
    return (
        once and bool(rest) and (name in ("add", "add_any") or (name == "sub" and first is score))
    )


def _is_exact_cast(eqn: Any) -> bool:
    """True for a cast to int or float of at least 32 bits, which keeps distances below 2 ** 24 exact."""
    to = eqn.outvars[0].aval.dtype
    wide = np.issubdtype(to, np.number) and to.itemsize >= 4 and to.kind in "if"
    return eqn.primitive.name == "convert_element_type" and wide
