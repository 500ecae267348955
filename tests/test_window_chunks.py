"""Chunks of any size over a ring buffer of any size are whole attention in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import KVCache, Mask, Semantics, latent
from jaxmha.cached_attention import attend_cache
from tests import reference, test_latent, tolerance
from tests.test_cache import B, H, K, N, T, h, make

RNG = np.random.default_rng(2)


def exact(mask: Mask) -> Any:
    params, x = make()
    pairs: Any = mask.to_array(T, T, np)
    return reference.multi_head_attention(
        params, x, semantics=Semantics(), mask=pairs, is_causal=True
    )[0]


@pytest.mark.slow_variants("*", "!3-4-*1")
@pytest.mark.parametrize("chunks", [(11,), (4, 5, 2), (2, 3, 1, 5)], ids=["0", "1", "2"])
@pytest.mark.parametrize(("left", "slots"), [(0, 1), (1, 2), (3, 4), (3, 5)])
def test_chunks(left: int, slots: int, chunks: tuple[int, ...]) -> None:
    """The first fit an empty cache, others overwrite tokens that their own first token attends."""
    params, x = make()
    mask = Mask.window(left, None)
    cache, outs, start = KVCache.empty(params, B, slots), [], 0
    for size in chunks:
        out, cache = jaxmha.extend(params, x[:, start : start + size], cache, mask=mask)
        outs.append(out)
        start += size
    tolerance.assert_close(np.concatenate(outs, 1), exact(mask), factor=2)
    assert cache.lengths.tolist() == [T] * B


def test_ragged_chunks_and_masks_over_slots() -> None:
    """An array says of position p what it says of slot p % S; padding is of positions."""
    params, x = make()
    rng, slots = np.random.default_rng(0), 5
    dense, valid = rng.random((B, N, 1, slots)) < 0.8, rng.random((B, slots)) < 0.8
    window = Mask.window(2, 0)
    at = np.arange(T) % slots
    padded = valid[:, at] | (np.arange(T) >= slots)
    want = exact(window & Mask.padding(key_value=padded) & Mask.dense(dense[..., at]))
    mask = window & Mask.padding(key_value=valid) & Mask.dense(dense)
    cache, lengths = KVCache.empty(params, B, slots), np.zeros(B, int)
    for counts in ([6, 1, 0], [2, 6, 3], [3, 4, 6]):
        rows = np.minimum(lengths[:, None] + np.arange(6), T - 1)
        new = x[np.arange(B)[:, None], rows]
        out, cache = jaxmha.extend(params, new, cache, mask=mask, q_lengths=np.asarray(counts))
        found = np.asarray(out)
        for b, count in enumerate(counts):
            own = want[b, lengths[b] : lengths[b] + count]
            tolerance.assert_close(found[b, :count], own, f"row {b}", factor=2)
        lengths += counts
    assert cache.lengths.tolist() == lengths.tolist()


def test_of_a_long_prompt_a_ring_keeps_the_last_tokens() -> None:
    """The ring keeps the tokens up to the length of its row; the prompt of another row is longer."""
    key, value = (RNG.standard_normal((B, T, K, size)).astype("f") for size in (H, h))
    counts = np.asarray([7, 11, 3])
    ring, _ = jax.jit(KVCache.append, static_argnames="left")(
        KVCache.empty(make()[0], B, 5), key, value, counts, left=4
    )
    for row, count in enumerate(counts):
        kept = np.arange(max(count - 5, 0), count)
        for stored, new in ((ring.key, key), (ring.value, value)):
            held = np.asarray(stored)[row, :, kept % 5]
            np.testing.assert_array_equal(held, new[row, kept])


def test_tokens_that_left_the_window_may_hold_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """In plain XLA, tile by tile, of a ring whose first slot alone holds a second token. A row
    without a key is NaN where the policy says so."""
    monkeypatch.setenv("JAXMHA_NATIVE", "0")
    slots, left = 9, 2
    key, value = (RNG.standard_normal((B, K, slots, size)).astype("f") for size in (H, h))
    query = RNG.standard_normal((B, 1, N, H)).astype("f")
    for x in (key, value):
        x[:, :, 1 : slots - left] = np.nan
    valid = np.ones((B, slots), bool)
    valid[2] = False
    cache = KVCache(key, value, np.full(B, slots + 1, np.int32))
    positions, mask = jnp.full((B, 1), slots), Mask.window(left, 0)

    @jax.jit
    def step(query: Any, cache: Any, valid: Any) -> Any:
        given = mask & Mask.padding(key_value=valid)
        semantics = Semantics(fully_masked="nan")
        return attend_cache(None, query, cache, positions, given, semantics, block=3)

    found = step(query, cache, valid)
    at = np.arange(slots - left, slots + 1) % slots
    want = full_attention(query, key[:, :, at], value[:, :, at])
    tolerance.assert_close(found[:2], want[:2], factor=2)
    assert np.isnan(found[2]).all()


def full_attention(query: Any, key: Any, value: Any) -> Any:
    """Attention over heads `B K S _` in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    logits = np.einsum("btkgh,bksh->bkgts", query.reshape(B, 1, K, -1, H), key) / np.sqrt(H)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bkgts,bksh->btkgh", weights, value).reshape(B, 1, N, h)


@pytest.mark.slow
def test_chunks_of_latents() -> None:
    params, x = test_latent.made(), test_latent.inputs()
    i, j = np.arange(test_latent.T)[:, None], np.arange(test_latent.T)
    want = test_latent.oracle(params, x, (j <= i) & (j >= i - 3))
    cache, outs = latent.LatentCache.empty(params, test_latent.B, 5), []
    for rows in (slice(7), slice(7, 11), slice(11, 13)):
        out, cache = latent.extend(
            params, x[:, rows], cache, mask=Mask.window(3, None), rotate=test_latent.ROTATE
        )
        outs.append(out)
    tolerance.assert_close(jnp.concatenate(outs, 1), want, factor=4)


def test_no_ring_has_room_for_more_than_its_slots() -> None:
    params, x = make()
    cache = KVCache.empty(params, B, 7)
    for mask in (Mask(), Mask.window(7, 0)):
        with pytest.raises(ValueError, match=r"x: T=8 new tokens do not fit into the S=7 slots"):
            jaxmha.extend(params, x[:, :8], cache, mask=mask)
    # In S slots with a window of S keys to the left, the next token would overwrite one of them.
    latents = latent.LatentCache(jnp.ones((B, 7, 5)), jnp.asarray([7, 6, 3]))

    @jax.jit
    def full_rows(cache: Any, latents: Any) -> Any:
        key, value = (jnp.ones((B, 1, K, size)) for size in (H, h))
        more = jnp.ones(B, np.int32)
        rows = [cache.append(key, value, more, left)[1] for left in (6, 7)]
        return [*rows, *(latents.append(jnp.ones((B, 1, 5)), more, left)[1] for left in (6, 7))]

    found = full_rows(cache._replace(lengths=latents.lengths), latents)
    assert [rows.tolist() for rows in found] == [[False] * B, [True, False, False]] * 2
