"""Checks that a layer computes the output that its weights imply, against the float64 oracle.

Errors are in rounding floors: multiples of the RMS error of rounding the exact output once. In half
precision errors are larger, because a layer stores every intermediate in its dtype. `cost` computes
the error of the oracle with such rounding, and errors of this size are accepted. The dtype is that
in which a layer computes: its outputs show where it is narrower than the weights.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxmha import MHAParams, Semantics
from jaxmha.converters.layout.arrays import NDArray, narrower, to_numpy
from jaxmha.converters.verify import comparands, oracle
from jaxmha.converters.verify.comparands import ComparedBlock
from jaxmha.converters.verify.oracle import Stages
from jaxmha.params import check, from_leaves, leaves

# Sizes of the test inputs. Distinct primes reveal exchanged axes; LENGTHS are the numbers of valid
# keys per batch row.
B, T, S = 5, 19, 23
LENGTHS = (23, 17, 11, 5, 1)
# Two errors below SMALL rounding floors count as similar, whatever their ratio.
SMALL = 4.0
RATIO = 2.0
# Two errors whose sum is at least OTHER rounding floors mean that the functions differ.
OTHER = 1e5
# Errors up to COSTS times `cost` count as rounding: if the two largest logits of a row are nearly
# equal, rounding decides between them, so correct layers reach 4 times the cost.
COSTS = 6.0
# Inputs are multiplied by a power of 2 that gives the logits of a row about this standard deviation:
# errors in half precision are clear there. EXPONENTS: its least and largest exponent.
DEVIATION = 3.0
EXPONENTS = (-4, 4)
# A known error explains an output if the output that it predicts is at least CLOSER times closer to
# it than the exact output is, and their RMS difference is at most CLOSE times the RMS predicted.
CLOSER = 10.0
CLOSE = 0.1
MISSING_SCALE = "missing scale: logits are not divided by the square root of H"


class Measured(NamedTuple):
    """The errors of a block's forward against the float64 oracle on its weights.

    Attributes:
      dtype: the narrower of the weights' dtype and the dtypes of the outputs. A layer with float32
        weights that returns bfloat16 rounds to bfloat16, whatever its weights.
      errors: mask -> RMS error, in rounding floors of this dtype.
      factor: the number that multiplied the inputs.
    """

    dtype: np.dtype[Any]
    errors: dict[str, float]
    factor: float = 1.0

    @property
    def half(self) -> bool:
        """True for half precision."""
        return self.dtype.itemsize == 2


def measure_both(a: ComparedBlock, b: ComparedBlock, seed: int) -> tuple[Measured, Measured]:
    """Runs both blocks with each mask, and measures their errors.

    For a layer object in half precision the inputs are scaled. Else its rounding errors may be larger
    than the effect of a missing scale: where logits are tiny or huge, the softmax hardly changes.
    """
    found = measure(a, seed), measure(b, seed)
    if any(block.is_live and one.half for block, one in zip((a, b), found, strict=True)):
        factor = _moderate(a, seed)
        found = measure(a, seed, factor), measure(b, seed, factor)
    return found


def measure(block: ComparedBlock, seed: int, factor: float = 1.0) -> Measured:
    """Runs a block with each mask on inputs times `factor`, and measures its errors."""
    given, dtype, found = inputs(block, seed, factor), dtype_of(block), {}
    for name, mask in masks().items():
        stages = oracle.run(block.params, block.semantics, *given, mask=mask)
        out, rows = np.asarray(block.forward(*given, mask)), _attending(stages)
        dtype = narrower(dtype, out.dtype)
        found[name] = out.astype(np.float64)[rows], stages.output[rows]
    errors = {
        name: _rms(out - exact) / oracle.rounding_floor(exact, dtype)
        for name, (out, exact) in found.items()
    }
    return Measured(dtype, errors, factor)


def _attending(stages: Stages) -> NDArray:
    """Returns a Boolean array `B T`: True for rows that attend a key.

    A window may exclude every key that the mask of a row allows.

    Frameworks differ in their outputs for the other rows, so these are not compared.
    """
    return np.asarray(~np.isneginf(stages.logits).all(axis=(1, 3)))


def _moderate(block: ComparedBlock, seed: int) -> float:
    """Returns the power of 2 that, times the inputs, gives the logits of a row the standard deviation
    `DEVIATION`.

    It is within `EXPONENTS`: biases dominate tiny inputs, and huge inputs overflow.
    """
    if block.semantics.qk_norm is not None:  # normalised logits do not grow with the inputs
        return 1.0
    power = 0
    for _ in range(3):  # logits grow with the square of the inputs, or with biases like the inputs
        given = inputs(block, seed, 2.0**power)
        logits = oracle.run(block.params, block.semantics, *given).logits
        deviation = float(np.ma.masked_invalid(logits).std(-1).mean())  # a window excludes keys
        if deviation > 0 and math.isfinite(deviation):
            power = int(np.clip(power + round(math.log2(DEVIATION / deviation) / 2), *EXPONENTS))
    return 2.0**power


def alike(
    blocks: tuple[ComparedBlock, ComparedBlock], found: tuple[Measured, Measured], seed: int
) -> bool:
    """True if both blocks make only rounding errors of similar size; False if an error is NaN.

    Errors in different dtypes have no similar size, so each block is then compared with jaxmha's
    forward in the same dtype. `found`: the errors of both blocks, as `measure_both` returns them.
    """
    if found[0].dtype == found[1].dtype:
        return _similar(blocks[0], *found, seed)
    return all(
        _similar(block, own, measure(_cast(block, own.dtype), seed, own.factor), seed)
        for block, own in zip(blocks, found, strict=True)
    )


def _similar(block: ComparedBlock, one: Measured, other: Measured, seed: int) -> bool:
    """True if two errors in one dtype are rounding errors of `block`, and of similar size."""
    given = inputs(block, seed, one.factor)
    largest = max(
        cost(block.params, block.semantics, given, mask, one.dtype) for mask in masks().values()
    )
    return all(
        _alike(error, other.errors[mask], largest, one.half) for mask, error in one.errors.items()
    )


def _alike(a: float, b: float, cost: float, half: bool) -> bool:
    low, high = min(a, b), max(a, b)
    if not math.isfinite(a + b):
        return False
    if half:
        return high <= COSTS * max(SMALL, cost)
    return a + b < OTHER and high <= max(RATIO * max(low, SMALL), COSTS * cost)


def _cast(block: ComparedBlock, dtype: np.dtype[Any]) -> ComparedBlock:
    """A block whose forward runs jaxmha on the weights and inputs rounded to a dtype.

    Its errors are those against the weights before the rounding.
    """
    rounded = comparands.of_params("", "", _rounded(block.params, dtype), block.semantics)

    def forward(
        query: NDArray, key: NDArray, value: NDArray, mask: NDArray | None = None
    ) -> NDArray:
        return rounded.forward(query.astype(dtype), key.astype(dtype), value.astype(dtype), mask)

    return block._replace(forward=forward)


def _rounded(params: MHAParams, dtype: np.dtype[Any]) -> MHAParams:
    return from_leaves({name: to_numpy(x).astype(dtype) for name, x in leaves(params).items()})


def cost(
    params: MHAParams,
    semantics: Semantics,
    given: tuple[NDArray, NDArray, NDArray],
    mask: NDArray | None,
    dtype: np.dtype[Any],
) -> float:
    """Returns the RMS error of the oracle with weights, inputs and every stage rounded to `dtype`.

    It is in rounding floors, and 0 if the rounded stages overflow.
    """

    def rounded(x: NDArray) -> NDArray:
        return x.astype(dtype).astype(np.float64)

    exact = oracle.run(params, semantics, *given, mask=mask).output
    with np.errstate(over="ignore", invalid="ignore"):
        query, key, value = (rounded(x) for x in given)
        own = _rounded(params, dtype)
        stages = oracle.run(own, semantics, query, key, value, mask, rounded=rounded)
        error = _rms(stages.output - exact)
    return error / oracle.rounding_floor(exact, dtype) if error < math.inf else 0.0


def explain_forward(block: ComparedBlock, seed: int, factor: float = 1.0) -> str | None:
    """Returns the known error that predicts the output of a layer object, or None.

    The prediction must be much closer than the float64 output of the weights. Rows that are fully
    masked by the error do not count, because frameworks differ in their outputs.
    """
    given, mask = inputs(block, seed, factor), masks()["padding"]
    assert mask is not None
    out = np.asarray(block.forward(*given, mask), np.float64)
    own = oracle.run(block.params, block.semantics, *given, mask=mask).output
    for name, reading in _readings(block, given, mask):
        rows = _attending(reading)
        away = _rms((out - reading.output)[rows])
        if away <= CLOSE * _rms(reading.output[rows]) and CLOSER * away <= _rms((out - own)[rows]):
            return name
    return None


def _readings(
    block: ComparedBlock, given: tuple[NDArray, NDArray, NDArray], mask: NDArray
) -> Iterator[tuple[str, Stages]]:
    """Yields each known forward error: its name, and the float64 stages that it leads to."""

    def run(q: NDArray, k: NDArray, v: NDArray, mask: NDArray | None, **changed: Any) -> Stages:
        semantics = replace(block.semantics, **changed)
        return oracle.run(block.params, semantics, q, k, v, mask=mask)

    query, key, value = given
    inverted = "inverted mask: True means attend in one source and blocked in the other"
    yield inverted, run(*given, mask=~mask)
    yield "mask ignored", run(*given, mask=None)
    yield MISSING_SCALE, run(*given, mask=mask, scale=1.0)
    if key.shape == value.shape:
        exchanged = "key and value exchanged: Keras is called as (query, value, key)"
        yield exchanged, run(query, value, key, mask=mask)


def masks() -> dict[str, NDArray | None]:
    """Returns the test masks by name, each `(B, 1, T or 1, S)`."""
    padding = np.arange(S) < np.array(LENGTHS)[:, None]
    return {
        "no mask": None,
        "padding": padding[:, None, None],
        "causal": np.broadcast_to(np.tri(T, S, dtype=bool), (B, 1, T, S)),
    }


def inputs(
    block: ComparedBlock, seed: int, factor: float = 1.0
) -> tuple[NDArray, NDArray, NDArray]:
    """Draws random query, key and value, times `factor`, with the widths and dtype of the block."""
    rng, sizes = np.random.default_rng(seed), check(block.params)
    query, key, value = (
        (factor * rng.normal(size=(B, length, sizes[width]))).astype(dtype_of(block))
        for length, width in ((T, "Dq"), (S, "Dk"), (S, "Dv"))
    )
    return query, key, value


def dtype_of(block: ComparedBlock) -> np.dtype[Any]:
    """The dtype of the block's weights."""
    return np.asarray(block.params.query.kernel).dtype


def _rms(x: NDArray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
