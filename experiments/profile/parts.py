"""What a layer is made of, each part alone and at its best, in XLA or in torch.

    python -m experiments.profile.parts xla|torch

Prints seconds by case and part as JSON. A process has one framework, whose threads would disturb
the other's.
"""

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from experiments.benchmarks import cases, data, programs, sgemm
from experiments.benchmarks.cases import Case
from jaxmha.implementations import blocks

CASES = (
    "layer-forward-plain-B2-T512-E512",
    "layer-forward-plain-B1-T1024-E512",
    "layer-forward-plain-B1-T2048-E512",
    "layer-forward-plain-B1-T4096-E512",
    "layer-backward-plain-B2-T512-E512",
    "layer-backward-plain-B1-T2048-E512",
)
# How often a layer has each, by direction: the gradient computes scores again, and has two more
# products of every product.
COUNTS: dict[str, dict[str, int]] = {
    "forward": {"projections": 1, "scores": 1, "weighted sums": 1, "softmax": 1},
    "backward": {"projections": 3, "scores": 3, "weighted sums": 4, "softmax": 2},
}
WHOLE = {"xla": "jaxmha", "torch": "torch-sdpa"}
SECONDS, MOST = 0.3, 50
Parts = dict[str, Callable[[], Any]]


def seconds(run: Callable[[], Any]) -> float:
    """Median of some calls."""
    run()
    start = time.perf_counter()
    run()
    calls = min(MOST, max(3, int(SECONDS / (time.perf_counter() - start))))
    found = []
    for _ in range(calls):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return median(found)


class Inputs(NamedTuple):
    """Arrays of a framework: features and kernels, heads in blocks of rows as `blocked` would cut
    them, and the scores of one block.
    """

    x: Any
    into: Any
    out_of: Any
    rows: Any
    keys: Any
    values: Any
    scores: Any

    @property
    def steps(self) -> range:
        """Block after block of every head."""
        return range(len(self.rows))

    @property
    def blocks(self) -> int:
        """Of one head."""
        return len(self.rows) // len(self.keys)


def inputs(case: Case) -> Inputs:
    """Random numbers; scores of one block, whose place every block takes."""
    plan = blocks.plan(
        case.B, case.N, 1, case.T, case.S, plain=True, gradient=case.direction == "backward"
    )
    rng = np.random.default_rng(case.T)
    heads = case.B * case.N
    shapes = (
        (case.B * case.T, case.E), (case.E, 3 * case.E), (case.E, case.E),
        (heads * plan.blocks, plan.rows, case.H), (heads, case.H, case.S), (heads, case.S, case.H),
        (plan.rows, case.S),
    )  # fmt: skip
    return Inputs(*(rng.standard_normal(shape, np.float32) for shape in shapes))


def in_xla(case: Case) -> Parts:
    """Every part as one compiled program."""
    import jax

    drawn = inputs(case)
    given = jax.device_put(drawn)
    count = drawn.blocks

    def again(step: Callable[..., Any]) -> Callable[..., Any]:
        """Answers take each other's place."""

        def run(x: Any, start: Any) -> Any:
            return jax.lax.fori_loop(0, len(drawn.steps), lambda i, y: step(i, x, y), start)

        return run

    def softmax(logits: Any) -> Any:
        exps = jax.numpy.exp(logits - logits.max(-1, keepdims=True))
        return exps, exps.sum(-1)

    programs: dict[str, tuple[Callable[..., Any], Any]] = {
        "projections": (lambda x, _: (x.x @ x.into, x.x @ x.out_of), None),
        "scores": (again(lambda i, x, _: x.rows[i] @ x.keys[i // count]), drawn.scores),
        "weighted sums": (again(lambda i, x, _: x.scores @ x.values[i // count]), drawn.rows[0]),
        "softmax": (again(lambda i, x, y: softmax(y[0])), (drawn.scores, drawn.scores[:, 0])),
    }

    wait: Any = jax.block_until_ready

    def runs(function: Callable[..., Any], start: Any) -> Callable[[], Any]:
        compiled: Any = jax.jit(function)
        there = jax.device_put(start)
        return lambda: wait(compiled(given, there))

    return {name: runs(*program) for name, program in programs.items()}


def in_torch(case: Case) -> Parts:
    """Every part by its own functions, results in the same place."""
    import torch

    drawn = inputs(case)
    x = Inputs(*(torch.from_numpy(array) for array in drawn))
    weights, out = torch.empty_like(x.scores), torch.empty_like(x.rows[0])

    def projections() -> None:
        x.x @ x.into
        x.x @ x.out_of

    def scores() -> None:
        for i in drawn.steps:
            torch.matmul(x.rows[i], x.keys[i // drawn.blocks], out=weights)

    def weighted() -> None:
        for i in drawn.steps:
            torch.matmul(x.scores, x.values[i // drawn.blocks], out=out)

    def softmax() -> None:
        for _ in drawn.steps:
            torch.softmax(x.scores, -1, out=weights)

    return {
        "projections": projections, "scores": scores, "weighted sums": weighted, "softmax": softmax,
    }  # fmt: skip


def measure(backend: str, case: Case) -> dict[str, float]:
    """Seconds of a call of the whole layer and of its parts."""
    whole = programs.program(WHOLE[backend], case, data.make(case))
    whole.compile()
    parts = in_xla(case) if backend == "xla" else in_torch(case)
    found = {"whole": seconds(whole.run)}
    return found | {name: seconds(run) for name, run in parts.items()}


def split(case: str, measured: dict[str, float]) -> dict[str, float]:
    """The whole, what each part takes in it as often as it is there, and the rest.

    >>> one = {"whole": 9.0, "projections": 1.0, "scores": 2.0, "weighted sums": 2.0, "softmax": 3.0}
    >>> split("layer-forward-plain-B2-T512-E512", one)["rest"]
    1.0
    """
    direction = case.split("-")[1]
    times = {part: n * measured[part] for part, n in COUNTS[direction].items()}
    rest = measured["whole"] - sum(times.values())
    return {"whole": measured["whole"], **times, "rest": rest}


def main() -> None:
    """The command; for `python -m experiments.profile`, which alternates both frameworks."""
    backend = sys.argv[1]
    chosen = [case for name in CASES for case in cases.select([name])]
    found: dict[str, Any] = {case.name: measure(backend, case) for case in chosen}
    found["sgemm"] = sgemm.rate(backend, sgemm.SQUARE)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
