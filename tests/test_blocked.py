"""The blocked implementation with blocks so small that bands, tiles and carries are exercised."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask
from jaxmha.implementations.tiled import attention, block_mask, dropout, layout, loop, schedule
from tests import cases, conformance, reference, tolerance
from tests.cases import CASES, POISONED, SMALL, Case, shaped
from tests.drawn import to_jax

BY_NAME = {case.name: case for case in CASES}
# One row and one key of one head; three keys; and two of four heads with four keys of `several`. T
# and S are no multiples of them.
TINY = (
    {"target": 1, "least_rows": 1, "side": 1},
    conformance.TWO_ROWS,
    {"target": 2 * 4 * 2 * 2 * 4, "least_rows": 1, "side": 4},
)


@pytest.fixture(
    params=[pytest.param(TINY[0], marks=pytest.mark.slow), TINY[1]], ids=["one_row", "two_rows"]
)
def tiny(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    return conformance.tiled(request.node.name, request.param, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["empty_mean_lengths", "everything"])
def test_values(name: str, tiny: str) -> None:
    conformance.values(BY_NAME[name], tiny, "float32", jit=True)


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


@pytest.mark.everyday(case=["all"])
@pytest.mark.parametrize("tiny", TINY[2:], indirect=True, ids=["two_heads"])
@pytest.mark.parametrize("case", SEVERAL)
def test_every_gradient_over_several_tiles(
    case: Case, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every entry, not of a few, against those of the reference in float64."""
    plans = conformance.tilings_of_gradients(monkeypatch)
    conformance.kernel(case, tiny, "float32", lse=case.fully_masked == "zero")
    (plan,) = plans
    assert plan.query_tiles > 1
    assert plan.steps > 1
    if case.name != "no condition":
        assert plan.kv_tiles > 1
        assert plan.heads > 1


def test_poison(tiny: str) -> None:
    conformance.poisoned_padding(POISONED[-1], tiny, "float32")


@pytest.mark.parametrize("implementation", ["reference", "blocked", "native"])
@pytest.mark.parametrize("excludes", ["causality", "-inf"])
def test_a_bias_keeps_keys_out_of_rows_that_exclude_them(
    excludes: str, implementation: str
) -> None:
    """NaN of a key reaches the rows that attend it alone: its logit is not added to -inf."""
    case = replace(BY_NAME["bias_per_head"], is_causal=excludes == "causality")
    arrays = cases.arrays(case, "float32")
    T, S, key = case.T, case.S, 3
    attends = np.arange(T) >= key
    if excludes == "-inf":
        bias = np.broadcast_to(np.asarray(arrays["bias"]), (1, case.N, T, S)).copy()
        bias[..., ~attends, key] = -np.inf
        arrays["bias"] = bias
    spoiled = {**arrays, "key": np.array(arrays["key"])}
    spoiled["key"][:, key] = np.nan
    call: Any = partial(jaxmha.dot_product_attention, **case.options, implementation=implementation)
    if dict(jaxmha.explain(**arrays, **case.options, implementation=implementation).reasons)[
        implementation
    ]:
        pytest.skip(f"{implementation} does not take the call here")
    clean, found = (np.asarray(call(**given)) for given in (arrays, spoiled))
    np.testing.assert_array_equal(np.isnan(found).any((0, 2, 3)), attends)
    tolerance.assert_close(found[:, ~attends], clean[:, ~attends])


@pytest.mark.parametrize("bias", [pytest.param(None, marks=pytest.mark.slow), "1NTS"])
def test_a_cotangent_reaches_the_keys_of_its_row_alone(bias: str | None) -> None:
    """NaN in the cotangent of row 2 of a causal call leaves the gradients of later keys as they are."""
    case = Case("causal", T=7, S=7, K=2, bias=bias, is_causal=True)
    arrays = {name: to_jax(x) for name, x in cases.arrays(case, "float32").items()}

    def attend(key: jax.Array) -> jax.Array:
        call: Any = partial(jaxmha.dot_product_attention, is_causal=True)
        found: jax.Array = call(**arrays | {"key": key}, implementation="blocked")
        return found

    out, pull = jax.vjp(attend, arrays["key"])
    rows = (np.arange(7) == 2)[:, None, None]
    found, want = (
        np.asarray(pull(np.where(rows, x, np.ones(out.shape, "f")))[0]) for x in (np.nan, 0.0)
    )
    assert np.isnan(found).any((0, 2, 3)).tolist() == [True] * 3 + [False] * 4
    tolerance.assert_close(found[:, 3:], want[:, 3:])


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


