"""Splits causal rows or padded keys into bands, so that few masked scores are computed.

The keys of a band form one tile: a few large kernels are faster than many small ones that skip
more.
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

# Maximum number of key bands: more bands compute fewer masked scores, and compile longer.
MOST = 4
# Approximate minimum number of keys per band.
LEAST: dict[str, int] = {"cpu": 256}
LEAST_ELSEWHERE = 2048
# Row bands: (approximate rows per band, maximum number of bands); the entry that gives the most
# bands applies.
OF_ROWS = ((128, 4), (256, 8))
# Smallest and largest T with row bands. With fewer rows one kernel computes all heads together;
# with more, tiles skip as much and compile faster.
ROWS: dict[str, tuple[int, int]] = {"cpu": (257, 4096)}
# Platforms where 1 * -inf is -inf in a matmul; elsewhere split operands may give NaN.
MASKED_BY_PRODUCT = ("cpu",)
Answer = tuple[jax.Array, jax.Array | None]


def kind(plan: Plan, rules: Any, conditions: Pairs, bias: Any) -> Literal["rows", "keys"] | None:
    """`rows` if a static causal offset is the only condition, `keys` if key padding is.

    None: neither, or tiles that skip more are as fast.
    """
    if bias is not None or rules.window != (None, None):
        return None
    if conditions == NOTHING:
        rows = rules.above is not None and rows_leave_out(plan, rules.above, rules.platform)
        return "rows" if rows else None
    keys_alone = conditions._replace(keys=None) == NOTHING and rules.above is None
    return "keys" if keys_alone and rules.soft_cap is None else None


def rows_leave_out(plan: Plan, above: int, platform: str = "cpu") -> bool:
    """True if row bands pay: rows attend on average at least a quarter fewer keys than the last."""
    least, most = ROWS.get(platform, (0, 0))
    seen = np.clip(np.arange(min(plan.T, most)) + above + 1, 0, plan.S)
    return least <= plan.T <= most and above >= 0 and bool(seen.mean() <= 0.75 * seen[-1])


def cut(
    plan: Plan, itemsize: int, *, platform: str = "cpu", target: int | None = None
) -> tuple[int, int]:
    """Rows of a row band, and the number of key/value heads computed at a time.

    >>> cut(tiling.plan(1, 8, 1, 2048, 2048, skips=True), 4)
    (256, 1)
    """
    count = max(min(-(-plan.T // rows), most) for rows, most in OF_ROWS)
    size = -(-plan.T // count)
    if target is None:
        target = tiling.TARGET.get(platform, tiling.TARGET_ELSEWHERE)
    return size, tiling.divisor(plan.K, target // (itemsize * plan.G * size * plan.S))


def least_rows(plan: Plan, size: int, S: int, itemsize: int) -> int:
    """`least_rows` of a band with S keys: the band is a single tile unless that is very large."""
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
    """Computes each row band with the keys up to its last row's diagonal, a few heads at a time.

    Args:
      run: `run(rules, query, key, value, words)` computes one band.
      plan: tiling of the whole request.
      rules, query, key, value, words: as in `attention.core`.
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
    """Widths of the key bands in increasing order; the last band holds all keys.

    >>> widths(tiling.plan(4, 8, 1, 1024, 1024, skips=True))
    [256, 512, 768, 1024]
    """
    least = min(plan.keys, LEAST.get(platform, LEAST_ELSEWHERE))
    count = min(MOST, -(-plan.S // least))
    count = count if count > 2 else 1  # two bands save less than they cost
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
    """Computes each batch row with the narrowest key band that holds all its valid keys.

    Args: as in `of_rows`; `there`: valid keys, `b S`.
    """
    (B, N, T, _), S = query.shape, plan.S
    rules = rules._replace(whole=rules.whole or (N, T))
    masked = rules.platform in MASKED_BY_PRODUCT
    if masked:
        # An extra feature, 1 in queries and 0 or -inf in keys, masks within the matmul: a separate
        # mask would make XLA leave its fused kernel.
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
