"""Heads against one head: what its page says holds in float64 on small sizes of different primes."""

import copy
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from scipy import special  # type: ignore[import-untyped]

import jaxmha
from experiments import records
from experiments.heads import __main__ as command
from experiments.heads import cases, measure, script
from experiments.heads.cases import Case
from experiments.pages import Page
from experiments.train import seeds, variants
from experiments.train.training import Trainer
from tests import derivation
from tests.promotion import foreign
from tests.test_train import BOTH, TINY
from tests.tolerance import assert_close

h, E, T, S = 3, 21, 5, 11  # heads are 7 wide

page = Page("heads/page.md")


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    """The committed results."""
    return records.load(command.EXPERIMENT.path)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("index", range(10), ids=[case.name for case in cases.cases(h, E, T, S)])
def test_constructed_cases(index: int, seed: int) -> None:
    """Weights of every head are those of the one head exactly where outputs are equal."""
    case = list(cases.cases(h, E, T, S, seed))[index]
    found = cases.outcome(case, h)
    if case.equal:
        assert found["output"] < 1e-14
        assert found["weights"] < 1e-14
    else:
        assert found["output"] > 0.05
        assert found["weights"] > 0.05


def test_the_scale_is_needed() -> None:
    """One block in all heads with Wq divided by h, not by sqrt(h), is seen to differ."""
    case = next(c for c in cases.cases(h, E, T, S) if c.name.startswith("one block"))
    wq, wk, wv = case.single
    wrong: Case = case._replace(single=(wq / h**0.5, wk, wv))
    assert cases.outcome(wrong, h)["output"] > 0.05


def test_products_of_heads_add_up_and_ranks_end_at_the_width() -> None:
    matrices, x = measure.drawn(0, E, 2, 13)
    alone, many = (measure.exact(matrices, x, n) for n in (1, h))
    assert measure.sum_of_logits(alone.logits, many.logits, E) < 1e-14
    assert measure.sum_of_logits(alone.logits, many.logits[:, :2], E) > 0.1
    assert measure.rank(alone.logits) == [13, 13]
    assert measure.rank(many.logits) == [7, 7]
    assert measure.rank(many.probabilities) == [13, 13]
    assert measure.distance(alone.output, many.output) > 0.1


def test_gradients_are_differences_of_the_oracle() -> None:
    matrices, x = measure.drawn(0, E, 2, T)
    rng = np.random.default_rng(1)
    cotangent, steps = rng.normal(size=x.shape), [1e-5 * rng.normal(size=(E, E)) for _ in range(3)]
    found = measure.gradients(matrices, x, h, cotangent)
    for i in range(3):
        ends = []
        for sign in (1, -1):
            moved = [m + sign * steps[i] * (j == i) for j, m in enumerate(matrices)]
            ends.append(
                (measure.exact((moved[0], moved[1], moved[2]), x, h).output * cotangent).sum()
            )
        np.testing.assert_allclose((found[i] * steps[i]).sum(), (ends[0] - ends[1]) / 2, rtol=1e-6)


def test_the_script_s_layer_is_the_layer() -> None:
    matrices, x = measure.drawn(0, E, 2, T)
    weights = [torch.from_numpy(matrix) for matrix in matrices]
    for n in (1, h):
        exact = measure.exact(matrices, x, n)
        out, logits = script.attend(torch.from_numpy(x), weights, n)
        assert_close(out.numpy(), exact.output, "output")
        assert_close(logits.numpy(), exact.logits, "logits")


def test_view_after_transpose_raises_as_the_page_says() -> None:
    heads = torch.zeros(2, h, T, 7)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        heads.transpose(1, 2).view(2, T, E)
    assert heads.transpose(1, 2).reshape(2, T, E).shape == (2, T, E)


