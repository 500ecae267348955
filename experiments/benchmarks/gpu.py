"""How fast, and how right, is attention on this GPU, next to every peer?

    python -m experiments.benchmarks.gpu --write

The harness of `jaxmha bench` with a list of cases: half an hour and more on an H200; results are
written after every case, and the table comes last. Part by part it goes on in shorter commands:

    python -m experiments.benchmarks.gpu --write --resume --seconds 500 --only conformance

Needs jax with CUDA; peers are measured where they are installed.
"""

import os

# Every peer has a process of its own, and they share the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import faulthandler
import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import jax

from experiments.benchmarks import gpu_cases, gpu_report, unfinished
from experiments.benchmarks.gpu_cases import CASES, part, takes
from jaxmha.bench import choice, limits, machine, measure, memory, sgemm
from jaxmha.bench.case import Case
from jaxmha.bench.peers import OURS, peer
from tests.h100 import on_device

RESULTS = Path(__file__).parent / "gpu_results"
PARTS = (*gpu_cases.PARTS, "conformance")
ROUNDS, BUDGET = 7, 10.0
# So long beyond its time a process is taken to hang.
GRACE = 120
# On tiny shapes: one case of a kind, and few peers.
CHECKED = [CASES[0], *(next(c for c in CASES if (part(c), c.kind, c.direction) == x) for x in (
    ("layers", "causal", "backward"), ("shapes", "padded", "forward"), ("shapes", "causal", "backward"),
))]  # fmt: skip
FEW = (OURS, "jax-nn")
Row = dict[str, Any]


def parsed(arguments: Sequence[str] | None = None) -> Namespace:
    """The command line."""
    name, style = "python -m experiments.benchmarks.gpu", RawDescriptionHelpFormatter
    parser = ArgumentParser(prog=name, description=__doc__, formatter_class=style)
    parser.add_argument("--seconds", type=float, default=2400, help="begin nothing after (2400)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--write", type=Path, nargs="?", const=RESULTS, help="folder of results")
    parser.add_argument("--resume", action="store_true", help="measure what is missing there")
    parser.add_argument("--check", action="store_true", help="tiny shapes, on any device")
    chosen = parser.parse_args(arguments)
    if chosen.resume and chosen.write is None:
        parser.error("--resume goes on with what --write has written: give both")
    chosen.start = perf_counter()
    chosen.cases = [tiny(case) for case in CHECKED] if chosen.check else CASES
    chosen.asked = [case for case in chosen.cases if part(case) in chosen.only]
    chosen.peers = [name for name in gpu_cases.installed() if name in FEW or not chosen.check]
    return chosen


def tiny(case: Case) -> Case:
    """The same on any device in no time."""
    T = 1 if case.kind == "decode" else 16
    return replace(case, B=2, T=T, S=16, N=4, K=4 if case.N == case.K else 2, H=8, packed=0)


def begun(chosen: Namespace) -> Row:
    """Results with nothing in them, or those that were written so far.

    Raises:
      ValueError: those are of another machine or other versions.
    """
    fresh: Row = {
        "command": " ".join(["python -m experiments.benchmarks.gpu", *sys.argv[1:]]),
        "date": measure.today(),
        "device": jax.devices()[0].device_kind,
        "machine": machine.describe(),
        "versions": versions(),
        "settings": machine.settings(),
        "probe": [sgemm.LARGE, "float32"],
        "rounds": ROUNDS,
        "asked": len(chosen.cases),
        "peers": {name: {"about": peer(name).about, "absent": None} for name in chosen.peers},
        "chosen": {case.name: choice.explain(case)["chosen"] for case in chosen.asked},
        "limits": {},
        "seconds": 0,
        **measure.NOTHING,
        "conformance": [],
    }
    path = None if chosen.write is None else chosen.write / "gpu.json"
    if not chosen.resume or path is None or not path.exists():
        return fresh
    same = {name: fresh[name] for name in ("device", "versions", "probe")}
    stored = unfinished.same("--resume", path, json.loads(path.read_text()), same)
    return fresh | stored | {"chosen": fresh["chosen"] | stored["chosen"]}


def collect(
    chosen: Namespace, results: Row, say: Callable[[str], None], save: Callable[[], None]
) -> None:
    """Adds part by part, as far as the time reaches."""
    start, before = chosen.start, results["seconds"]

    def late() -> bool:
        return bool(perf_counter() - start > chosen.seconds)

    def done(found: Row = measure.NOTHING) -> None:
        results.update(found, seconds=round(before + perf_counter() - start))
        results["date"] = measure.last_date(results["cases"], results["date"])
        save()

    def ceilings() -> None:
        for products in sorted({case.products for case in chosen.cases}):
            found, best = limits.measure(products), results["limits"].setdefault(products, {})
            best |= {key: max(rate, best.get(key, 0.0)) for key, rate in found.items()}
        say(f"limits: {results['limits']}")

    ceilings()
    if chosen.asked:
        measure.measure(
            chosen.asked, chosen.peers, rounds=ROUNDS, budget=BUDGET, threads=memory.cores(),
            platform="cpu" if jax.default_backend() == "cpu" else None, backends=["xla"],
            known={key: results[key] for key in measure.NOTHING}, answered=chosen.cases,
            takes=takes, late=late, say=say, step=say, done=done,
        )  # fmt: skip
        ceilings()  # at the clocks of a device that has worked
    if "conformance" in chosen.only:
        on_device.run(
            results["conformance"],
            on_device.CALLS[1:8:6] if chosen.check else on_device.CALLS,
            ["blocked"] if chosen.check else ["cudnn", "tokamax", "blocked"],
            ["bfloat16"] if chosen.check else ["bfloat16", "float16"],
            late=late, threads=min(12, memory.cores()), done=lambda: done({}),
        )  # fmt: skip
        say(gpu_report.conformance(results["conformance"]))
    save()


def versions() -> dict[str, str]:
    """Of packages, and of the cuDNN that each framework loaded."""
    found = machine.versions()
    with suppress(ImportError, AttributeError, RuntimeError):
        from jax._src.cudnn import fused_attention_stablehlo as private

        found["cudnn of jax"] = str(private.check_cudnn_version())  # type: ignore[no-untyped-call]
    with suppress(ImportError, RuntimeError):
        import torch

        found["cuda of torch"] = str(torch.version.cuda)
        found["cudnn of torch"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes, prints the table last."""
    chosen = parsed(arguments)
    if jax.default_backend() != "gpu" and not chosen.check:
        text = f"no GPU: JAX runs on {jax.default_backend()} (--check runs anywhere)"
        print(text, file=sys.stderr)
        return 2
    if not chosen.check:
        faulthandler.dump_traceback_later(chosen.seconds + GRACE, exit=True)

    def say(text: str) -> None:
        print(f"{perf_counter() - chosen.start:5.0f} s  {text}", file=sys.stderr, flush=True)

    def save() -> None:
        if chosen.write is not None:
            unfinished.keep(chosen.write / "gpu.json", results)

    try:
        results = begun(chosen)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    collect(chosen, results, say, save)
    faulthandler.cancel_dump_traceback_later()
    page = gpu_report.page(results)
    if chosen.write is not None:
        (chosen.write / "gpu.md").write_text(page)
    print(json.dumps(results, indent=1) if chosen.json else page)
    return 1 if any("failed" in row for row in results["conformance"]) else 0


if __name__ == "__main__":
    sys.exit(main())
