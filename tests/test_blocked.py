"""The blocked implementation with blocks so small that bands, tiles and carries are exercised."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask
from jaxmha.implementations import IMPLEMENTATIONS
from jaxmha.implementations.tiled import (
    attention,
    bands,
    block_mask,
    dropout,
    layout,
    loop,
    schedule,
    tile,
    tiling,
)
from jaxmha.implementations.tiled.tiling import Tiling, choose_tiling
from tests import cases, conformance, reference, tolerance
from tests.cases import CASES, POISONED, SMALL, Case

BY_NAME = {case.name: case for case in CASES}
# One row and one key of one head; three keys; and two of four heads with four keys of `several`. T
# and S are no multiples of them.
TINY = (
    {"target": 1, "least_rows": 1, "side": 1},
    {"target": 4 * 7 * 2 * 2, "least_rows": 2, "side": 3},
    {"target": 2 * 4 * 2 * 2 * 4, "least_rows": 1, "side": 4},
)


def shape_of(shape: tuple[int, ...], dtype: str) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(shape, dtype)


@pytest.fixture(
    params=[pytest.param(TINY[0], marks=pytest.mark.slow), TINY[1]], ids=["one_row", "two_rows"]
)
def tiny(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """An implementation of a name of its own, for which nothing is compiled yet."""
    monkeypatch.setattr(attention, "SIZES", request.param)
    name = request.node.name
    module = SimpleNamespace(
        unsupported_reason=attention.unsupported_reason, attend=attention.attend
    )
    monkeypatch.setitem(conformance.WITHOUT_WEIGHTS, name, "as blocked")
    monkeypatch.setitem(IMPLEMENTATIONS, name, module)
    return str(name)


@pytest.mark.slow_variants(
    "*multi_query", "*causal_long", "*mask_rows", "*dropout", "two_rows-bias_per_head"
)
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
def test_values(name: str, tiny: str) -> None:
    conformance.values(BY_NAME[name], tiny, "float32", jit=True)


@pytest.mark.slow_variants("*dropout_shared", "*window_sides")
@pytest.mark.parametrize("name", ["window_sides", "dropout_shared", "everything"])
def test_gradients(name: str, tiny: str) -> None:
    conformance.gradients(BY_NAME[name], tiny, "float32", entries=5)


def several(name: str, **changes: Any) -> Case:
    """A case of several steps, of two heads of four each, of blocks of rows and of keys."""
    return replace(Case(name, S=11, K=4, H=3, h=2), **changes)


SEVERAL = (
    several("causal", is_causal=True, dropout_rate=0.3, fully_masked="nan"),
    several("lengths", query_seq_lengths=(3, 5), key_value_seq_lengths=(6, 11), dropout_rate=0.6),
    several("segments", segments="pair", dropout_rate=0.4, dropout_broadcast=("B", "N")),
    several("window", local_window_size=(3, 2), logits_soft_cap=0.9),
    several("mask", mask="BNTS", empty_rows=True, dead_keys=True, bias="BNTS", bias_excludes=True),
    several("one of a group", G=1, segments="pair", is_causal=True, bias="1N1S", dropout_rate=0.2),
    several("all", T=7, segments="pair", local_window_size=(4, 3), key_value_seq_lengths=(11, 7),
            mask="1NTS", bias="B1TS", bias_excludes=True, logits_soft_cap=1.3, dropout_rate=0.3),
    # Without conditions all keys are one block.
    several("no condition", bias="BNTS", dropout_rate=0.3),
    # Gradients are summed over axes that the bias broadcasts, block after block.
    *(
        several(f"bias {axes}", bias=axes, local_window_size=(4, 3), dropout_rate=0.3)
        for axes in ("BNTS", "B1TS", "1NTS", "11TS", "BN1S", "BNT1", "11T1", "111S", "1111")
    ),
)  # fmt: skip


@pytest.mark.everyday(case=["window"])
@pytest.mark.parametrize("tiny", TINY[2:], indirect=True, ids=["two_heads"])
@pytest.mark.parametrize("case", SEVERAL)
def test_every_gradient_over_several_tiles(
    case: Case, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every entry, not of a few, against those of the reference in float64."""
    plans = []

    def seen(plan: Tiling, *rest: Any) -> Any:
        plans.append(plan)
        return loop.backward(plan, *rest)

    monkeypatch.setattr(attention, "backward", seen)
    conformance.kernel(case, tiny, "float32", lse=case.fully_masked == "zero")
    (plan,) = plans
    assert plan.query_tiles > 1
    assert plan.steps > 1
    if case.name != "no condition":
        assert plan.kv_tiles > 1
        assert plan.heads > 1


