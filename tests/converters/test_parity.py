"""Outputs are at least as exact as the framework's own, over random layers, inputs and masks.

The measure is the error against the float64 oracle, of ours and of the framework's own call on
the same weights and inputs in float32.
"""

import os
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmha import MHAParams, Semantics, multi_head_attention
from jaxmha.converters import flax, keras, torch
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.verify import oracle
from tests.converters import layers
from tests.promotion import foreign

CONVERTERS: dict[str, Any] = {"torch": torch, "keras": keras, "linen": flax, "nnx": flax}
# Draws of weights and inputs per shape and mask, so that all variants have over 200 configurations.
DRAWS = 3
SEED = int(os.environ.get("JAXMHA_SEED", "0"))
MEAN, WORST = 1.0, 2.0
OPTIMISED = True  # compiled as users compile it


class Measured(NamedTuple):
    """Errors of one configuration: RMS and largest, ours and the framework's."""

    where: str
    rms: tuple[float, float]
    largest: tuple[float, float]


def ours(params: MHAParams, semantics: Semantics, inputs: Any, mask: NDArray | None) -> Any:
    """jaxmha on imported parameters; `jax.jit` of it has the parameters as arguments."""
    inputs = tuple(map(jnp.asarray, inputs))
    return multi_head_attention(params, *inputs, mask=mask, semantics=semantics)


jitted = jax.jit(ours)


def full(mask: NDArray | None, S: int) -> NDArray:
    """One shape for every mask and none, so that each shape of inputs is compiled once.

    Eager calls have no mask where there is none.
    """
    allowed = True if mask is None else mask
    return np.ascontiguousarray(np.broadcast_to(allowed, (layers.B, 1, layers.T, S)))


@partial(jax.jit, static_argnums=0)
def jitted_linen(module: Any, variables: Any, inputs: Any, mask: Any) -> Any:
    """The live linen layer under jit."""
    return module.apply(variables, *inputs, mask=mask)


def measure(framework: str, *, every: bool, weights: bool = False) -> dict[str, list[Measured]]:
    """The rich variants under jit, or every one and eager too; torch's path with weights on request.

    linen is jitted where ours is; the other layers run as they always do.
    """
    found: dict[str, list[Measured]] = {"eager": [], "jit": []}
    for i, config in enumerate(layers.configs(framework)):
        if not every and config.name not in layers.RICH:
            continue
        cross = i % 2 == 1 or not config.self_attention  # one shape per variant: compiled once
        for seed in range(SEED, SEED + DRAWS):
            layer = layers.build(config, seed=seed)
            params, semantics = CONVERTERS[framework].from_module(
                *(layer if isinstance(layer, tuple) else (layer,))
            )
            inputs = layers.inputs(config, seed, cross=cross)
            S = inputs[1].shape[1]
            for name, mask in layers.masks(S).items():
                allowed = full(mask, S)
                where = f"{config}, {name}, draw {seed}, {'cross' if cross else 'self'}"
                exact = oracle.run(params, semantics, *inputs, mask=allowed).output
                theirs = own = (
                    layers.call_torch(layer, *inputs, mask, weights=True)
                    if weights
                    else layers.call(config, layer, *inputs, mask)
                )
                if framework == "linen":
                    with foreign():
                        own = np.asarray(jitted_linen(*layer, inputs, allowed))
                out = np.asarray(jitted(params, semantics, inputs, allowed))
                found["jit"].append(compare(where, out, own, exact))
                if every:  # eagerly each operation is compiled, for every shape
                    given = None if mask is None else allowed
                    out = np.asarray(ours(params, semantics, inputs, given))
                    found["eager"].append(compare(where, out, theirs, exact))
    return {mode: measured for mode, measured in found.items() if measured}


def compare(where: str, out: NDArray, theirs: NDArray, exact: NDArray) -> Measured:
    """Errors of both against the oracle."""
    assert out.shape == theirs.shape == exact.shape, where
    assert out.dtype == theirs.dtype == np.float32, where
    errors = [np.abs(x.astype(np.float64) - exact) for x in (out, theirs)]
    rms = tuple(float(np.sqrt(np.mean(np.square(e)))) for e in errors)
    return Measured(where, rms, tuple(float(e.max()) for e in errors))  # type: ignore[arg-type]


def summary(found: list[Measured]) -> tuple[float, float, str]:
    """Geometric mean of RMS ratios, the largest ratio of maximum errors, and where it is."""
    ratios = [m.rms[0] / m.rms[1] for m in found]
    worst = max(found, key=lambda m: m.largest[0] / m.largest[1])
    mean = float(np.exp(np.mean(np.log(ratios))))
    return mean, worst.largest[0] / worst.largest[1], f"{worst.where}: {worst.largest}"


EVERY = pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["rich", "every variant"]
)


@pytest.mark.slow_variants("nnx-rich", "linen-rich", "keras-rich")
@EVERY
@pytest.mark.parametrize("framework", ["torch", "keras", "linen", "nnx"])
def test_no_less_exact_than_the_framework(framework: str, every: bool) -> None:
    assert_exact(measure(framework, every=every))


@EVERY
def test_no_less_exact_than_torch_where_it_returns_weights(every: bool) -> None:
    assert_exact(measure("torch", every=every, weights=True))


def assert_exact(found: dict[str, list[Measured]]) -> None:
    """Asserts both bounds for eager and jit; pytest prints the numbers of a failure."""
    lines, good = [], True
    for mode, measured in found.items():
        mean, worst, where = summary(measured)
        good &= mean <= MEAN and worst <= WORST
        lines.append(
            f"{mode}, {len(measured)} configurations: mean {mean:.3f}, worst {worst:.2f} at {where}"
        )
    print("\n".join(lines))
    assert good, "\n".join(lines)


def test_the_bounds_fail_for_a_wrong_layer() -> None:
    """A key bias lost is not seen, a value bias lost is: the measure has teeth, and limits."""
    config = layers.configs("torch")[0]
    layer, inputs = layers.build(config), layers.inputs(config)
    params, semantics = torch.from_module(layer)
    exact = oracle.run(params, semantics, *inputs).output
    theirs = layers.call(config, layer, *inputs)
    for name, seen in (("key", False), ("value", True)):
        lost = params._replace(**{name: getattr(params, name)._replace(bias=None)})
        out = np.asarray(jitted(lost, semantics, inputs, None))
        _, worst, _ = summary([compare(name, out, theirs, exact)])
        assert (worst > 1000) == seen
