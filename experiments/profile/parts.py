"""What a layer is made of, each part alone and at its best, in XLA or in torch.

    python -m experiments.profile.parts xla|torch

Prints seconds by case as JSON: of whole layers, and of the parts. A process has one framework, whose
threads would disturb the other's.
"""

import json
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from experiments.benchmarks import cases, data, programs, sgemm
from experiments.benchmarks.cases import Case
from experiments.benchmarks.peers import OURS
from experiments.benchmarks.program import UnsupportedError
from experiments.profile import work
from experiments.profile.work import Product, Softmax

CASES = (
    "layer-forward-plain-B1-T64-E512",
    "layer-forward-plain-B8-T128-E512",
    "layer-forward-plain-B2-T512-E512",
    "layer-forward-plain-B32-T512-E512",
    "layer-forward-plain-B1-T1024-E512",
    "layer-forward-plain-B1-T2048-E512",
    "layer-forward-plain-B1-T4096-E512",
    "layer-forward-plain-B1-T2048-E1024",
    "layer-forward-plain-B1-T2048-E640-H80",
    "layer-forward-plain-B1-T2048-E768-H96",
    "layer-forward-plain-B1-T512-E64",
    "layer-forward-plain-B1-T2048-E64",
    "layer-forward-causal-B1-T2048-E512",
    "layer-forward-padded-B8-T512-E512",
    "layer-forward-padded-B4-T1024-E512",
    "layer-forward-gqa-B2-T512-E512-K2",
    "layer-forward-cross-B2-T1024-S77-E512",
    "layer-forward-cross-B1-T2048-S512-E512",
    "layer-backward-plain-B8-T128-E512",
    "layer-backward-plain-B2-T512-E512",
    "layer-backward-plain-B1-T2048-E512",
    "layer-backward-plain-B1-T2048-E640-H80",
    "layer-backward-plain-B1-T2048-E768-H96",
    "layer-backward-plain-B1-T2048-E64",
    "layer-backward-causal-B1-T2048-E512",
    "layer-backward-padded-B4-T1024-E512",
    "layer-backward-cross-B2-T1024-S77-E512",
    "layer-backward-cross-B1-T2048-S512-E512",
)
# Whole layers beside the parts; where there are several, the fastest stands for all.
WHOLE: dict[str, dict[str, tuple[str, ...]]] = {
    "xla": {OURS: (OURS,), "flax": ("flax-linen", "flax-nnx")},
    "torch": {"torch": ("torch-sdpa", "torch-native", "torch-weights")},
}
SECONDS, MOST = 0.15, 50
Run = Callable[[], Any]
Step = Product | Softmax
Pair = tuple[np.ndarray, np.ndarray]


def seconds(run: Run) -> float:
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


def arrays(part: Step, rng: np.random.Generator) -> Pair:
    """Left and right, stored as they are read; or scores and their slopes."""
    if isinstance(part, Softmax):
        scores, slopes = (rng.standard_normal(part.shape, np.float32) for _ in range(2))
        return scores, slopes
    found = []
    for name in ("left", "right"):
        shape = getattr(part, name)
        shape = (*shape[:-2], shape[-1], shape[-2]) if part.turned == name else shape
        shape = (part.times, *shape) if part.many == name and part.times > 1 else shape
        found.append(rng.standard_normal(shape, np.float32))
    return found[0], found[1]


def in_xla(steps: Sequence[Step], pairs: Sequence[Pair]) -> Run:
    """All steps as one compiled program; of each step every answer takes the place of the last."""
    import jax
    import jax.numpy as jnp

    def first(step: Step, x: Any) -> Any:
        if isinstance(step, Product):
            return jnp.zeros((*step.left[:-1], step.right[-1]))
        return x if step.gradient else (x[0], x[0][..., 0])

    def once(step: Step, x: Any, last: Any, i: Any) -> Any:
        if isinstance(step, Product):
            return jnp.matmul(*_operands(step, x[0], x[1], i))
        if step.gradient:
            weights = jnp.exp(last[0] - 1.0)
            return weights, weights * (last[1] + 1.0)
        exps = jnp.exp(last[0] - last[0].max(-1, keepdims=True))
        return exps, exps.sum(-1)

    def all_of(step: Step, x: Any) -> Any:
        if step.times == 1:
            return once(step, x, first(step, x), 0)
        return jax.lax.fori_loop(
            0, step.times, lambda i, last: once(step, x, last, i), first(step, x)
        )

    given = jax.device_put(list(pairs))
    compiled: Any = jax.jit(lambda xs: list(map(all_of, steps, xs))).lower(given).compile()
    wait: Any = jax.block_until_ready
    return lambda: wait(compiled(given))


def in_torch(steps: Sequence[Step], pairs: Sequence[Pair]) -> Run:
    """All steps by its own functions; of each step every answer takes the place of the last."""
    import torch

    given = [(torch.from_numpy(left), torch.from_numpy(right)) for left, right in pairs]
    outs = [
        torch.empty(*step.left[:-1], step.right[-1])
        if isinstance(step, Product)
        else torch.empty_like(x)
        for step, (x, _) in zip(steps, given, strict=True)
    ]

    def once(step: Step, x: Any, other: Any, out: Any, i: int) -> None:
        if isinstance(step, Product):
            torch.matmul(*_operands(step, x, other, i), out=out)
        elif step.gradient:
            torch.exp(torch.sub(x, 1.0, out=out), out=out)
            torch.mul(torch.add(other, 1.0, out=other), out, out=other)
        else:
            torch.softmax(x, -1, out=out)

    def run() -> Any:
        for step, (x, other), out in zip(steps, given, outs, strict=True):
            for i in range(step.times):
                once(step, x, other, out, i)
        return outs

    return run


def _operands(part: Product, left: Any, right: Any, i: Any) -> list[Any]:
    """The i-th pair, as the product has it."""
    pair = {"left": left, "right": right}
    if part.times > 1:
        pair[part.many] = pair[part.many][i]
    if part.turned:
        pair[part.turned] = pair[part.turned].swapaxes(-1, -2)
    return list(pair.values())


def measure(backend: str, case: Case) -> dict[str, float]:
    """Seconds of a call of whole layers, and of the parts of one."""
    inputs, found = data.make(case), {}
    for name, peers in WHOLE[backend].items():
        times = [t for peer in peers if (t := _whole(peer, case, inputs)) is not None]
        if times:
            found[name] = min(times)
    run = {"xla": in_xla, "torch": in_torch}[backend]
    rng = np.random.default_rng(case.T)
    for name, steps in work.parts(case).items():
        found[name] = seconds(run(steps, [arrays(step, rng) for step in steps]))
    return found


def _whole(peer: str, case: Case, inputs: Any) -> float | None:
    try:
        program = programs.program(peer, case, inputs)
        program.compile()
    except (UnsupportedError, ValueError):  # of heads that the layer does not have
        return None
    return seconds(program.run)


def main() -> None:
    """The command; for `python -m experiments.profile`, which alternates both frameworks."""
    parser = ArgumentParser(prog="python -m experiments.profile.parts", description=__doc__)
    parser.add_argument("backend", choices=WHOLE)
    backend = parser.parse_args().backend
    found: dict[str, Any] = {name: measure(backend, cases.named(name)) for name in CASES}
    found["sgemm"] = sgemm.rate(backend, sgemm.SQUARE)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