def test_true_is_printed_where_all_heads_choose_one_key() -> None:
    found = list(script.run("uniform on [0, 1)", 2))
    assert [seed.equal for seed in found] == [False, True]
    for seed in found:
        assert seed.equal == (seed.same_key == 1) == (seed.difference == 0)
        assert seed.query_gradient == 0
        assert seed.largest_logit > 1e5
    other = next(script.run("Xavier-uniform", 1))
    assert not other.equal
    assert other.same_key < 1
    assert other.query_gradient > 0


@pytest.mark.slow
def test_models_start_from_the_same_weights() -> None:
    with foreign():
        one, many = (Trainer(replace(TINY, N=n), BOTH).state[0] for n in (1, 3))
    flat = [[np.ravel(leaf) for leaf in jax.tree.leaves(state)] for state in (one, many)]
    assert len(flat[0]) > 10
    for a, b in zip(*flat, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_several_seeds_train_as_each_alone() -> None:
    settings = replace(TINY, dropout=0.0, steps=10)
    begun = []
    with foreign():
        found = seeds.train(
            settings, BOTH, [1, 2], window=5, begin=lambda model, seed: begun.append(seed)
        )
        alone = Trainer(replace(settings, seed=2), BOTH)
        losses = [alone.step() for _ in range(10)]
        alone.evaluate()
    assert begun == [1, 2]
    expected = [np.mean(losses[:5]), np.mean(losses[5:])]
    np.testing.assert_allclose(found["loss"][1], expected, atol=1e-4)
    np.testing.assert_allclose(found["accuracy"][1], alone.curve.accuracy[-1], atol=1e-4)
    assert found["loss"][0] != found["loss"][1]


def test_words_about_training_follow_the_numbers() -> None:
    runs: dict[str, Any] = {
        "a": {
            "loss": [[2.0, 1.0], [2.0, 1.2]],
            "held_out_loss": [1.0, 2.0],
            "accuracy": [0.5, 0.6],
        },
        "b": {
            "loss": [[2.0, 1.0], [2.0, 1.0]],
            "held_out_loss": [1.0, 1.0],
            "accuracy": [0.7, 0.7],
        },
    }
    assert variants.rows("kind", runs)[2][1:] == (
        "1.000 ± 0.000", "1.000 ± 0.000", "70.0 ± 0.0", "2 of 2",
    )  # fmt: skip
    assert "b: +15.0 ± 7.1 points" in variants.furthest(runs)
    assert "agree on the sign for b (+15.0)." in variants.furthest(runs)
    assert "55.0 ± 7.1 % (a) to 70.0 ± 0.0 % (b)" in variants.extremes(runs)
    runs["b"]["accuracy"] = [0.4, 0.9]
    assert "agree on the sign for no variant." in variants.furthest(runs)


def test_the_stored_results_say_what_the_page_says(stored: dict[str, Any]) -> None:
    seeds_of_script = next(iter(stored["script"].values()))
    assert len(seeds_of_script) == 40
    assert all(seed["equal"] == (seed["same_key"] == 1) for seed in seeds_of_script)
    assert all(of["sum_of_logits"] < 1e-14 for seed in stored["layers"] for of in seed)
    assert all((case["output"] < 1e-13) == case["equal"] for case in stored["cases"])


def test_numbers_of_the_page_come_from_the_results(stored: dict[str, Any]) -> None:
    other = copy.deepcopy(stored)
    for i, seed in enumerate(next(iter(other["script"].values()))):
        seed.update(equal=i > 0, difference=0.0 if i else 0.5)
    assert "39 of 40 seeds" in page.conclusion(other)
    assert "up to 50 %" in page.text(other)
    assert page.conclusion(other) != page.conclusion(stored)


def test_gradients_are_compared_by_their_numbers(stored: dict[str, Any]) -> None:
    assert "gradients differ at least as much for Wq and Wk, less for Wv," in page.text(stored)
    found = copy.deepcopy(stored)
    for seed in found["layers"]:
        for record in seed:
            record["gradients"][2] = 9.0
    assert "gradients differ at least as much for Wq and Wk and Wv," in page.text(found)


def _layer(wq: Any, wk: Any, wv: Any, wo: Any, heads: int) -> jaxmha.MHAParams:
    params = measure.split((wq, wk, wv), heads)
    if wo is None:
        return params
    return params._replace(out=jaxmha.Projection(wo.reshape(heads, -1, wo.shape[1])))


@pytest.mark.slow_variants("*", "!3-True")
@pytest.mark.parametrize(("heads", "projected"), [(1, True), (h, True), (h, False)])
def test_the_derived_gradients_are_those_of_jax(heads: int, projected: bool) -> None:
    """With the shared output projection, and with none, which is the identity."""
    rng = np.random.default_rng(heads)
    (wq, wk, wv), x = measure.drawn(2, E, 1, T)
    wo = rng.normal(size=(E, E)) if projected else np.eye(E)
    cotangent = rng.normal(size=(T, E))
    found = derivation.by_hand(x[0], wq, wk, wv, wo, heads, cotangent)

    def loss(params: Any) -> Any:
        return (jaxmha.multi_head_attention(params, x)[0] * cotangent).sum()

    with jax.enable_x64(True):
        exact = jax.grad(loss)(_layer(wq, wk, wv, wo if projected else None, heads))
    for name, projection in zip(("Wq", "Wk", "Wv"), exact[:3], strict=True):
        own = np.asarray(projection.kernel).reshape(E, E)
        np.testing.assert_allclose(getattr(found, name), own, rtol=0, atol=1e-12, err_msg=name)
    if projected:
        own = np.asarray(exact.out.kernel).reshape(E, E)
        np.testing.assert_allclose(found.Wo, own, rtol=0, atol=1e-12)


def test_heads_meet_only_through_the_loss() -> None:
    """A cotangent of one head's columns reaches no other head's Wq, and all of one wide head's."""
    (wq, wk, wv), x = measure.drawn(3, E, 1, T)
    cotangent = np.random.default_rng(0).normal(size=(T, E))
    cotangent[:, E // h :] = 0  # of the first head alone
    many, one = (derivation.by_hand(x[0], wq, wk, wv, np.eye(E), n, cotangent) for n in (h, 1))
    for name in ("Wq", "Wk", "Wv"):
        assert not getattr(many, name)[:, E // h :].any()
    assert (one.Wq[:, E // h :] != 0).all()
    assert (one.Wk[:, E // h :] != 0).all()
    assert not one.Wv[:, E // h :].any()


def test_a_head_without_output_rows_learns_nothing_until_it_has_some() -> None:
    (wq, wk, wv), x = measure.drawn(4, E, 1, T)
    rng = np.random.default_rng(0)
    wo, cotangent = rng.normal(size=(E, E)), rng.normal(size=(T, E))
    wo[: E // h] = 0
    found = derivation.by_hand(x[0], wq, wk, wv, wo, h, cotangent)
    assert not any(getattr(found, name)[:, : E // h].any() for name in ("Wq", "Wk", "Wv"))
    assert found.Wo[: E // h].all()


def test_the_jacobian_is_that_of_the_softmax() -> None:
    rng = np.random.default_rng(0)
    logits, dp = rng.normal(size=(T, S)), rng.normal(size=(T, S))
    p = special.softmax(logits, axis=-1)
    rows = [(np.diag(row) - np.outer(row, row)) @ d for row, d in zip(p, dp, strict=True)]
    np.testing.assert_allclose(derivation.through_softmax(p, dp), rows, rtol=0, atol=1e-15)
    with jax.enable_x64(True):
        _, back = jax.vjp(jax.nn.softmax, logits)
        np.testing.assert_allclose(back(dp)[0], rows, rtol=0, atol=1e-15)


def test_the_page_has_the_derivation(stored: dict[str, Any]) -> None:
    shown = page.text(stored)
    assert "(diag(p) − p pᵀ)" in shown
    assert "8 heads of 64" in shown
