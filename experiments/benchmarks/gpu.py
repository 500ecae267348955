"""How fast, and how right, is attention on this GPU, beside every peer?

    python -m experiments.benchmarks.gpu --write

Under eight minutes on an H200; the table comes last. Needs jax with CUDA; peers are measured where
they are installed. Where the machine has no network, carry what is missing in one folder:

    pip install --target .gpu --no-deps einops jaxtyping wadler_lindig flax optax msgpack treescope
    PYTHONPATH=.gpu:. python -m experiments.benchmarks.gpu --write
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch is in this process too

import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmha
from experiments import machine
from experiments.benchmarks import gpu_cases, gpu_conformance, gpu_peers, gpu_report
from experiments.benchmarks.gpu_cases import Shape
from experiments.benchmarks.gpu_peers import Program

RESULTS = Path(__file__).parent / "results"
ROUNDS, ROUND_SECONDS, MOST_CALLS = 5, 0.03, 200
# One of a kind, for --check.
SMALLEST = [next(s for s in gpu_cases.SHAPES if (s.kind, s.backward) == x) for x in (
    ("full", False), ("causal", True), ("padding", False), ("bias", True),
)]  # fmt: skip
# Shares of the time: up to when each part may begin something new.
PARTS = {"conformance": 0.25, "layers": 0.35, "speed": 0.95}


def parsed(arguments: Sequence[str] | None = None) -> Namespace:
    """The command line."""
    parser = ArgumentParser(
        prog="python -m experiments.benchmarks.gpu",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=440, help="in all (default 440)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--write", type=Path, nargs="?", const=RESULTS, help="folder of results")
    parser.add_argument(
        "--check", action="store_true", help="everything on tiny shapes, on any device"
    )
    return parser.parse_args(arguments)


def time_all(programs: dict[str, Program]) -> dict[str, list[float]]:
    """Seconds of a call by peer, in interleaved rounds."""
    calls: dict[str, int] = {}
    for name, program in programs.items():
        program.run(1)
        start = perf_counter()
        program.run(2)
        calls[name] = max(1, min(MOST_CALLS, int(ROUND_SECONDS * 2 / (perf_counter() - start))))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(ROUNDS):
        for name, program in programs.items():
            start = perf_counter()
            program.run(calls[name])
            seconds[name].append((perf_counter() - start) / calls[name])
    return seconds


def measured(
    makers: Mapping[str, Callable[[], Program]], flop: float = 0.0, moved: float = 0.0
) -> dict[str, dict[str, Any]]:
    """By peer: median and least seconds, rates, bytes; or why it failed. JAX compiles at once."""

    def make(item: tuple[str, Callable[[], Program]]) -> Program | str:
        try:
            made = item[1]()
            made.run(1)
        except Exception as error:  # noqa: BLE001  whatever a framework raises is a result
            lines = str(error).strip().splitlines() or [""]
            return f"{type(error).__name__}: {lines[0][:160]}"
        return made

    # torch chooses its backend for the whole process: one after the other.
    others = {name: maker for name, maker in makers.items() if not name.startswith("torch")}
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        made = dict(zip(others, pool.map(make, others.items()), strict=True))
    made |= {name: make((name, makers[name])) for name in makers if name not in others}
    working = {name: x for name, x in made.items() if isinstance(x, Program)}
    found: dict[str, dict[str, Any]] = {
        name: {"failed": x} for name, x in made.items() if isinstance(x, str)
    }
    for name, seconds in time_all(working).items():
        middle = median(seconds)
        found[name] = {"seconds": middle, "least": min(seconds), "bytes": working[name].bytes}
        if flop:
            found[name]["tflops"] = flop / middle * 1e-12
        if moved:
            found[name]["gb_per_second"] = moved / middle * 1e-9
    return found


def peaks(size: int) -> dict[str, float]:
    """TFLOP/s of a square product in bfloat16, GB/s of a copy (read and written)."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal((size, size), np.float32), jnp.bfloat16) for _ in "ab")
    long = jnp.zeros((size * size * 8,), jnp.bfloat16)
    product = gpu_peers.compiled(lambda a, b: a @ b, a, b)
    copy = gpu_peers.compiled(lambda x: x + 1, long)
    seconds = {k: median(v) for k, v in time_all({"product": product, "copy": copy}).items()}
    return {
        "tflops": 2.0 * size**3 / seconds["product"] * 1e-12,
        "gb_per_second": 2.0 * long.nbytes / seconds["copy"] * 1e-9,
    }


def tiny(shape: Shape) -> Shape:
    """The same on any device in no time."""
    return Shape(shape.kind, 16, 8, 4, 4 if shape.N == shape.K else 2, 32, shape.backward, "all")