def test_sizes_of_one_call_are_those_of_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have changed when the gradient is traced."""
    plans = []

    def seen(plan: Tiling, *rest: Any) -> Any:
        plans.append(plan)
        return loop.backward(plan, *rest)

    monkeypatch.setattr(attention, "backward", seen)
    query, key = jnp.ones((1, 5, 3, 2)), jnp.ones((1, 11, 3, 2))

    def of(query: Any) -> Any:
        return jaxmha.dot_product_attention(
            query, key, key, local_window_size=(4, 3), implementation="blocked"
        )

    with monkeypatch.context() as patch:
        patch.setattr(attention, "SIZES", {"target": 1, "least_rows": 1, "side": 4})
        out, pull = jax.vjp(of, query)
    pull(out)
    assert plans[0].keys == 4
    assert plans[0].rows == 1


def test_poison(tiny: str) -> None:
    conformance.poisoned_padding(POISONED[-1], tiny, "float32")


def long_case(**changes: Any) -> tuple[Case, dict[str, Any]]:
    """Enough rows for several bands under the rule itself, and no multiple of anything."""
    case = Case("long", B=1, T=523, S=541, K=1, G=2, H=7, h=5, **changes)
    return case, cases.arrays(case, "float32")


@pytest.mark.slow_variants("window")
@pytest.mark.parametrize(
    "changes", [{"is_causal": True, "bias": "N1S"}, {"local_window_size": (37, 11)}],
    ids=["causal and bias", "window"],
)  # fmt: skip
def test_gradients_of_long_rows_are_those_of_the_reference(changes: dict[str, Any]) -> None:
    case, arrays = long_case(**changes)
    grads = {}
    for name in ("blocked", "reference"):

        def of(inside: dict[str, Any], name: str = name) -> Any:
            out, lse = conformance.call(case, name, return_lse=True)(inside)
            live = jnp.where(lse == -jnp.inf, 0.0, lse)
            return (out * out).sum() + jnp.sin(live).sum()

        grads[name] = jax.jit(jax.grad(of))(arrays)
    for name, grad in grads["blocked"].items():
        tolerance.assert_close(grad, np.asarray(grads["reference"][name]), name, factor=2.0)


@pytest.mark.parametrize("S", [5, 61])
def test_more_than_33_thousand_rows(S: int) -> None:
    """Programs of a product and a sum over very many rows have been compiled wrongly before."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 8, 3)).astype(np.float32) for n in (4219, S, S))
    grad = rng.standard_normal(q.shape).astype(np.float32)
    out, pull = jax.vjp(
        lambda *heads: jaxmha.dot_product_attention(*heads, implementation="blocked"), q, k, v
    )
    wide: Any = [np.moveaxis(x.astype(np.float64), 2, 1) for x in (q, k, v, grad)]
    q, k, v, g = wide
    weights = np.exp(q @ k.mT * 3**-0.5)
    weights /= weights.sum(-1, keepdims=True)
    grads = g @ v.mT
    grads = weights * (grads - (weights * grads).sum(-1, keepdims=True)) * 3**-0.5
    tolerance.assert_close(out, np.moveaxis(weights @ v, 1, 2))
    want = grads @ k, grads.mT @ q, weights.mT @ g
    for x, y in zip(pull(grad), want, strict=True):
        tolerance.assert_close(x, np.moveaxis(y, 1, 2), factor=tolerance.BACKWARD)


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_traced_offsets(batch: int) -> None:
    """Beside keys of one or of every batch row; 0: all of them."""
    arrays = cases.arrays(BY_NAME["plain"], "float32")
    offset = np.asarray([-2, 3], np.int32)
    attended = np.ones((max(batch, 1), 1, 1, 7), bool)
    attended[:, ..., 2 : 2 + batch] = False
    mask = Mask.causal(offset) & (Mask.dense(attended) if batch else Mask())
    out = jaxmha.dot_product_attention(**arrays, mask=mask, implementation="blocked")
    places = np.arange(7).reshape(1, 1, 1, 7) <= np.arange(5).reshape(5, 1) + offset.reshape(
        2, 1, 1, 1
    )
    want = reference.dot_product_attention(**arrays, mask=places & attended)
    tolerance.assert_close(out, want.out)


