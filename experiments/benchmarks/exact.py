"""The float64 oracle that every peer is checked against, on some rows of a case."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.benchmarks import data
from experiments.benchmarks.cases import Case
from experiments.benchmarks.data import Data
from jaxmha import MHAParams, Projection, Semantics
from jaxmha.converters.verify import oracle

# Of central differences: curvature adds about STEP**2, rounding 1e-16 / STEP.
STEP = 1e-5
# A float32 output is within about 1e-6; a wrong mask, scale or head order is off by far more.
ALLOWED = 1e-4

Array64 = NDArray[np.float64]


def directions(case: Case, inputs: Data) -> list[NDArray[np.float32]]:
    """A random direction for each distinct input."""
    rng = np.random.default_rng(len(case.name))
    return [rng.standard_normal(x.shape, np.float32) for x in inputs.distinct]


def write(case: Case, path: Path) -> None:
    """Stores the exact rows, and the derivative of the loss along `directions`.

    The loss is the sum of output times `data.only_compared(cotangent)`.
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
    mask = np.ones((len(batches), 1, len(queries), case.S), bool)
    if case.kind == "causal":
        mask &= np.arange(case.S) <= queries[:, None]
    if case.lengths is not None:
        mask &= np.arange(case.S) < np.array(case.lengths)[batches, None, None, None]
    query = inputs.query[np.ix_(batches, queries)]
    key, value = inputs.key[batches], inputs.value[batches]
    if inputs.params is not None:
        return oracle.run(inputs.params, Semantics(), query, key, value, mask).output
    # The core is a layer of one head, with heads as batch rows and nothing to project.
    identity = Projection(np.eye(case.H)[:, None])
    group = case.N // case.K
    q, k, v = (_as_batch(x) for x in (query, key.repeat(group, 2), value.repeat(group, 2)))
    params = MHAParams(identity, identity, identity)
    context = oracle.run(params, Semantics(), q, k, v, mask.repeat(case.N, 0)).context
    return np.moveaxis(context[:, :, 0].reshape(len(batches), case.N, len(queries), case.H), 1, 2)


def _as_batch(x: NDArray[Any]) -> NDArray[Any]:
    return np.moveaxis(x, 2, 1).reshape(-1, x.shape[1], x.shape[3])


def errors(
    case: Case,
    inputs: Data,
    path: Path,
    out: NDArray[Any],
    gradients: list[NDArray[Any]] | None,
) -> dict[str, float]:
    """Largest error of the compared rows relative to the largest exact value, and of the derivative
    relative to the length of the gradient.

    Raises:
      ValueError: an error is beyond what float32 explains.
    """
    with np.load(path) as stored:
        exact = stored["rows"]
        derivative = float(stored["derivative"]) if "derivative" in stored else None
    given = out[np.ix_(*data.compared(case))].reshape(exact.shape).astype(np.float64)
    found = {"error": float(np.abs(given - exact).max() / np.abs(exact).max())}
    if gradients is not None and derivative is not None:
        pairs = [
            (g.astype(np.float64).reshape(-1), u.reshape(-1))
            for g, u in zip(gradients, directions(case, inputs), strict=True)
        ]
        length = float(np.sqrt(sum(g @ g for g, _ in pairs)))
        found["gradient_error"] = abs(float(sum(g @ u for g, u in pairs)) - derivative) / length
    for name, error in found.items():
        if not error <= ALLOWED:  # NaN as well
            raise ValueError(f"wrong output: {name} {error:.1e} against float64")
    return found
