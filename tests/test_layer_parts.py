"""Projections, and what is left of a layer after attention, on their own."""

from typing import Any

import chex
import jax
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask, MHAParams, Projection
from jaxmha.implementations.tiled.attended import attended_positions
from tests import layer_cases, reference, tolerance
from tests.layer_cases import LayerCase
from tests.test_layer import BY_NAME, call, mask_of, params_of, semantics_of


@pytest.mark.everyday(name=("structure", "cross_two_batch_axes"))
@pytest.mark.slow_variants("structure")
@pytest.mark.parametrize("name", ["structure", "norm_layer", "no_out", "cross_two_batch_axes"])
def test_is_combine_of_attention_of_project(name: str) -> None:
    case = BY_NAME[name]
    leaves, inputs, others = layer_cases.layer_arrays(case)
    params, semantics = params_of(leaves), semantics_of(case)
    query, key, value = flat(case, jaxmha.project(params, **inputs, semantics=semantics))
    bias = others.get("bias")
    heads = jaxmha.dot_product_attention(
        query,
        key,
        value,
        None if bias is None else bias.reshape(-1, *bias.shape[-3:]),
        flat_mask(case, others),
        is_causal=case.is_causal,
    )
    heads = heads.reshape(*case.batch, *heads.shape[1:])
    out = jaxmha.combine(params, heads, semantics=semantics)
    tolerance.assert_close(call(case)(leaves, inputs, others), np.asarray(out), factor=0.25)


def flat(case: LayerCase, heads: Any) -> Any:
    return tuple(x.reshape(-1, *x.shape[-3:]) for x in heads)


def flat_mask(case: LayerCase, others: dict[str, Any]) -> Any:
    if len(case.batch) == 1:
        return mask_of(others)
    return others["mask"].reshape(-1, *others["mask"].shape[-3:])


@pytest.mark.parametrize("name", ["plain", "norm_layer", "norm_rms"])
def test_project_and_combine(name: str) -> None:
    case = BY_NAME[name]
    leaves, inputs, _ = layer_cases.layer_arrays(case)
    params, semantics = params_of(leaves), semantics_of(case)
    want = reference.project(params, inputs["query"], inputs["key"], inputs["value"], semantics)
    for x, y in zip(jaxmha.project(params, **inputs, semantics=semantics), want, strict=True):
        tolerance.assert_close(x, y)
    heads = np.random.default_rng(4).standard_normal((2, 5, case.N, case.h)).astype(np.float32)
    tolerance.assert_close(jaxmha.combine(params, heads), reference.combine(params, heads))


def test_project_defaults() -> None:
    """Key defaults to query, and value to key."""
    for name, count in (("self_unbatched", 1), ("cross_two_batch_axes", 2)):
        leaves, inputs, _ = layer_cases.layer_arrays(BY_NAME[name])
        given = list(inputs.values())
        full = given + [given[-1]] * (3 - count)
        params = params_of(leaves)
        jax.tree.map(
            tolerance.assert_same, jaxmha.project(params, *given), jaxmha.project(params, *full)
        )


def test_gates_of_rows_that_attend_nothing() -> None:
    """Under `mean` their output is the mean of the values, times their own gates."""
    rng = np.random.default_rng(0)
    params, x = cases_params(rng)
    mask = np.ones((4, 4), bool)
    mask[1] = False
    semantics = jaxmha.Semantics(fully_masked="mean")
    q, k, v = jaxmha.project(params, x)
    heads = jaxmha.dot_product_attention(q, k, v, mask=mask, fully_masked="mean")
    want = jaxmha.combine(params, heads, semantics=semantics, query=x)
    found = jaxmha.multi_head_attention(params, x, mask=mask, semantics=semantics)
    tolerance.assert_close(found, np.asarray(want, np.float64), factor=tolerance.LAYER)


