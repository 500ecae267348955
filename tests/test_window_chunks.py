"""Chunks of any size over a ring buffer of any size are whole attention in float64."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import KVCache, Mask, Semantics, latent
from tests import reference, test_latent, tolerance
from tests.test_cache import B, N, T, make


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
    """A mask over slots says of position p what it says of slot p % S."""
    params, x = make()
    rng, slots = np.random.default_rng(0), 5
    dense, valid = rng.random((B, N, 1, slots)) < 0.8, rng.random((B, slots)) < 0.8
    window = Mask.window(2, 0)
    at = np.arange(T) % slots
    want = exact(window & Mask.padding(key_value=valid[:, at]) & Mask.dense(dense[..., at]))
    mask = window & Mask.padding(key_value=valid) & Mask.dense(dense)
    cache, lengths = KVCache.empty(params, B, slots), np.zeros(B, int)
    for counts in ([6, 1, 0], [2, 6, 3], [3, 4, 6]):
        rows = np.minimum(lengths[:, None] + np.arange(6), T - 1)
        new = x[np.arange(B)[:, None], rows]
        out, cache = jaxmha.extend(params, new, cache, mask=mask, q_lengths=np.asarray(counts))
        for b, count in enumerate(counts):
            own = want[b, lengths[b] : lengths[b] + count]
            tolerance.assert_close(out[b, :count], own, f"row {b}", factor=2)
        lengths += counts
    assert cache.lengths.tolist() == lengths.tolist()


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
