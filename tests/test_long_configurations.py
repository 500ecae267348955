"""Many blocks under every configuration of integers and of promotion."""

from collections.abc import Iterator
from typing import Any

import chex
import jax
import numpy as np
import pytest

import jaxmha
from jaxmha import Mask

T, S = 1031, 1103  # primes; more than one block of rows and of keys, in more than one tile
RNG = np.random.default_rng(0)
IDS = tuple(np.sort(RNG.integers(0, 5, (1, n)), -1).astype(np.int32) for n in (T, S))
CAUSAL, WINDOW = Mask.causal(), Mask.window(100, 3)
OFFSETS, LENGTHS = Mask.causal(np.array([20])), Mask.lengths(key_value=np.array([S // 2]))
SEGMENTS = Mask.segments(query_ids=IDS[0], key_value_ids=IDS[1])
DENSE = Mask.dense(RNG.random((1, 1, T, S)) < 0.5)
BIAS = RNG.standard_normal((1, 1, S)).astype(np.float32)
# Arguments that decide which blocks are visited, or add to their logits: mask, others.
REQUESTS: dict[str, tuple[Mask | None, dict[str, Any]]] = {
    "plain": (None, {}),
    "causal": (CAUSAL, {}),
    "window": (WINDOW, {}),
    "offsets": (OFFSETS, {}),
    "offsets and window": (OFFSETS & WINDOW, {}),
    "lengths": (LENGTHS, {}),
    "both lengths": (LENGTHS & Mask.lengths(query=np.array([T // 3])), {}),
    "segments": (SEGMENTS, {}),
    "dense": (DENSE, {}),
    "dense and causal": (DENSE & CAUSAL, {}),
    "bias": (None, {"bias": BIAS}),
    "bias and causal": (CAUSAL, {"bias": BIAS}),
    "bias and window": (WINDOW, {"bias": BIAS}),
    "dropout": (None, {"dropout_rate": 0.3, "dropout_key": True}),
    "dropout and segments": (SEGMENTS, {"dropout_rate": 0.3, "dropout_key": True}),
    "mean": (LENGTHS & Mask.lengths(query=np.array([T // 3])), {"fully_masked": "mean"}),
    "everything": (CAUSAL & WINDOW & LENGTHS & SEGMENTS & OFFSETS, {"bias": BIAS}),
}
CONFIGURATIONS = {
    "": (False, "standard"),
    "strict": (False, "strict"),
    "x64": (True, "standard"),
    "x64, strict": (True, "strict"),
}


@pytest.fixture(params=CONFIGURATIONS)
def configuration(request: pytest.FixtureRequest) -> Iterator[str]:
    x64, promotion = CONFIGURATIONS[request.param]
    with jax.enable_x64(x64), jax.numpy_dtype_promotion(promotion):
        yield request.param


def _program(name: str) -> tuple[Any, tuple[Any, ...]]:
    mask, options = REQUESTS[name]
    options = dict(options)
    if "dropout_key" in options:
        options["dropout_key"] = jax.random.key(1)
    bias = options.pop("bias", None)

    def run(arrays: tuple[Any, ...], mask: Any) -> Any:
        def out(q: Any, k: Any, v: Any, bias: Any) -> Any:
            return jaxmha.dot_product_attention(
                q, k, v, bias, mask, implementation="blocked", **options
            )

        found, pull = jax.vjp(out, *arrays)
        return found, pull(found)

    rng = np.random.default_rng(1)
    heads = (rng.standard_normal((1, n, 1, 2)).astype(np.float32) for n in (T, S, S))
    return run, ((*heads, bias), mask)


@pytest.mark.slow_variants(
    "*",
    "!x64, strict-window",
    "!x64, strict-mean",
    "!x64, strict-dropout and segments",
    "!x64, strict-everything",
)
@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_is_traced(name: str, configuration: str) -> None:
    """Every dtype is decided while tracing: nothing needs to be compiled."""
    run, arguments = _program(name)
    out, _ = jax.eval_shape(run, *arguments)
    assert out.shape == (1, T, 1, 2)
    assert out.dtype == np.float32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window", "everything"])
def test_configurations_agree(name: str) -> None:
    run, arguments = _program(name)
    want = run(*arguments)
    with jax.enable_x64(True):
        found = jax.jit(run)(*arguments)
    chex.assert_trees_all_equal(found, want, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("name", REQUESTS)
def test_forward_programs_are_traced(name: str, platform: str, configuration: str) -> None:
    """Without a gradient there are bands, and other platforms cut otherwise."""
    mask, options = REQUESTS[name]
    options = {k: jax.random.key(1) if k == "dropout_key" else x for k, x in options.items()}
    shape: Any = jax.ShapeDtypeStruct
    heads = [shape((1, n, 1, 2), "float32") for n in (T, S, S)]
    with jaxmha.lowering_for(platform):
        out = jax.eval_shape(
            lambda q, k, v: jaxmha.dot_product_attention(
                q, k, v, mask=mask, implementation="blocked", **options
            ),
            *heads,
        )
    assert out.shape == (1, T, 1, 2)
