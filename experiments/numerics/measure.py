"""Errors over length and over the size of logits, and where implementations break."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from experiments.numerics import inputs
from experiments.numerics.inputs import DTYPES, H, Run
from jaxmha import MHAParams
from jaxmha.bench.program import UnsupportedError
from jaxmha.converters.layout.arrays import NDArray

LENGTHS = (16, 128, 1024, 16384)
SCALES = (1, 4, 16, 64, 256, 1024)
FIXED = 128  # S of everything else
SEEDS = 3
LONG = 16384  # from here on one seed is enough: errors are means over T rows of E features each
NARROW = ("float32", "bfloat16", "float16")
# Additive masks that keep all keys out: -inf, the lowest number of the dtype, and two that people
# write. float16 holds no -1e9.
CONSTANTS = ("-inf", "lowest", "-1e9", "-1e4")
# A power of two whose logits are below the constants that some put for -inf.
BELOW = {"float32": 2.0**29, "bfloat16": 2.0**29, "float16": 2.0**13}
NEAR = 0.1  # of the largest value: outputs in half precision are rough
Row = dict[str, Any]


def measure(runs: dict[str, Run]) -> Row:
    """Everything about some implementations, by name."""
    return {name: dict(parts(name, run)) for name, run in runs.items()}


def parts(name: str, run: Run) -> Iterator[tuple[str, Any]]:
    """The experiments with one implementation."""
    lengths, scales = {}, {}
    for dtype in NARROW:
        lengths[dtype] = [floors(run, dtype, S=S) for S in LENGTHS]
        scales[dtype] = [floors(run, dtype, scale=scale) for scale in SCALES]
    yield "lengths", lengths
    yield "scales", scales
    yield "float64", in_float64(run)
    yield "largest", largest(run)
    yield "blocked", {dtype: fully_masked(run, dtype) for dtype in NARROW}
    yield "constants", {dtype: constants(run, dtype) for dtype in NARROW}
    yield "below", {dtype: below(run, dtype) for dtype in NARROW}
    yield "padding", padding(run)
    yield "uncompiled", sorted(inputs.UNCOMPILED.get(name, ()))


def floors(run: Run, dtype: str, *, S: int = FIXED, scale: float = 1.0) -> float | str:
    """RMS error over seeds in rounding floors, or what happens instead."""
    found = []
    for seed in range(1 if S >= LONG else SEEDS):
        weights, x, expected = given(dtype, S, scale, seed)
        try:
            out = run(weights, x, None, None)
        except UnsupportedError:
            return "not run"
        error = inputs.floors(out, expected, dtype)
        if error is None:
            return "not finite"
        found.append(error)
    return float(np.sqrt(np.mean(np.square(found))))


@cache
def given(dtype: str, S: int, scale: float, seed: int) -> tuple[MHAParams, NDArray, NDArray]:
    """The same for every implementation: weights, features, exact output."""
    weights, x = inputs.params(dtype, scale, seed), inputs.features(dtype, S, seed)
    return weights, x, inputs.exact(weights, x)


def in_float64(run: Run) -> float | str:
    """Largest error of float64 relative to the largest value."""
    weights, x = inputs.params("float64"), inputs.features("float64", FIXED)
    expected = inputs.exact(weights, x)
    out = run(weights, x, None, None)
    if out.dtype != np.float64:
        return f"returns {out.dtype}"
    return float(np.abs(out - expected).max() / np.abs(expected).max())


def largest(run: Run) -> float | str:
    """Largest logit that float16 has an output for, of those at powers of two times the root of H."""
    last: float | str = "none"
    for power in range(6, 16):
        x = np.ones((1, FIXED, inputs.E), DTYPES["float16"])
        out = run(inputs.params("float16", 2.0**power), x, None, None)
        if not np.isfinite(out.astype(np.float64)).all():
            return last
        last = float(2.0**power * H**0.5)
    return "no bound"


def fully_masked(run: Run, dtype: str) -> str:
    """The outcome for rows in which a Boolean mask allows no key."""
    weights, x = inputs.params(dtype), inputs.features(dtype, FIXED)
    return outcome(weights, x, run(weights, x, np.zeros(x.shape[1], bool), None))


def constants(run: Run, dtype: str) -> dict[str, str]:
    """Mask constant -> the outcome for rows whose keys all have it as their additive mask."""
    weights, x = inputs.params(dtype), inputs.features(dtype, FIXED)
    kind = np.dtype(DTYPES[dtype])
    lowest = float(ml_dtypes.finfo(kind).min)  # type: ignore[no-untyped-call]
    found = {}
    for constant in CONSTANTS:
        value = lowest if constant == "lowest" else float(constant)
        with np.errstate(over="ignore"):
            bias = np.full(x.shape[1], value).astype(kind)
        if np.isinf(bias).any() and constant != "-inf":
            found[constant] = "no such number"
            continue
        try:
            found[constant] = outcome(weights, x, run(weights, x, None, bias))
        except UnsupportedError:
            return {}
    return found


def outcome(weights: Any, x: NDArray, out: NDArray) -> str:
    """NaN, zero, the mean of all values, as if nothing were masked, or neither."""
    out = out.astype(np.float64)
    if np.isnan(out).all():
        return "NaN"
    if not out.any():
        return "zero"
    values = x[0].astype(np.float64) @ np.asarray(weights.value.kernel, np.float64).reshape(
        inputs.E, inputs.E
    )
    candidates = {
        "mean": np.broadcast_to(values.mean(0), out.shape),
        "unmasked": inputs.exact(weights, x),
    }
    nearest = min(candidates, key=lambda name: np.abs(out - candidates[name]).max())
    near = np.abs(out - candidates[nearest]).max() <= NEAR * np.abs(candidates[nearest]).max()
    return nearest if near else "neither"


def below(run: Run, dtype: str) -> str:
    """Are masked keys left out where the logits of the others are lower than mask constants?"""
    S = FIXED
    keep = np.arange(S) < S // 2
    x = np.where(keep[:, None], 1.0, 0.0) * np.ones((1, S, inputs.E))
    weights = inputs.params(dtype, -BELOW[dtype])
    out = run(weights, x.astype(DTYPES[dtype]), keep, None).astype(np.float64)
    if np.isnan(out).any():
        return "NaN"
    return "left out" if np.abs(out - 1).max() < 0.02 else f"output {out.flat[0]:.2g}, not 1"


def padding(run: Run) -> str:
    """The effect on the output if a masked key and value are NaN: `NaN` or `nothing`."""
    weights, x = inputs.params("float32"), inputs.features("float32", FIXED)
    keep = np.arange(x.shape[1]) < x.shape[1] - 1
    x[:, -1] = np.nan
    out = run(weights, x, keep, None)
    return "NaN" if np.isnan(out).any() else "nothing"
