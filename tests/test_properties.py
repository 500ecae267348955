"""Random masks, biases, lengths and poison: nothing that may not be attended leaves a trace."""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import jaxmha
from jaxmha import Mask, MHAParams, Projection
from tests import conformance

pytestmark = pytest.mark.usefixtures("every_size")

SEED = int(os.environ["JAXMHA_PROPERTY_SEED"])  # conftest draws and prints it
B, K, G, H, D = 2, 1, 2, 3, 5
N = K * G
SIZES = ((4, 5), (5, 1), (1, 1), (3, 0), (0, 5))  # T, S; every run draws the first two
POISON = (np.nan, np.inf, -np.inf)
SHAPES = (((D, N, H), (N, H)), ((D, K, H), (K, H)), ((D, K, H), (K, H)), ((N, H, D), (D,)))
PARAMS = MHAParams(
    *[  # type: ignore[arg-type]
        Projection(*(np.random.default_rng(i).standard_normal(s).astype(np.float32) for s in pair))
        for i, pair in enumerate(SHAPES)
    ]
)
DRAWS: dict[str, st.SearchStrategy[Any]] = {
    "number": st.integers(0, 2**32 - 1),
    "density": st.sampled_from((0.0, 0.3, 0.7, 1.0)),
    "excluded": st.sampled_from((0.0, 0.4, 1.0)),
    "structure": st.lists(st.sampled_from(("causal", "lengths", "padding", "segments"))),
}


class Draw:
    """Arrays of one example; conditions that are not drawn exclude nothing."""

    def __init__(
        self,
        sizes: tuple[int, int],
        number: int,
        density: float,
        excluded: float,
        structure: list[str],
    ) -> None:
        rng = np.random.default_rng(number)
        self.rng, (self.T, self.S) = rng, sizes
        T, S = sizes
        bias = rng.standard_normal((B, N, T, S)).astype(np.float32)
        bias[rng.random(bias.shape) < excluded] = -np.inf

        def ids(size: int) -> Any:
            return rng.integers(0, 2 if "segments" in structure else 1, (B, size))

        offsets = rng.integers(-2, 3, B) if "causal" in structure else np.full(B, S)
        valid = rng.random((B, S)) < (0.6 if "padding" in structure else 1.1)
        lengths = rng.integers(0, S + 1, B) if "lengths" in structure else np.full(B, S)
        self.bias = bias
        self.mask = (
            Mask.causal(offsets.astype(np.int32))
            & Mask.lengths(key_value=lengths.astype(np.int32))
            & Mask.padding(key_value=valid)
            & Mask.segments(
                query_ids=ids(T).astype(np.int32), key_value_ids=ids(S).astype(np.int32)
            )
            & Mask.dense(rng.random((B, N, T, S)) < density)
        )
        allowed = self.mask.to_array(T, S, np) & (bias != -np.inf)
        self.dead: Any = ~np.broadcast_to(allowed, (B, N, T, S)).any((1, 2))  # B S

    def normal(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape).astype(np.float32)

    def poisoned(self, array: Any) -> Any:
        """The array with something that is not a number in every dead key."""
        spoiled = array.copy()
        spoiled[self.dead] = self.rng.choice(POISON, spoiled[self.dead].shape)
        return spoiled


@cache
def attention(implementation: str) -> Any:
    def run(arrays: dict[str, Any], mask: Mask, weight: Any) -> Any:
        out, lse = jaxmha.dot_product_attention(
            **arrays, mask=mask, return_lse=True, implementation=implementation
        )
        finite = jnp.where(lse == -jnp.inf, 0.0, lse)  # an empty row has no logits
        return (out * weight).sum() + finite.sum(), out

    return conformance.both(run, has_aux=True)


@cache
def layer(implementation: str) -> Any:
    def run(arrays: dict[str, Any], params: MHAParams, mask: Mask, weight: Any) -> Any:
        out = jaxmha.multi_head_attention(
            params, **arrays, mask=mask, implementation=implementation
        )
        return (out * weight).sum(), out

    return conformance.both(run, (0, 1), has_aux=True)


def check_attention(implementation: str, **drawn: Any) -> None:
    draw = Draw(**drawn)
    arrays = {
        "query": draw.normal(B, draw.T, N, H),
        "key": draw.normal(B, draw.S, K, H),
        "value": draw.normal(B, draw.S, K, H),
        "bias": draw.bias,
    }
    weight = draw.normal(B, draw.T, N, H)
    spoiled = {k: draw.poisoned(x) if k in ("key", "value") else x for k, x in arrays.items()}
    same(*(attention(implementation)(x, draw.mask, weight) for x in (arrays, spoiled)))


def check_layer(implementation: str, **drawn: Any) -> None:
    draw = Draw(**drawn)
    arrays = {
        "query": draw.normal(B, draw.T, D),
        "key": draw.normal(B, draw.S, D),
        "value": draw.normal(B, draw.S, D),
        "bias": draw.bias,
    }
    weight = draw.normal(B, draw.T, D)
    spoiled = {k: draw.poisoned(x) if k in ("key", "value") else x for k, x in arrays.items()}
    same(*(layer(implementation)(x, PARAMS, draw.mask, weight) for x in (arrays, spoiled)))


def same(clean: Any, spoiled: Any) -> None:
    """Outputs and gradients are finite, and poison changed no bit of them."""
    chex.assert_tree_all_finite(clean)
    chex.assert_trees_all_equal(clean, spoiled, strict=True)


@pytest.mark.slow_variants("*check_layer*")
@pytest.mark.everyday(implementation=["blocked"])
@pytest.mark.slow_variants("*few_queries*")
@pytest.mark.parametrize("count", [40, pytest.param(2500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", [check_attention, check_layer])
@conformance.by_implementation
def test_poison_leaves_no_trace(
    implementation: str, check: Callable[..., None], count: int
) -> None:
    @seed(SEED)
    @settings(max_examples=count, deadline=None, database=None)
    @given(sizes=st.sampled_from(SIZES[:2] if count == 40 else SIZES), **DRAWS)
    def holds(**drawn: Any) -> None:
        check(implementation, **drawn)

    holds()


def test_poison_where_it_is_attended_is_seen() -> None:
    """The check can fail: a key that is attended does change the output."""
    drawn: Any = {
        "sizes": (4, 5), "number": 0, "density": 1.0, "excluded": 0.0, "structure": []
    }  # fmt: skip
    draw = Draw(**drawn)
    assert not draw.dead.any()
    draw.dead[:, 2] = True
    key = draw.poisoned(draw.normal(B, 5, K, H))
    arrays = {"query": draw.normal(B, 4, N, H), "key": key, "value": key, "bias": draw.bias}
    output = attention("blocked")(arrays, draw.mask, draw.normal(B, 4, N, H))
    with pytest.raises(AssertionError):
        same(output, output)
