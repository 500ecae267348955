"""The blocked implementation with blocks so small that bands, tiles and carries are exercised."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask
from jaxmha.implementations import blocked, blocked_dropout, blocks, pairs
from tests import cases, conformance, reference, tolerance
from tests.cases import CASES, POISONED, SMALL, Case

BY_NAME = {case.name: case for case in CASES}
# Bytes of a block and least rows: one row, and two rows of one head, T being no multiple of them.
TINY = ({"target": 1, "least_rows": 1}, {"target": 4 * 7 * 2 * 2, "least_rows": 2})


def shape_of(shape: tuple[int, ...], dtype: str) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(shape, dtype)


@pytest.fixture(params=TINY, ids=["one_row", "two_rows"])
def tiny(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(blocked, "SIZES", request.param)
    jax.clear_caches()  # type: ignore[no-untyped-call]
    yield
    jax.clear_caches()  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "name",
    [
        "multi_query",
        "bias_per_head",
        "mask_rows",
        "causal_long",
        "window_sides",
        "empty_mean_lengths",
        "dropout",
        "dropout_shared",
        "everything",
    ],
)
def test_values(name: str) -> None:
    conformance.values(BY_NAME[name], "blocked", "float32", jit=True)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", ["window_sides", "dropout_shared", "everything"])
def test_gradients(name: str) -> None:
    conformance.gradients(BY_NAME[name], "blocked", "float32", entries=5)


@pytest.mark.usefixtures("tiny")
def test_poison() -> None:
    conformance.poisoned_padding(POISONED[-1], "blocked", "float32")


def long_case(**changes: Any) -> tuple[Case, dict[str, Any]]:
    """Enough rows for several bands under the rule itself, and no multiple of anything."""
    case = Case("long", B=1, T=523, S=541, K=1, G=2, H=7, h=5, **changes)
    return case, cases.arrays(case, "float32")


@pytest.mark.parametrize(
    "changes", [{"is_causal": True}, {"local_window_size": (37, 11)}, {"bias": "N1S"}],
    ids=["causal", "window", "bias"],
)  # fmt: skip
def test_gradients_of_long_rows_are_those_of_the_reference(changes: dict[str, Any]) -> None:
    case, arrays = long_case(**changes)
    slopes = {}
    for name in ("blocked", "reference"):

        def of(inside: dict[str, Any], name: str = name) -> Any:
            out, lse = conformance.call(case, name, return_lse=True)(inside)
            live = jnp.where(lse == -jnp.inf, 0.0, lse)
            return (out * out).sum() + jnp.sin(live).sum()

        slopes[name] = jax.jit(jax.grad(of))(arrays)
    for name, slope in slopes["blocked"].items():
        tolerance.assert_close(slope, np.asarray(slopes["reference"][name]), name, factor=2.0)


def test_more_than_33_thousand_rows() -> None:
    """Programs of a product and a sum over very many rows have been compiled wrongly before."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 8, 3)).astype(np.float32) for n in (4219, 5, 5))
    out = jaxmha.dot_product_attention(q, k, v, implementation="blocked")
    logits = np.einsum("btnh,bsnh->bnts", *(x.astype(np.float64) for x in (q, k))) * 3**-0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    want = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)
    tolerance.assert_close(out, want)


def test_traced_offsets() -> None:
    arrays = cases.arrays(BY_NAME["plain"], "float32")
    offset = np.asarray([-2, 3], np.int32)
    out = jaxmha.dot_product_attention(**arrays, mask=Mask.causal(offset), implementation="blocked")
    places = np.arange(7).reshape(1, 1, 1, 7) <= np.arange(5).reshape(5, 1) + offset.reshape(
        2, 1, 1, 1
    )
    want = reference.dot_product_attention(**arrays, mask=places)
    tolerance.assert_close(out, want.out)


