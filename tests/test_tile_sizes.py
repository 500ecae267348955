"""Sizes of tiles: their choice, the loops over them, and long rows under the rule itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmha
from jaxmha.implementations.tiled import attention, tiling
from jaxmha.implementations.tiled.tiling import Tiling, choose_tiling
from tests import cases, conformance, jit_cache, tolerance
from tests.cases import Case


def test_sizes_of_one_call_are_those_of_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have changed when the gradient is traced."""
    plans = conformance.tilings_of_gradients(monkeypatch)
    query, key = jnp.ones((1, 3, 1, 2)), jnp.ones((1, 11, 1, 2))

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


def long_case(**changes: Any) -> tuple[Case, dict[str, Any]]:
    """Enough rows for several bands under the rule itself, and no multiple of anything."""
    case = Case("long", B=1, T=523, S=541, K=1, G=2, H=7, h=5, **changes)
    return case, cases.arrays(case, "float32")


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_few_steps_are_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("steps", B=1, T=5, S=7, K=3, G=2, H=7, h=11)
    arrays = cases.arrays(case, "float32")
    conformance.tune(monkeypatch, small_head_bytes=0, heads_bytes=1)
    want = np.asarray(conformance.call(case, "reference")(arrays))
    for bytes_, loops in ((2**24, False), (0, True)):
        conformance.tune(monkeypatch, unroll_bytes=bytes_)
        jit_cache.forget()
        of = jax.jit(conformance.call(case, "blocked"))
        tolerance.assert_close(of(arrays), want)
        assert ("while" in of.lower(arrays).as_text()) == loops
        grad = jax.jit(jax.value_and_grad(lambda x, of=of: of(x).sum()))
        assert "while" in grad.lower(arrays).as_text()


@pytest.mark.slow
def test_few_blocks_of_rows_are_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("rows", B=2, T=5, S=7, K=3, G=2, H=7, h=11, is_causal=True, mask="BNTS")
    arrays = cases.arrays(case, "float32")
    monkeypatch.setattr(attention, "SIZES", {"side": 2, "least_rows": 2})
    want = np.asarray(conformance.call(case, "reference")(arrays))
    loops = []
    for most in (5, 0):
        conformance.tune(monkeypatch, unroll_query_tiles=most)
        jit_cache.forget()
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


@pytest.mark.slow_variants("implementation1-cpu")
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
