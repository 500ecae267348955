"""Bands of rows and of keys, whose scores are one tile each."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask
from jaxmha.implementations.tiled import attention, bands, tile, tiling
from tests import cases, conformance, tolerance
from tests.cases import Case


@pytest.fixture
def tiny(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    return conformance.tiled(request.node.name, conformance.TWO_ROWS, monkeypatch)


@pytest.fixture
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bands have two rows each, and there are at most three."""
    conformance.tune(monkeypatch, row_bands=((2, 3),), row_band_range=(3, 9))


# Causality alone and keys alone: bands, of which each has all its keys at once.
BANDS = (
    Case("rows", T=5, S=7, is_causal=True, dropout_rate=0.3),
    Case("capped rows", T=7, S=5, is_causal=True, logits_soft_cap=1.5),
    Case("keys", T=3, S=13, key_value_seq_lengths=(13, 4), dropout_rate=0.3),
    Case("no keys", T=3, S=13, key_value_seq_lengths=(0, 9)),
)


@pytest.mark.slow_variants("*", "!rows")
@pytest.mark.usefixtures("small_bands")
@pytest.mark.parametrize("case", BANDS, ids=[case.name for case in BANDS])
def test_bands(case: Case, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for name in ("attend_row_bands", "attend_key_bands"):
        right = getattr(bands, name)

        def band(*arguments: Any, name: str = name, right: Any = right) -> Any:
            taken.append(name)
            return right(*arguments)

        monkeypatch.setattr(bands, name, band)
    conformance.kernel(case, tiny, "float32", lse=True)
    assert set(taken) == {"attend_row_bands" if case.is_causal else "attend_key_bands"}


@pytest.mark.slow
def test_bands_of_keys_begin_anywhere(tiny: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((5, n, 3, 2)).astype(np.float32) for n in (7, 13, 13))
    attended = np.zeros((5, 13), bool)
    for b, keys in enumerate([slice(0), slice(9, 13), slice(3, 5), slice(1, 12, 2), slice(13)]):
        attended[b, keys] = True
    k[~attended], v[~attended] = np.nan, np.inf
    actual, wanted = (
        jaxmha.dot_product_attention(
            q, k, v, mask=Mask.padding(key_value=attended), implementation=name
        )
        for name in (tiny, "reference")
    )
    tolerance.assert_close(actual, np.asarray(wanted), factor=2.0)


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the queries that `tiling_for` gets: all of them first, then those of each band."""
    right, found = tiling.tiling_for, []

    def tiling_for(query: Any, *given: Any, **more: Any) -> Any:
        found.append(query.shape)
        return right(query, *given, **more)

    monkeypatch.setattr(attention, "tiling_for", tiling_for)
    return found


@pytest.mark.slow_variants("few of small tiles", "many", "few")
@pytest.mark.parametrize(
    ("T", "S", "heads", "count", "tile_bytes"),
    [(523, 541, 6, 4, None), (1031, 1063, 2, 5, None), (307, 331, 4, 3, 2 * 4 * 2 * 103 * 331)],
    ids=["many", "few", "few of small tiles"],
)
def test_bands_of_rows_are_the_reference(
    T: int,
    S: int,
    heads: int,
    count: int,
    tile_bytes: int | None,
    shapes: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some heads at a time, of several groups, under the rule of rows itself."""
    if tile_bytes is not None:
        conformance.tune(monkeypatch, tile_bytes=tile_bytes)
    case = Case("long", B=2, T=T, S=S, K=6, G=2, H=7, h=5, is_causal=True, dropout_rate=0.3)
    arrays = cases.arrays(case, "float32")
    found = [
        conformance.call(case, name, return_lse=True)(arrays) for name in ("blocked", "reference")
    ]
    for mine, right in zip(*found, strict=True):
        tolerance.assert_close(mine, np.asarray(right), factor=2.0)
    assert {shape[1] for shape in shapes[1:]} == {heads}
    rows = [shape[2] for shape in shapes[1:]]
    assert (len(rows), sum(rows)) == (count, T)


@pytest.mark.slow_variants("307-401-94-True", "307-*-False")
@pytest.mark.parametrize(
    ("T", "S", "offset", "banded"),
    [
        (307, 401, 94, True),
        (307, 307, 200, False),
        (307, 61, 0, False),
        (307, 1009, 702, False),
        (251, 251, 0, False),
        (307, 307, -1, False),
    ],
)
def test_bands_of_rows_where_much_is_left_out(
    T: int, S: int, offset: int, banded: bool, shapes: list[tuple[int, ...]]
) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 3, 5)).astype(np.float32) for n in (T, S, S))
    mine, right = (
        jaxmha.dot_product_attention(q, k, v, mask=Mask.causal(offset), implementation=name)
        for name in ("blocked", "reference")
    )
    tolerance.assert_close(mine, np.asarray(right), factor=2.0)
    assert len(shapes) == (4 if banded else 1)


@pytest.mark.slow
@pytest.mark.usefixtures("small_bands")
@pytest.mark.parametrize("case", BANDS[::2], ids=["rows", "keys"])
def test_a_band_in_the_wrong_place_is_noticed(
    case: Case, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bands, "shift_seed", lambda seed, *starts: seed)
    with pytest.raises(AssertionError):
        conformance.values(case, tiny, "float32", jit=True)


def test_rows_without_keys_take_the_narrowest_band() -> None:
    B, N, T, S, H = 3, 2, 5, 1024, 7
    widths: list[int] = []

    def run(config: Any, query: Any, key: Any, value: Any, seed: Any, keys: Any) -> Any:
        jax.debug.callback(lambda: widths.append(key.shape[2]))
        return jnp.full((*query.shape[:3], H), jnp.nan), None

    query, key = jnp.ones((B, N, T, H)), jnp.ones((B, N, S, H))
    valid = jnp.arange(S)[None] < jnp.array([[0], [300], [S]])
    plan = tiling.tiling_for(query, key, platform="cpu", skips=True)
    config = tile.Config(None, None, (None, None), None, 0.0, (), lse=False, platform="cpu")

    @jax.jit
    def banded(query: Any, key: Any, valid: Any) -> Any:
        return bands.attend_key_bands(run, plan, config, query, key, key, valid, None)[0]

    out = jax.block_until_ready(banded(query, key, valid))  # type: ignore[no-untyped-call]
    jax.effects_barrier()  # type: ignore[no-untyped-call]
    assert sorted(widths) == [256, 512, 1024]
    assert not out[0].any()
