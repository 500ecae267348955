"""The float64 oracle that every peer is checked against, on some rows of a case."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmha import Semantics
from jaxmha.bench import data
from jaxmha.bench.case import Case
from jaxmha.bench.data import Data
from jaxmha.converters.verify import oracle

# Step of central differences: about STEP**2 is their error of curvature, 1e-16 / STEP of rounding.
STEP = 1e-5
# Largest allowed relative error. A float32 output is within about 1e-6, with TF32 products within
# 1e-3; a wrong mask, scale or head order is off by far more.
ALLOWED = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
# Keys and values in one byte are off by up to 1/254 of the largest entry of their vector (int8), or
# 1/16 of their own size (float8). Averaged in outputs, that is about 1% and 3% of the largest.
ALLOWED |= {"int8": 3e-2, "float8_e4m3fn": 1e-1}
ROUNDED_PRODUCTS = 1e-2

Array64 = NDArray[np.float64]


def directions(case: Case, inputs: Data) -> list[NDArray[np.float32]]:
    """A random direction for each distinct input, along which gradients are checked."""
    rng = np.random.default_rng(len(case.name))
    return [rng.standard_normal(x.shape, np.float32) for x in inputs.distinct]


def write(case: Case, path: Path) -> None:
    """Saves the float64 output at the compared batch rows and queries.

    For a backward case also the derivative of the loss along `directions`, by central differences;
    the loss is the sum of these outputs times their cotangents.
    """
    inputs = data.make(case)
    stored = {"rows": rows(case, inputs)}
    if case.direction == "backward":
        moves = {
            id(x): move.astype(np.float64)
            for x, move in zip(inputs.distinct, directions(case, inputs), strict=True)
        }
        weights = inputs.cotangent[np.ix_(*data.compared(case))].astype(np.float64)

        def loss(step: float) -> float:
            q, k, v = (
                x.astype(np.float64) + step * moves[id(x)]
                for x in (inputs.query, inputs.key, inputs.value)
            )
            return float((weights * rows(case, inputs._replace(query=q, key=k, value=v))).sum())

        stored["derivative"] = np.array((loss(STEP) - loss(-STEP)) / (2 * STEP))
    np.savez(path, allow_pickle=False, **stored)


def rows(case: Case, inputs: Data) -> Array64:
    """Exact output at the compared batch rows and queries."""
    batches, queries = data.compared(case)
    first, end = (np.broadcast_to(x, (case.B, case.T))[np.ix_(batches, queries)][:, None, :, None]
                  for x in case.bounds)  # fmt: skip
    keys = np.arange(case.S)
    mask = (first <= keys) & (keys < end)
    query = inputs.query[np.ix_(batches, queries)]
    key, value = inputs.key[batches], inputs.value[batches]
    if inputs.params is not None:
        return oracle.run(inputs.params, Semantics(), query, key, value, mask).output
    q, k, v = (x.astype(np.float64) for x in (query, key, value))
    grouped = q.reshape(*q.shape[:2], case.K, case.N // case.K, case.H)
    logits = case.H**-0.5 * np.einsum("btkgh,bskh->bkgts", grouped, k, optimize=True)
    if inputs.bias is not None:
        bias = inputs.bias[:, :, queries].astype(np.float64)
        logits += bias.reshape(1, case.K, -1, len(queries), case.S)
    probabilities = oracle.exclude(logits, mask[:, None])
    context = np.einsum("bkgts,bskh->btkgh", probabilities, v, optimize=True)
    found: Array64 = context.reshape(*q.shape[:3], -1)
    return found


def errors(
    case: Case,
    inputs: Data,
    path: Path,
    out: NDArray[Any],
    gradients: list[NDArray[Any]] | None,
    *,
    rounded_products: bool = False,
    stored: str | None = None,
) -> dict[str, float]:
    """Returns `error`, the largest error of the compared rows relative to the largest exact value,
    and for gradients `gradient_error`, the error of the derivative along `directions` relative to
    the norm of the gradient. `stored`: the dtype of keys and values in a cache.

    Raises:
      ValueError: an error exceeds the bounds of the dtypes, and of TF32 if `rounded_products`.
    """
    with np.load(path) as written:
        exact = written["rows"]
        derivative = float(written["derivative"]) if "derivative" in written else None
    given = out[np.ix_(*data.compared(case))].reshape(exact.shape).astype(np.float64)
    found = {"error": float(np.abs(given - exact).max() / np.abs(exact).max())}
    if gradients is not None and derivative is not None:
        pairs = [
            (g.astype(np.float64).reshape(-1), u.reshape(-1))
            for g, u in zip(gradients, directions(case, inputs), strict=True)
        ]
        length = float(np.sqrt(sum(g @ g for g, _ in pairs)))
        found["gradient_error"] = abs(float(sum(g @ u for g, u in pairs)) - derivative) / length
    allowed = max(ALLOWED[case.dtype], ALLOWED[stored or case.dtype])
    if rounded_products:
        allowed = max(allowed, ROUNDED_PRODUCTS)
    for name, error in found.items():
        if not error <= allowed:  # NaN as well
            raise ValueError(f"wrong output: {name} {error:.1e} against float64")
    return found
