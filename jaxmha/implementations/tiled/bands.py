"""Bands of rows or of keys that hold nearly only what a condition leaves.

All keys of a band are one block: few large kernels take less time than many small ones that leave
out more.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.implementations.tiled import layout, tiling
from jaxmha.implementations.tiled.block_mask import NOTHING, Pairs
from jaxmha.implementations.tiled.dropout import placed
from jaxmha.implementations.tiled.tiling import Plan

# More bands of keys compute less that is masked, and take longer to compile.
MOST = 4
# Keys of one, about.
LEAST: dict[str, int] = {"cpu": 256}
LEAST_ELSEWHERE = 2048
# Bands of rows: about how many rows are one band, and how many bands there are then at most; what
# gives most of them.
OF_ROWS = ((128, 4), (256, 8))
# From so many rows, up to so many; of fewer, all heads together are one kernel, and of more, blocks
# leave out as much and take less time to compile.
ROWS: dict[str, tuple[int, int]] = {"cpu": (257, 4096)}
# Where 1 * -inf is -inf in a product: elsewhere factors may be split into parts, which gives NaN.
MASKED_BY_PRODUCT = ("cpu",)
Answer = tuple[jax.Array, jax.Array | None]


def kind(plan: Plan, rules: Any, conditions: Pairs, bias: Any) -> Literal["rows", "keys"] | None:
    """Bands of rows where an offset that is known decides alone which pairs there are, of keys
    where that is which keys are there; None: neither, or blocks that leave out more take no longer.
    """
    if bias is not None or rules.window != (None, None):
        return None
    if conditions == NOTHING:
        rows = rules.above is not None and rows_leave_out(plan, rules.above, rules.platform)
        return "rows" if rows else None
    keys_alone = conditions._replace(keys=None) == NOTHING and rules.above is None
    return "keys" if keys_alone and rules.soft_cap is None else None


def rows_leave_out(plan: Plan, above: int, platform: str = "cpu") -> bool:
    """Whether bands of rows are worth it: rows see at least a quarter less, on average, than the last one does."""
    least, most = ROWS.get(platform, (0, 0))
    seen = np.clip(np.arange(min(plan.T, most)) + above + 1, 0, plan.S)
    return least <= plan.T <= most and above >= 0 and bool(seen.mean() <= 0.75 * seen[-1])


def cut(
    plan: Plan, itemsize: int, *, platform: str = "cpu", target: int | None = None
) -> tuple[int, int]:
    """Rows of a band of rows, and how many heads are worked on at a time.

    >>> cut(tiling.plan(1, 8, 1, 2048, 2048, skips=True), 4)
    (256, 1)
    """
    count = max(min(-(-plan.T // rows), most) for rows, most in OF_ROWS)
    size = -(-plan.T // count)
    if target is None:
        target = tiling.TARGET.get(platform, tiling.TARGET_ELSEWHERE)
    return size, tiling.divisor(plan.K, target // (itemsize * plan.G * size * plan.S))


def least_rows(plan: Plan, size: int, S: int, itemsize: int) -> int:
    """Of the blocks of a band with S keys: it is one, if that is not very large."""
    return min(plan.G * size, tiling.MOST_OF_LEAST // (itemsize * S))


def of_rows(
    run: Callable[..., Answer],
    plan: Plan,
    rules: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    words: jax.Array | None,
) -> Answer:
    """Each band with the keys up to its last row, of a few heads at a time.

    Args:
      run: computes `run(rules, query, key, value, words)` of a band.
      plan: of the whole.
      rules, query, key, value, words: as `blocked.core` has them.
    """
    B, K, G, T = plan.B, plan.K, plan.G, plan.T
    itemsize = query.dtype.itemsize
    target = dict(rules.sizes).get("target")
    size, heads = cut(plan, itemsize, platform=rules.platform, target=target)

    def band(t: int, step: Any, query: Any, key: Any, value: Any) -> Answer:
        rows = query[:, t : t + size]
        S = min(plan.S, t + rows.shape[1] + rules.above)
        here = rules._replace(
            above=rules.above + t,
            whole=rules.whole or (plan.K * G, T),
            sizes=(("least_rows", least_rows(plan, size, S, itemsize)), *rules.sizes),
        )
        b, k = step * heads // K, step * heads % K
        at = None if words is None else placed(words, b, k * G, t, 0)
        return run(here, *(x[None] for x in (rows, key[:, :S], value[:, :S])), at)

    def few_heads(step: Any, x: tuple[jax.Array, ...]) -> Answer:
        out, lse = zip(*(band(t, step, *x) for t in range(0, T, size)), strict=True)
        return jnp.concatenate(out, 2), None if lse[0] is None else jnp.concatenate(lse, 2)

    steps = B * K // heads
    parts = tuple(
        x.reshape(steps, n, *x.shape[2:])
        for x, n in ((query, heads * G), (key, heads), (value, heads))
    )
    parts = parts if steps > 1 else tuple(x[0] for x in parts)
    out, lse = layout.each(few_heads, steps, parts)
    out = out.reshape(B, K * G, T, value.shape[-1])
    return out, None if lse is None else lse.reshape(B, K * G, T)


def widths(plan: Plan, platform: str = "cpu") -> list[int]:
    """Keys of the bands of keys, the narrowest first; of one there are all.

    >>> widths(tiling.plan(4, 8, 1, 1024, 1024, skips=True))
    [256, 512, 768, 1024]
    """
    least = min(plan.keys, LEAST.get(platform, LEAST_ELSEWHERE))
    count = min(MOST, -(-plan.S // least))
    count = count if count > 2 else 1  # two leave out less than they cost
    return [-(-plan.S * (i + 1) // count) for i in range(count)]


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
    masked = rules.platform in MASKED_BY_PRODUCT
    if masked:
        # One more feature, 1 for queries: a product adds the mask where XLA would leave its kernel.
        low = jnp.where(there, 0.0, -jnp.inf).astype(key.dtype)[:, None, :, None]
        query = jnp.concatenate([query, jnp.ones_like(query[..., :1])], -1)
        key = jnp.concatenate([key, jnp.broadcast_to(low, (*key.shape[:3], 1))], -1)
    some = there.any(1).reshape(-1, 1, 1)
    of = widths(plan, rules.platform)
    if len(of) == 1:
        out, lse = run(rules, query, key, value, words, None if masked else there)
    else:
        there = jnp.broadcast_to(there, (B, S))
        first = there.argmax(1)
        needed = jnp.where(there.any(1), S - there[:, ::-1].argmax(1) - first, 0)
        which = (needed[:, None] > jnp.array([of[:-1]])).sum(1)

        def row(x: Any) -> Answer:
            b, which, first, *arrays = x
            rows, keys, values, mine = (y[None] for y in arrays)

            def band(width: int) -> Answer:
                s = jnp.minimum(first, S - width)
                part, weighed = (
                    jax.lax.dynamic_slice_in_dim(y, s, width, 2) for y in (keys, values)
                )
                at = None if words is None else placed(words, b, 0, 0, s)
                its = None if masked else jax.lax.dynamic_slice_in_dim(mine, s, width, 1)
                out, lse = run(rules, rows, part, weighed, at, its)
                return out[0], None if lse is None else lse[0]

            found: Answer = jax.lax.switch(which, [lambda w=w: band(w) for w in of])
            return found

        out, lse = jax.lax.map(row, (jnp.arange(B), which, first, query, key, value, there))
    out = jnp.where(some[..., None], out, 0.0)
    return out, None if lse is None else jnp.where(some, lse, -jnp.inf)