@pytest.mark.parametrize("above", [None, 0, -3, 5])
@pytest.mark.parametrize("below", [None, 0, 7])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (97, 31), (31, 97), (2048, 2048)])
def test_bands_leave_out_no_pair(T: int, S: int, below: int | None, above: int | None) -> None:
    cut = blocks.plan(2, 3, 2, T, S, below=below, above=above, target=2**12, least_rows=4)
    assert len(cut.bands) <= blocks.MOST_BANDS
    assert [band.first for band in cut.bands] == [0, *(band.stop for band in cut.bands[:-1])]
    assert cut.bands[-1].stop == cut.blocks
    for band in cut.bands:
        rows = np.arange(band.first * cut.rows, min(band.stop * cut.rows, T))
        seen = np.ones((len(rows), S), bool)
        if below is not None:
            seen &= np.arange(S) >= rows[:, None] - below
        if above is not None:
            seen &= np.arange(S) <= rows[:, None] + above
        used = np.flatnonzero(seen.any(0))
        assert not used.size or (band.low <= used[0] and used[-1] < band.high)


def test_causal_bands_leave_out_work() -> None:
    cut = blocks.plan(1, 1, 1, 4096, 4096, above=0)
    work = sum((band.stop - band.first) * cut.rows * band.high for band in cut.bands)
    assert work < 0.57 * 4096**2


def test_scores_are_never_materialised() -> None:
    x = shape_of((1, 4096, 4, 16), "float32")

    def of(q: Any, k: Any, v: Any) -> Any:
        return jaxmha.dot_product_attention(q, k, v, is_causal=True, implementation="blocked").sum()

    memory: Any = jax.jit(jax.grad(of, (0, 1, 2))).lower(x, x, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 4096 * 4096 * 4 / 2


def test_forward_mode_names_the_remedy() -> None:
    x = jnp.ones((1, 5, 2, 3))

    def of(q: Any) -> Any:
        return jaxmha.dot_product_attention(q, x, x, implementation="blocked")

    with pytest.raises(TypeError, match='implementation="reference"'):
        jax.jvp(of, (x,), (x,))


def test_explain() -> None:
    x = shape_of((1, 5, 2, 3), "float32")
    both = ("blocked", "reference")
    found = jaxmha.explain(x, x, x, return_weights=True, implementation=both, platform="cpu")
    assert found.chosen == "reference"
    assert found.reasons[0][0] == "blocked"
    assert "return_weights" in str(found)
    assert jaxmha.explain(x, x, x, implementation=both).chosen == "blocked"
    none = jaxmha.explain(x, x, x, softmax_dtype="bfloat16", implementation="blocked")
    assert none.chosen is None
    lengths = shape_of((1,), "int32")
    assert jaxmha.explain(x, x, x, key_value_seq_lengths=lengths).reasons
    with pytest.raises(ValueError, match="implementation must be among"):
        jaxmha.explain(x, x, x, implementation="unknown")


def _short_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = blocks.plan

    def plan(*sizes: Any, **options: Any) -> Any:
        cut = whole(*sizes, **options)
        bands = tuple(b._replace(high=max(b.high - 1, b.low)) for b in cut.bands)
        return replace(cut, bands=bands)

    monkeypatch.setattr(blocks, "plan", plan)


def _lse_slope_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    right = blocked.core

    def core(*arguments: Any) -> Any:
        out, lse = right(*arguments)
        return out, jax.lax.stop_gradient(lse)

    monkeypatch.setattr(blocked, "core", core)


def _draws_of_the_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    right: Any = blocked_dropout.kept

    def kept(*given: Any) -> Any:
        return right(*given[:-1], given[-1]._replace(t=0))

    monkeypatch.setattr(blocked, "kept", kept)


def _groups_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    right = pairs.added

    def added(conditions: Any, bias: Any, *rest: Any) -> Any:
        return right(conditions, None if bias is None else bias[:, ::-1], *rest)

    monkeypatch.setattr(pairs, "added", added)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("mutate", "name", "slopes"),
    [
        (_short_bands, "causal_long", False),
        (_lse_slope_lost, "multi_query", True),
        (_draws_of_the_first_block, "dropout", False),
        (_groups_swapped, "bias_per_head", False),
    ],
    ids=["bands", "lse", "dropout", "groups"],
)
def test_mistakes_are_noticed(
    mutate: Any, name: str, slopes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    check: Any = partial(conformance.values, jit=False)
    if slopes:
        check = partial(conformance.gradients, entries=5)
    with pytest.raises(AssertionError):
        check(BY_NAME[name], "blocked", "float32")


def test_the_small_case_has_groups_and_an_empty_row() -> None:
    assert SMALL.G > 1
    assert SMALL.empty_rows