@pytest.mark.parametrize("gradient", [False, True])
def test_scores_are_never_materialised(*, gradient: bool) -> None:
    x = shape_of((1, 4096, 4, 16), "float32")

    def of(q: Any, k: Any, v: Any) -> Any:
        return jaxmha.dot_product_attention(q, k, v, is_causal=True, implementation="blocked").sum()

    program = jax.jit(jax.grad(of, (0, 1, 2)) if gradient else of)
    memory: Any = program.lower(x, x, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 4096 * 4096 * 4 / 2


def test_forward_mode_names_the_remedy() -> None:
    x = jnp.ones((1, 5, 2, 3))

    def of(q: Any) -> Any:
        return jaxmha.dot_product_attention(q, x, x, implementation="blocked")

    with pytest.raises(TypeError, match='implementation="reference"'):
        jax.jvp(of, (x,), (x,))


@pytest.mark.parametrize("tiny", TINY[1:2], indirect=True, ids=["two_rows"])
def test_forward_over_reverse_is_that_of_the_reference(tiny: str) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (
        jax.random.normal(k, (1, T, 2, 3)) for k, T in zip(keys, (5, 7, 7), strict=True)
    )

    def hessian(implementation: str) -> Any:
        def of(q: Any, k: Any) -> Any:
            out = jaxmha.dot_product_attention(
                q, k, value, mask=Mask.causal(offset=1), implementation=implementation
            )
            return (out**2).sum()

        return jax.jit(jax.hessian(of, (0, 1)))(query, key)

    jax.tree.map(tolerance.assert_close, hessian(tiny), hessian("reference"))


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
    with pytest.raises(ValueError, match=r"implementation must be among .*, got 'unknown'(\n|$)"):
        jaxmha.explain(x, x, x, implementation="unknown")
    with pytest.raises(ValueError, match=r"got 'Bloked': did you mean 'blocked'\?"):
        jaxmha.explain(x, x, x, implementation="Bloked")


def _changed_schedule(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    right = schedule.make_schedule

    def make(*given: Any) -> Any:
        found = right(*given)
        return None if found is None else change(found)

    monkeypatch.setattr(loop, "make_schedule", make)


def _last_kv_tile_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(x: schedule.Schedule) -> schedule.Schedule:
        needed = jnp.maximum(x.needed - 1, 0)
        return x._replace(needed=needed, unmasked=jnp.minimum(x.unmasked, needed))

    _changed_schedule(monkeypatch, change)


def _edges_unmasked(monkeypatch: pytest.MonkeyPatch) -> None:
    _changed_schedule(monkeypatch, lambda x: x._replace(unmasked=x.needed))


def _lse_gradient_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.core

    def core(*arguments: Any) -> Any:
        out, lse = right(*arguments)
        return out, jax.lax.stop_gradient(lse)

    monkeypatch.setattr(attention, "core", core)


def _draws_of_the_first_block(monkeypatch: pytest.MonkeyPatch) -> None:
    right: Any = dropout.keep_mask

    def keep_mask(*given: Any) -> Any:
        return right(*given[:-1], given[-1]._replace(t=0))

    monkeypatch.setattr(loop, "keep_mask", keep_mask)


def _in_the_gradient(mutate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error, but in no forward pass."""

    def backward(*given: Any) -> Any:
        with monkeypatch.context() as patch:
            mutate(patch)
            return loop.backward(*given)

    monkeypatch.setattr(attention, "backward", backward)


def _first_kv_tile_only(monkeypatch: pytest.MonkeyPatch) -> None:
    right = layout.add_to_kv_tile
    monkeypatch.setattr(layout, "add_to_kv_tile", lambda plan, x, j, more: right(plan, x, 0, more))


def _bias_of_the_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    right: Any = loop._add_bias_gradient

    def add(*given: Any) -> Any:
        return right(*given[:-1], given[-1]._replace(t=0))

    monkeypatch.setattr(loop, "_add_bias_gradient", add)


def _groups_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    right = block_mask.mask_or_bias

    def swapped(conditions: Any, bias: Any, *rest: Any) -> Any:
        return right(conditions, None if bias is None else bias[:, ::-1], *rest)

    monkeypatch.setattr(block_mask, "mask_or_bias", swapped)


@pytest.mark.slow_variants("dropout-two_rows", "*again-two_rows", "first rows-two_rows")
@pytest.mark.parametrize("tiny", TINY[1:2], indirect=True, ids=["two_rows"])
@pytest.mark.parametrize(
    ("mutate", "name", "grads"),
    [
        (_last_kv_tile_lost, "window_sides", False),
        (_lse_gradient_lost, "multi_query", True),
        (_draws_of_the_first_block, "dropout", False),
        (_groups_swapped, "bias_per_head", False),
        (partial(_in_the_gradient, _draws_of_the_first_block), "dropout", True),
        (partial(_in_the_gradient, _last_kv_tile_lost), "window_sides", True),
        (partial(_in_the_gradient, _groups_swapped), "everything", True),
        (_first_kv_tile_only, "lengths", True),
        (_bias_of_the_first_rows, "everything", True),
    ],
    ids=[
        *("chunks", "lse", "dropout", "groups"),
        *("dropout again", "chunks again", "groups again", "first chunk", "first rows"),
    ],
)
def test_errors_are_noticed(
    mutate: Any, name: str, grads: bool, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    check: Any = partial(conformance.values, jit=False)
    if grads:
        check = partial(conformance.gradients, entries=5)
    with pytest.raises(AssertionError):
        check(BY_NAME[name], tiny, "float32")


@pytest.mark.parametrize("tiny", TINY[1:2], indirect=True)
def test_edges_are_not_clear(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _edges_unmasked(monkeypatch)
    with pytest.raises(AssertionError):
        conformance.values(BY_NAME["window_sides"], tiny, "float32", jit=False)


@pytest.fixture
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two rows, up to three."""
    conformance.tune(monkeypatch, row_bands=((2, 3),), row_band_range=(3, 9))


# Causality alone and keys alone: bands, of which each has all its keys at once.
BANDS = (
    Case("rows", T=5, S=7, is_causal=True, dropout_rate=0.3),
    Case("capped rows", T=7, S=5, is_causal=True, logits_soft_cap=1.5),
    Case("keys", T=3, S=13, key_value_seq_lengths=(13, 4), dropout_rate=0.3),
    Case("no keys", T=3, S=13, key_value_seq_lengths=(0, 9)),
)


@pytest.mark.slow_variants("*", "!rows-two_rows")
@pytest.mark.usefixtures("small_bands")
@pytest.mark.parametrize("tiny", TINY[1:2], indirect=True, ids=["two_rows"])
@pytest.mark.parametrize("case", BANDS, ids=[case.name for case in BANDS])
def test_bands(case: Case, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for name in ("attend_row_bands", "attend_key_bands"):
        right = getattr(bands, name)

        def band(*arguments: Any, name: str = name, right: Any = right) -> Any:
            taken.append(name)
            return right(*arguments)

        monkeypatch.setattr(bands, name, band)
    conformance.values(case, tiny, "float32", jit=True)
    assert set(taken) == {"attend_row_bands" if case.is_causal else "attend_key_bands"}
    conformance.gradients(case, tiny, "float32", entries=5)


@pytest.mark.slow
@pytest.mark.parametrize("tiny", TINY[1:2], indirect=True, ids=["two_rows"])
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
    """Of the queries that are cut: first of all of them, then of each band."""
    right, found = tiling.tiling_for, []

    def tiling_for(query: Any, *given: Any, **more: Any) -> Any:
        found.append(query.shape)
        return right(query, *given, **more)

    monkeypatch.setattr(attention, "tiling_for", tiling_for)
    return found


@pytest.mark.slow_variants("many", "few")
@pytest.mark.parametrize(
    ("T", "S", "heads", "count", "tile_bytes"),
    [
        (523, 541, 6, 4, None),
        (1031, 1063, 2, 5, None),
        (307, 331, 4, 3, 2 * 4 * 2 * 103 * 331),
    ],
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
    """Some heads at a time, of several groups, under the rule itself."""
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


@pytest.mark.slow_variants("307-*-False")
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


def test_few_steps_are_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("steps", B=1, T=5, S=7, K=3, G=2, H=7, h=11)
    arrays = cases.arrays(case, "float32")
    conformance.tune(monkeypatch, small_head_bytes=0, heads_bytes=1)
    want = np.asarray(conformance.call(case, "reference")(arrays))
    for bytes_, loops in ((2**24, False), (0, True)):
        conformance.tune(monkeypatch, unroll_bytes=bytes_)
        jax.clear_caches()  # type: ignore[no-untyped-call]
        of = jax.jit(conformance.call(case, "blocked"))
        tolerance.assert_close(of(arrays), want)
        assert ("while" in of.lower(arrays).as_text()) == loops
        grad = jax.jit(jax.value_and_grad(lambda x, of=of: of(x).sum()))
        assert "while" in grad.lower(arrays).as_text()


def test_few_blocks_of_rows_are_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("rows", B=2, T=5, S=7, K=3, G=2, H=7, h=11, is_causal=True, mask="BNTS")
    arrays = cases.arrays(case, "float32")
    monkeypatch.setattr(attention, "SIZES", {"side": 2, "least_rows": 2})
    want = np.asarray(conformance.call(case, "reference")(arrays))
    loops = []
    for most in (5, 0):
        conformance.tune(monkeypatch, unroll_query_tiles=most)
        jax.clear_caches()  # type: ignore[no-untyped-call]
        of = jax.jit(conformance.call(case, "blocked"))
        tolerance.assert_close(of(arrays), want)
        loops.append(of.lower(arrays).as_text().count("stablehlo.while"))
    assert loops[0] < loops[1]


def test_heads_of_few_keys_are_together_only_before_a_softmax() -> None:
    def cells(S: int, **more: Any) -> int:
        return choose_tiling(2, 8, 1, 1024, S, **more).tile_heads

    assert cells(77, plain=True) == 16
    assert cells(77, plain=True, gradient=True) == 16
    assert cells(77) == cells(77, gradient=True) == 8
    assert cells(257, plain=True) == 2
    assert cells(140, plain=True, gradient=True) == 8
    assert cells(257, plain=True, gradient=True) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("small_bands")
@pytest.mark.parametrize("tiny", TINY[1:2], indirect=True, ids=["two_rows"])
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
    out, _ = jax.block_until_ready(
        bands.attend_key_bands(run, plan, config, query, key, key, valid, None)
    )  # type: ignore[no-untyped-call]
    jax.effects_barrier()  # type: ignore[no-untyped-call]
    assert sorted(widths) == [256, 512, 1024]
    assert not out[0].any()


@pytest.mark.parametrize(
    "sizes", [{"side": 0}, {"side": True}, {"target": -5}, {"least_rows": 1.5}, {"rows": 3}]
)
def test_sizes_are_checked(sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SIZES", sizes)
    x = jnp.ones((1, 5, 2, 3))
    with pytest.raises(
        ValueError, match=rf"blocked.SIZES\['{next(iter(sizes))}'\] = .* at least 1"
    ):
        jaxmha.dot_product_attention(x, x, x, is_causal=True, implementation="blocked", scale=0.7)


@pytest.mark.parametrize(
    ("implementation", "platform"), [("blocked", "tpu"), (("splash", "blocked"), "cpu")]
)
def test_tiles_are_those_of_the_platform_that_is_named(
    implementation: Any, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of the gradient, traced later; next to a kernel, where that does not run."""
    found = []

    def choose(*sizes: int, **more: Any) -> Tiling:
        found.append((more["platform"], more.get("gradient", False)))
        return choose_tiling(*sizes, **more)

    monkeypatch.setattr(tiling, "choose_tiling", choose)
    x = jnp.ones((1, 1024, 2, 64), jnp.bfloat16)

    def attend(x: Any) -> Any:
        return jaxmha.dot_product_attention(
            x, x, x, is_causal=True, local_window_size=3, implementation=implementation
        )

    with jaxmha.lowering_for("tpu"):
        _, pull = jax.vjp(attend, x)
        pull(x)
    pull(x)
    assert set(found) == {(platform, False), (platform, True)}


def test_the_small_case_has_groups_and_an_empty_row() -> None:
    assert SMALL.G > 1
    assert SMALL.empty_rows
