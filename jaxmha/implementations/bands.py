"""Bands of rows or of keys that hold nearly only what a condition leaves.

All keys of a band are one block: few large kernels take less time than many small ones that leave
out more.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.implementations.blocked_dropout import placed
from jaxmha.implementations.blocks import Plan
from jaxmha.implementations.pairs import NOTHING, Pairs

# More of them compute less that is masked, and take longer to compile.
MOST = 4
# Rows or keys of one, at least.
LEAST: dict[str, int] = {"cpu": 256}
LEAST_ELSEWHERE = 2048
Answer = tuple[jax.Array, jax.Array | None]


def kind(plan: Plan, rules: Any, conditions: Pairs, bias: Any) -> Literal["rows", "keys"] | None:
    """Bands of rows where an offset that is known decides alone which pairs there are, of keys
    where that is which keys are there; None: neither, or blocks that leave out more take no longer.
    """
    if bias is not None or rules.window != (None, None):
        return None
    if conditions == NOTHING:
        known = rules.above is not None and rules.above >= 0
        return "rows" if known and 1 < _parts(plan) <= MOST else None
    keys_alone = conditions._replace(keys=None) == NOTHING and rules.above is None
    return "keys" if keys_alone and rules.soft_cap is None else None


def _parts(plan: Plan) -> int:
    return -(-plan.S // min(plan.keys, LEAST.get(jax.default_backend(), LEAST_ELSEWHERE)))


def of_rows(
    run: Callable[..., Answer],
    plan: Plan,
    rules: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    words: jax.Array | None,
) -> Answer:
    """Each band with the keys up to its last row.

    Args:
      run: computes `run(rules, query, key, value, words)` of a band.
      plan: of the whole, says how many bands there are.
      rules, query, key, value, words: as `blocked.core` has them.
    """
    N, T = query.shape[1:3]
    size = -(-T // _parts(plan))
    found = []
    for t in range(0, T, size):
        rows = query[:, :, t : t + size]
        S = min(plan.S, t + rows.shape[2] + rules.above)
        here = rules._replace(above=rules.above + t, whole=rules.whole or (N, T))
        at = None if words is None else placed(words, 0, 0, t, 0)
        found.append(run(here, rows, key[:, :, :S], value[:, :, :S], at))
    out = jnp.concatenate([out for out, _ in found], 2)
    lse = [lse for _, lse in found if lse is not None]
    return out, jnp.concatenate(lse, 2) if lse else None


def of_keys(
    run: Callable[..., Answer],
    plan: Plan,
    rules: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    there: jax.Array,
    words: jax.Array | None,
) -> Answer:
    """Every batch row with the narrowest of a few bands that holds all keys that are there.

    Args: as `of_rows` has them; `there`: keys, `b S`.
    """
    (B, N, T, _), S = query.shape, plan.S
    rules = rules._replace(whole=rules.whole or (N, T))
    # One more feature, 1 for queries: a product adds the mask where XLA would leave its kernel.
    low = jnp.where(there, 0.0, float(np.finfo(key.dtype).min)).astype(key.dtype)[:, None, :, None]
    query = jnp.concatenate([query, jnp.ones_like(query[..., :1])], -1)
    key = jnp.concatenate([key, jnp.broadcast_to(low, (*key.shape[:3], 1))], -1)
    some = there.any(1).reshape(-1, 1, 1)
    count = min(MOST, _parts(plan))
    count = count if count > 2 else 1  # two leave out less than they cost
    if count == 1:
        out, lse = run(rules, query, key, value, words)
    else:
        widths = [-(-S * (i + 1) // count) for i in range(count)]
        there = jnp.broadcast_to(there, (B, S))
        first = there.argmax(1)
        needed = S - there[:, ::-1].argmax(1) - first
        which = (needed[:, None] > jnp.array([widths[:-1]])).sum(1)

        def row(x: Any) -> Answer:
            b, which, first, *heads = x
            rows, keys, values = (y[None] for y in heads)

            def band(width: int) -> Answer:
                s = jnp.minimum(first, S - width)
                part, weighed = (
                    jax.lax.dynamic_slice_in_dim(y, s, width, 2) for y in (keys, values)
                )
                at = None if words is None else placed(words, b, 0, 0, s)
                out, lse = run(rules, rows, part, weighed, at)
                return out[0], None if lse is None else lse[0]

            found: Answer = jax.lax.switch(which, [lambda w=w: band(w) for w in widths])
            return found

        out, lse = jax.lax.map(row, (jnp.arange(B), which, first, query, key, value))
    out = jnp.where(some[..., None], out, 0.0)
    return out, None if lse is None else jnp.where(some, lse, -jnp.inf)
