"""Splits causal rows or padded keys into bands, so that few masked scores are computed.

A row band has some consecutive rows and the keys up to the last one's diagonal. A key band has
consecutive keys, with all valid ones of a batch row. The keys of a band form one tile: a few large
kernels are faster than many small ones that skip more.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxmha.implementations.tiled import layout
from jaxmha.implementations.tiled.block_mask import NO_CONDITIONS, Conditions
from jaxmha.implementations.tiled.dropout import Seed, shift_seed
from jaxmha.implementations.tiled.layout import Index
from jaxmha.implementations.tiled.tile import Config
from jaxmha.implementations.tiled.tiling import Tiling, divisor
from jaxmha.implementations.tiled.tuning import tuning_for

OutAndLse: TypeAlias = tuple[Float[jax.Array, "*b N T h"], Float[jax.Array, "*b N T"] | None]


# Computes one band: `(config, query, key, value, seed, keys=None)`; `keys`: True for valid keys,
# `B S` of the band; None: all are.
AttendBand: TypeAlias = Callable[..., OutAndLse]


def kind(
    tiling: Tiling,
    config: Config,
    conditions: Conditions,
    bias: Float[jax.Array, "b n t s"] | None,
) -> Literal["rows", "keys"] | None:
    """Chooses row bands if a static causal offset is the only condition and `row_bands_pay`, and
    key bands if valid keys are the only condition and there is no soft cap.

    Otherwise, and with a bias, returns None: no bands. `conditions`: those that `config` lacks.
    """
    if bias is not None or config.window != (None, None):
        return None
    if conditions == NO_CONDITIONS:
        rows = config.above is not None and row_bands_pay(tiling, config.above, config.platform)
        return "rows" if rows else None
    keys_alone = conditions._replace(keys=None) == NO_CONDITIONS and config.above is None
    return "keys" if keys_alone and config.soft_cap is None else None


def row_bands_pay(tiling: Tiling, above: int, platform: str = "cpu") -> bool:
    """True if T is in `Tuning.row_band_range`, the causal offset `above` is at least 0, and rows
    attend on average at least a quarter fewer keys than the last row."""
    least, most = tuning_for(platform).row_band_range
    if not (least <= tiling.T <= most and above >= 0):
        return False
    attended = np.clip(np.arange(tiling.T) + above + 1, 0, tiling.S)
    return bool(attended.mean() <= 0.75 * attended[-1])


def row_band_size(
    tiling: Tiling, itemsize: int, *, platform: str = "cpu", target: int | None = None
) -> tuple[int, int]:
    """Number of query positions in a row band, and of key/value heads computed at a time.

    `itemsize`: bytes of a score. `target`: maximum bytes of the scores of these heads in a band
    with all S keys, unless one head has more; None: `Tuning.tile_bytes`.

    >>> from jaxmha.implementations.tiled.tiling import choose_tiling
    >>> row_band_size(choose_tiling(1, 8, 1, 2048, 2048, skips=True), 4)
    (256, 1)
    """
    tuning = tuning_for(platform)
    count = max(min(-(-tiling.T // rows), most) for rows, most in tuning.row_bands)
    size = -(-tiling.T // count)
    if target is None:
        target = tuning.tile_bytes
    return size, divisor(tiling.K, target // (itemsize * tiling.G * size * tiling.S))


def attend_row_bands(
    attend: AttendBand,
    tiling: Tiling,
    config: Config,
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K S H"],
    value: Float[jax.Array, "B K S h"],
    seed: Seed | None,
) -> OutAndLse:
    """`attention.core` for a causal offset, `config.above`, alone: each row band with the keys up
    to its last row's diagonal, a few heads at a time.

    `attend` computes one band; the other arguments are those of `attention.core`.
    """
    B, K, G, T = tiling.B, tiling.K, tiling.G, tiling.T
    itemsize = query.dtype.itemsize
    target = dict(config.sizes).get("target")
    size, heads = row_band_size(tiling, itemsize, platform=config.platform, target=target)
    above = config.above
    assert above is not None
    most = tuning_for(config.platform).least_rows_bytes

    def band(t: int, step: Index, query: jax.Array, key: jax.Array, value: jax.Array) -> OutAndLse:
        rows = query[:, t : t + size]
        S = min(tiling.S, t + rows.shape[1] + above)
        # A key/value head's scores in the band form one tile unless they exceed `least_rows_bytes`.
        least_rows = min(G * size, most // (itemsize * S))
        part = config._replace(
            above=above + t,
            whole=config.whole or (K * G, T),
            sizes=(("least_rows", least_rows), *config.sizes),
        )
        b, k = step * heads // K, step * heads % K
        at = None if seed is None else shift_seed(seed, b, k * G, t, 0)
        return attend(part, rows[None], key[None, :, :S], value[None, :, :S], at)

    def few_heads(step: Index, x: tuple[jax.Array, ...]) -> OutAndLse:
        query, key, value = x
        found = [band(t, step, query, key, value) for t in range(0, T, size)]
        out = jnp.concatenate([out for out, _ in found], 2)
        lse = [lse for _, lse in found if lse is not None]
        return out, jnp.concatenate(lse, 2) if lse else None

    steps = B * K // heads
    parts = tuple(
        x.reshape(steps, n, *x.shape[2:])
        for x, n in ((query, heads * G), (key, heads), (value, heads))
    )
    parts = parts if steps > 1 else tuple(x[0] for x in parts)
    out, lse = layout.map_tiles(few_heads, steps, parts)
    out = out.reshape(B, K * G, T, value.shape[-1])
    return out, None if lse is None else lse.reshape(B, K * G, T)


def key_band_widths(tiling: Tiling, platform: str = "cpu") -> list[int]:
    """Numbers of keys in the key bands, in increasing order; the last band holds all S keys, and is
    the only one where there would be two.

    >>> from jaxmha.implementations.tiled.tiling import choose_tiling
    >>> key_band_widths(choose_tiling(4, 8, 1, 1024, 1024, skips=True))
    [256, 512, 768, 1024]
    """
    tuning = tuning_for(platform)
    least = min(tiling.keys, tuning.key_band_keys)
    count = min(tuning.key_bands, -(-tiling.S // least))
    count = count if count > 2 else 1  # two bands save less than they cost
    return [-(-tiling.S * (i + 1) // count) for i in range(count)]


def attend_key_bands(
    attend: AttendBand,
    tiling: Tiling,
    config: Config,
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K S H"],
    value: Float[jax.Array, "B K S h"],
    valid: Bool[jax.Array, "#B S"],
    seed: Seed | None,
) -> OutAndLse:
    """`attention.core` for valid keys alone: each batch row with the narrowest key band that holds
    its valid keys, or all batch rows together if there is one band.

    `attend` computes one band, and `valid` is True for valid keys; the other arguments are those of
    `attention.core`.
    """
    config = config._replace(whole=config.whole or (query.shape[1], query.shape[2]))
    by_feature = tuning_for(config.platform).mask_by_matmul
    if by_feature:
        query, key = _mask_feature(query, key, valid)
    some = valid.any(1).reshape(-1, 1, 1)
    widths = key_band_widths(tiling, config.platform)
    if len(widths) == 1:
        out, lse = attend(config, query, key, value, seed, None if by_feature else valid)
    else:
        out, lse = _attend_narrowest(
            attend, config, widths, query, key, value, valid, seed, by_feature=by_feature
        )
    out = jnp.where(some[..., None], out, 0.0)
    return out, None if lse is None else jnp.where(some, lse, -jnp.inf)


def _mask_feature(
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K S H"],
    valid: Bool[jax.Array, "#B S"],
) -> tuple[Float[jax.Array, "B N T H1"], Float[jax.Array, "B K S H1"]]:
    """Appends a feature, 1 in queries, 0 in valid keys and -inf in others, so that the matmul of
    logits adds the mask: after a separate addition, XLA would not use its fused kernel."""
    low = jnp.where(valid, 0.0, -jnp.inf).astype(key.dtype)[:, None, :, None]
    query = jnp.concatenate([query, jnp.ones_like(query[..., :1])], -1)
    key = jnp.concatenate([key, jnp.broadcast_to(low, (*key.shape[:3], 1))], -1)
    return query, key


def _attend_narrowest(
    attend: AttendBand,
    config: Config,
    widths: list[int],
    query: Float[jax.Array, "B N T H"],
    key: Float[jax.Array, "B K S H"],
    value: Float[jax.Array, "B K S h"],
    valid: Bool[jax.Array, "#B S"],
    seed: Seed | None,
    *,
    by_feature: bool,
) -> OutAndLse:
    """Computes one batch row at a time, with the narrowest band that holds its valid keys.

    `widths`: numbers of keys in the bands, in increasing order. `by_feature`: a feature of query
    and key masks keys, which need no mask by `valid`.
    """
    B, S = query.shape[0], key.shape[2]
    valid = jnp.broadcast_to(valid, (B, S))
    first = valid.argmax(1)
    needed = jnp.where(valid.any(1), S - valid[:, ::-1].argmax(1) - first, 0)
    which = (needed[:, None] > jnp.array([widths[:-1]])).sum(1)

    def row(x: tuple[jax.Array, ...]) -> OutAndLse:
        b, which, first, *arrays = x
        rows, keys, values, own = (y[None] for y in arrays)

        def band(width: int) -> OutAndLse:
            s = jnp.minimum(first, S - width)
            k, v = (jax.lax.dynamic_slice_in_dim(y, s, width, 2) for y in (keys, values))
            at = None if seed is None else shift_seed(seed, b, 0, 0, s)
            mask = None if by_feature else jax.lax.dynamic_slice_in_dim(own, s, width, 1)
            out, lse = attend(config, rows, k, v, at, mask)
            return out[0], None if lse is None else lse[0]

        found: OutAndLse = jax.lax.switch(which, [lambda w=w: band(w) for w in widths])
        return found

    batch_rows = jnp.arange(B), which, first, query, key, value, valid
    found: OutAndLse = jax.lax.map(row, batch_rows)
    return found
