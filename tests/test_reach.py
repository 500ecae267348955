"""Which blocks are visited, with conditions and without."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxmha import Mask
from jaxmha.implementations.tiled import block_mask, schedule
from jaxmha.implementations.tiled.tiling import Tiling, choose_tiling

PACKED = np.repeat(np.arange(8, dtype=np.int32), 512)[None]


def conditions_of(kind: str, T: int, S: int) -> Mask:
    rng, B = np.random.default_rng(T + S), 2
    ids = [np.sort(rng.integers(0, 4, (B, n)), -1).astype(np.int32) for n in (T, S)]
    return {
        "causal": Mask.causal(),
        "offset": Mask.causal(S - T),
        "offsets": Mask.causal(np.array([-3, 5], np.int32)),
        "window": Mask.window(7, 3),
        "left window": Mask.window(0, None) & Mask.causal(9),
        "lengths": Mask.lengths(
            query=np.array([T, 1], np.int32), key_value=np.array([S // 2, 0], np.int32)
        ),
        "padding": Mask.padding(key_value=rng.random((B, S)) < 0.9),
        "segments": Mask.segments(query_ids=ids[0], key_value_ids=ids[1]),
        "array": Mask.dense(rng.random((B, 3, T, S)) < 0.5) & Mask.causal(),
        "keys": Mask.dense(np.arange(S) % 40 < 30),
    }[kind]


def schedule_of(mask: Mask, T: int, S: int, tiling: Tiling) -> schedule.Schedule | None:
    """By one program."""

    def made() -> schedule.Schedule | None:
        conditions, _ = block_mask.pad(block_mask.from_mask(mask, T, S), None, tiling)
        return schedule.make_schedule(conditions, tiling)

    found: schedule.Schedule | None = jax.jit(made)()
    return found


@pytest.mark.slow_variants(
    "2-*",
    "1-29-97-*",
    "1-1-1-2-*",
    "1-97-31-8-offset",
    "1-97-31-8-left window",
    "1-97-31-8-padding",
    "1-97-31-8-array",
    "1-97-31-8-causal",  # offsets are causal too
    "!1-1-1-2-causal",
)
@pytest.mark.parametrize(
    "kind",
    ["causal", "offset", "offsets", "window", "left window", "lengths", "padding", "segments", "array", "keys"],
)  # fmt: skip
@pytest.mark.parametrize(("T", "S", "side"), [(1, 1, 2), (97, 31, 8), (29, 97, 8)])
@pytest.mark.parametrize("batches", [1, 2])
def test_every_pair_is_visited_once(kind: str, T: int, S: int, side: int, batches: int) -> None:
    """Chunks are unmasked, or looked at with their conditions, or without any allowed pair."""
    mask = conditions_of(kind, T, S)
    tiling = choose_tiling(2, 3, 1, T, S, skips=True, target=1, least_rows=side, side=side)
    tiling = replace(tiling, batches=batches)
    tiling = replace(tiling, heads=3 if batches > 1 else 1)
    found = schedule_of(mask, T, S, tiling)
    allowed = np.broadcast_to(mask.to_array(T, S), (2, 3, T, S))
    if found is None:
        assert allowed.all()
        return
    order, unmasked, needed = (np.asarray(x) for x in found)
    assert (np.sort(order, -1) == np.arange(tiling.kv_tiles)).all()
    for b, i, place in np.ndindex(2, tiling.query_tiles, tiling.kv_tiles):
        g = b // batches if len(order) > 1 else 0
        j = order[g, i, place]
        rows, keys = (
            slice(i * tiling.rows, (i + 1) * tiling.rows),
            slice(j * tiling.keys, (j + 1) * tiling.keys),
        )
        block = allowed[b, :, rows, keys]
        if place < unmasked[g, i]:
            assert block.all()
            assert (j + 1) * tiling.keys <= S
        elif place >= needed[g, i]:
            assert not block.any()


@pytest.mark.parametrize(
    ("mask", "most"),
    [
        (Mask.causal(), 0.54),
        (Mask.window(255, 0), 0.13),
        (Mask.lengths(key_value=np.array([1024, 2048], np.int32)), 0.38),
        (Mask.segments(query_ids=PACKED, key_value_ids=PACKED), 0.13),
    ],
    ids=["causal", "window", "lengths", "segments"],
)
def test_what_conditions_rule_out_is_not_computed(mask: Mask, most: float) -> None:
    tiling = choose_tiling(2, 1, 1, 4096, 4096, skips=True, side=256)
    found = schedule_of(mask, 4096, 4096, tiling)
    assert found is not None
    assert np.mean(found.needed) / tiling.kv_tiles < most
    assert np.mean(np.asarray(found.needed) - found.unmasked) / tiling.kv_tiles < 0.13