@pytest.mark.parametrize("gradient", [pytest.param(False, marks=pytest.mark.slow), True])
def test_scores_are_never_materialised(*, gradient: bool) -> None:
    x = shaped(1, 4096, 4, 16, dtype="float32")

    def of(q: Any, k: Any, v: Any) -> Any:
        return jaxmha.dot_product_attention(q, k, v, is_causal=True, implementation="blocked").sum()

    program = jax.jit(jax.grad(of, (0, 1, 2)) if gradient else of)
    memory: Any = program.lower(x, x, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 4096 * 4096 * 4 / 2


@pytest.mark.slow_variants("*", "!key-*-False", "!*-jvp-True")
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("mode", ["jvp", "jacfwd", "linearize"])
@pytest.mark.parametrize("argument", ["key", "bias", "captured"])
def test_forward_mode_names_the_remedy(argument: str, mode: str, *, jitted: bool) -> None:
    query, key = jnp.ones((1, 5, 2, 3)), jnp.ones((1, 7, 2, 3))
    given = {"key": key, "bias": jnp.ones((5, 7)), "captured": jnp.ones(2)}[argument]

    def of(x: Any) -> Any:
        return jaxmha.dot_product_attention(
            query, x if argument == "key" else key, key, x if argument == "bias" else None,
            score_mod=(lambda score, b, n, i, j: score * x[n]) if argument == "captured" else None,
            implementation="blocked",
        )  # fmt: skip

    def run(x: Any) -> Any:
        if mode == "jvp":
            return jax.jvp(of, (x,), (x,))
        return jax.jacfwd(of)(x) if mode == "jacfwd" else jax.linearize(of, x)[1](x)

    with pytest.raises(TypeError, match='implementation="reference", or "few_queries" where'):
        (jax.jit(run) if jitted else run)(given)


def test_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reverse mode names the remedy, forward mode over a gradient works."""
    monkeypatch.setattr(attention, "SIZES", {"side": 4, "least_rows": 4, "target": 1})
    x = np.random.default_rng(0).normal(size=(1, 7, 1, 3)).astype("f")

    def of(implementation: str, x: Any) -> Any:
        options: dict[str, Any] = {"is_causal": True, "implementation": implementation}
        return (jaxmha.dot_product_attention(x, x, x, **options) ** 2).sum()

    def gradient(implementation: str) -> Any:
        return jax.grad(partial(of, implementation))

    with pytest.raises(ValueError, match='implementation="reference", or "native" where'):
        jax.jit(jax.grad(lambda x: gradient("blocked")(x).sum()))(x)
    found = jax.jit(lambda x: jax.jvp(gradient("blocked"), (x,), (x,))[1])(x)
    want = jax.jit(lambda x: jax.vjp(gradient("reference"), x)[1](x)[0])(x)
    tolerance.assert_close(found, np.asarray(want), factor=tolerance.BACKWARD)


@pytest.mark.slow_variants("*", "!grad of jvp-query", "!grad of jvp-key", "!vmap-key")
@pytest.mark.parametrize("argument", ["query", "key", "bias", "lengths", "dropout_key"])
@pytest.mark.parametrize("how", ["grad of jvp", "grad of hvp", "vmap", "scan"])
def test_compositions_with_forward_mode_name_the_remedy(how: str, argument: str) -> None:
    """Also where they differentiate or batch another argument than the one of `jax.jvp`."""
    query, key = jnp.ones((1, 5, 2, 3)), jnp.ones((1, 7, 2, 3))
    given = {
        "query": query,
        "key": key,
        "bias": jnp.ones((1, 1, 5, 7)),
        "lengths": jnp.ones(1, np.int32),
        "dropout_key": jax.random.key(0),
    }[argument]
    if how != "vmap" and argument in ("lengths", "dropout_key"):
        pytest.skip("has no gradient")

    def product(other: Any) -> jax.Array:
        def of(query: Any) -> jax.Array:
            out: jax.Array = jaxmha.dot_product_attention(
                other if argument == "query" else query,
                other if argument == "key" else key,
                key + query[:, :1],
                bias=other if argument == "bias" else None,
                key_value_seq_lengths=other if argument == "lengths" else None,
                dropout_rate=0.5 if argument == "dropout_key" else 0.0,
                dropout_key=other if argument == "dropout_key" else None,
                implementation="blocked",
            )
            return out.sum()

        tangent: jax.Array = jax.jvp(of, (query,), (query,))[1]
        return tangent

    def scanned(other: Any) -> Any:
        return jax.lax.map(lambda factor: factor * product(other), jnp.ones(2)).sum()

    run: Callable[[Any], Any] = {
        "grad of jvp": jax.grad(product),
        "grad of hvp": jax.grad(lambda x: jax.grad(product)(x).sum()),
        "vmap": lambda x: jax.vmap(jax.jit(product))(x[None]),
        "scan": jax.grad(scanned),
    }[how]
    with pytest.raises(TypeError, match='implementation="reference", or "few_queries" where'):
        run(given)


@pytest.mark.slow_variants("two_rows")
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
    x = shaped(1, 5, 2, 3, dtype="float32")
    both = ("blocked", "reference")
    found = jaxmha.explain(x, x, x, return_weights=True, implementation=both, platform="cpu")
    assert found.chosen == "reference"
    assert found.reasons[0][0] == "blocked"
    assert "return_weights" in str(found)
    assert jaxmha.explain(x, x, x, implementation=both).chosen == "blocked"
    none = jaxmha.explain(x, x, x, softmax_dtype="bfloat16", implementation="blocked")
    assert none.chosen is None
    lengths = shaped(1, dtype="int32")
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


@pytest.mark.slow_variants("*", "!chunks-two_rows")
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


def test_the_small_case_has_groups_and_an_empty_row() -> None:
    assert SMALL.G > 1
    assert SMALL.empty_rows