@pytest.mark.parametrize("policy", ["zero", "nan"])
def test_gates_of_rows_that_attend_nothing_are_not_read(policy: Any) -> None:
    """Their features may hold NaN, which reaches no other row and no gradient."""
    params, x = cases_params(np.random.default_rng(0))
    mask = np.ones((4, 4), bool)
    mask[:, 3] = mask[3] = False
    semantics = jaxmha.Semantics(fully_masked=policy)

    @jax.jit
    def gradients(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            out = jaxmha.multi_head_attention(params, x, mask=mask, semantics=semantics)
            return (out[:, :3] ** 2).sum()

        return jax.value_and_grad(loss)(params)

    spoiled = x.copy()
    spoiled[0, 3] = np.nan
    chex.assert_trees_all_equal(gradients(params, spoiled), gradients(params, x), strict=True)


def test_positions_that_one_head_attends() -> None:
    mask = np.zeros((1, 2, 5, 7), bool)
    mask[0, 0, 1, 2] = mask[0, 1, 3, 4] = True
    found = attended_positions(Mask(array=mask), None, 3, 2, 5, 7)
    assert [np.argwhere(x)[:, 1].tolist() for x in found if x is not None] == [[1, 3], [2, 4]]


def test_sinks_override_the_policy() -> None:
    """A fully masked row attends its sink: NaN in it reaches no gradient, and a cache agrees."""
    rng = np.random.default_rng(0)
    params, x = cases_params(rng)
    params = params._replace(gate=None, sinks=np.full(2, -np.inf, np.float32))
    x[0, 3] = np.nan
    mask = np.ones((4, 4), bool)
    mask[:, 3] = mask[3] = False
    semantics = jaxmha.Semantics(fully_masked="mean")

    def loss(params: Any) -> Any:
        out = jaxmha.multi_head_attention(params, x, mask=mask, semantics=semantics)
        return (out**2).sum()

    assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.jit(jax.grad(loss))(params)))
    cache = jaxmha.KVCache.empty(params, 1, 4)
    nothing = np.zeros((4, 4), bool)
    out, _ = jaxmha.extend(params, np.ones_like(x), cache, mask=nothing, semantics=semantics)
    assert (np.asarray(out) == 0).all()


@pytest.mark.slow_variants("layer-*")
@pytest.mark.parametrize(("norm", "epsilon"), [("rms", 0.0), ("layer", 1e-30)])
def test_norms_of_positions_that_nothing_attends(norm: Any, epsilon: float) -> None:
    """They are zeroed, and zeros have no direction: a tiny epsilon divides 0 by 0."""
    params, x = cases_params(np.random.default_rng(0))
    mask = Mask.lengths(key_value=np.asarray([3]))

    def gradients(x: Any, epsilon: float, mask: Mask) -> Any:
        semantics = jaxmha.Semantics(
            qk_norm=norm, qk_norm_epsilon=epsilon, qk_norm_learned=False
        )  # fmt: skip

        def loss(params: Any) -> Any:
            out = jaxmha.multi_head_attention(params, x[:, :3], x, mask=mask, semantics=semantics)
            return (out**2).sum()

        return jax.jit(jax.grad(loss))(params)

    found, want = gradients(x, epsilon, mask), gradients(x[:, :3], 1e-12, Mask())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def cases_params(rng: np.random.Generator) -> tuple[MHAParams, Any]:
    """A layer of 2 heads with a gate, and inputs `1 4 6`."""

    def projection(*shape: int) -> Projection:
        return Projection(rng.normal(size=shape).astype(np.float32))

    query, key, value, gate = (projection(6, 2, 3) for _ in range(4))
    params = MHAParams(query, key, value, projection(2, 3, 6), gate=gate)
    return params, rng.normal(size=(1, 4, 6)).astype(np.float32)


def test_params_are_a_pytree() -> None:
    leaves, _, _ = layer_cases.layer_arrays(BY_NAME["both_extras"])
    params = params_of(leaves)
    assert len(jax.tree.leaves(params)) == len(leaves)
    doubled = jax.tree.map(lambda x: x * 2, params)
    assert isinstance(doubled, MHAParams)
    tolerance.assert_same(doubled.query.kernel, leaves["query.kernel"] * 2)