def collect(chosen: Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything, part by part, as far as the time reaches."""
    start = perf_counter()
    checking, device = chosen.check, "cpu" if chosen.check else "cuda"

    def until(part: str) -> float:
        return start + float(chosen.seconds) * PARTS[part]

    results: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": jax.devices()[0].device_kind,
        "machine": machine.describe(),
        "versions": versions(),
        "peaks": peaks(64 if checking else 8192),
    }
    say(f"peaks: {results['peaks']}")
    implementations = ["blocked"] if checking else ["blocked", "cudnn", "tokamax"]
    results["conformance"] = gpu_conformance.run(
        gpu_cases.CASES[1:8:6] if checking else gpu_cases.CASES,
        implementations,
        ["bfloat16"] if checking else ["bfloat16", "float16"],
        deadline=until("conformance"),
        threads=min(12, machine.threads()),
    )
    say(gpu_report.conformance(results["conformance"]))
    results["chosen"] = chosen_implementations()

    results["decode"], results["layers"] = [], []
    for sizes in ((2, 32, 4, 2, 8),) if checking else gpu_cases.DECODE:
        if perf_counter() > until("layers"):
            results["decode"].append({"sizes": sizes, "skipped": "out of time"})
            continue
        B, S, N, K, H = sizes
        makers = {name: partial(gpu_peers.decode, name, *sizes) for name in gpu_peers.DECODE_PEERS}
        makers["decode_step"] = partial(gpu_peers.decode_step, *sizes)
        found = measured(makers, moved=4.0 * B * (S - 3) * K * H)
        results["decode"].append({"sizes": sizes, "peers": found})
        say(gpu_report.line(f"decode B{B} S{S} N{N}/{K} H{H}", found))
    for T, E, N in ((16, 32, 4),) if checking else gpu_cases.LAYERS:
        if perf_counter() > until("layers"):
            results["layers"].append({"T": T, "E": E, "N": N, "skipped": "out of time"})
            continue
        B = max(1, (32 if checking else 16384) // T)
        flop = 8.0 * B * T * E * E + 2.0 * B * T * (T + 1) * E
        found = measured(
            {
                name: partial(gpu_peers.layer, name, T, E, N, B, device)
                for name in gpu_peers.LAYER_PEERS
            },
            flop,
        )
        results["layers"].append({"T": T, "E": E, "N": N, "peers": found})
        say(gpu_report.line(f"layer T{T} E{E}", found))

    results["shapes"] = []
    for shape in SMALLEST if checking else gpu_cases.SHAPES:
        entry: dict[str, Any] = {"name": shape.name, **asdict(shape)}
        if perf_counter() > until("speed"):
            results["shapes"].append({**entry, "skipped": "out of time"})
            continue
        this = tiny(shape) if checking else shape
        given = gpu_peers.inputs(this)
        found = measured(
            {
                name: partial(gpu_peers.program, name, this, given, device)
                for name in gpu_peers.names(this)
            },
            this.flop,
        )
        results["shapes"].append({**entry, "peers": found})
        say(gpu_report.line(shape.name, found))
    results["seconds"] = round(perf_counter() - start)
    return results


def chosen_implementations() -> dict[str, str]:
    """What each shape gets here, for the report."""
    found = {}
    for shape in gpu_cases.SHAPES:
        make: Any = jax.ShapeDtypeStruct
        heads = [make((shape.B, shape.T, n, shape.H), jnp.bfloat16) for n in (shape.N, shape.K)]
        bias = make((1, shape.N, shape.T, shape.T), jnp.bfloat16) if shape.kind == "bias" else None
        explained = jaxmha.explain(
            heads[0], heads[1], heads[1], bias, is_causal=shape.kind == "causal"
        )
        found[shape.name] = str(explained.chosen)
    return found


def versions() -> dict[str, str]:
    """Of packages, and of the cuDNN that each framework loaded."""
    found = machine.versions()
    try:
        from jax._src.cudnn import fused_attention_stablehlo as private

        found["cudnn of jax"] = str(private.check_cudnn_version())  # type: ignore[no-untyped-call]
    except (ImportError, AttributeError, RuntimeError):
        pass
    if "torch" in found:
        import torch

        found["cudnn of torch"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
        found["cuda of torch"] = str(torch.version.cuda)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes, prints the table last."""
    chosen = parsed(arguments)
    if jax.default_backend() != "gpu" and not chosen.check:
        text = f"no GPU: JAX runs on {jax.default_backend()} (--check runs anywhere)"
        print(text, file=sys.stderr)
        return 2
    start = perf_counter()

    def say(text: str) -> None:
        print(f"{perf_counter() - start:5.0f} s  {text}", file=sys.stderr, flush=True)

    results = collect(chosen, say)
    if chosen.write is not None:
        chosen.write.mkdir(parents=True, exist_ok=True)
        (chosen.write / "gpu.json").write_text(json.dumps(results, indent=1) + "\n")
        (chosen.write / "gpu.md").write_text(gpu_report.page(results))
    print(json.dumps(results, indent=1) if chosen.json else gpu_report.page(results))
    wrong = any("failed" in row for row in results["conformance"])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
