"""How fast, and how right, is attention on this GPU, next to every peer?

    python -m experiments.benchmarks.gpu --write

Some twenty minutes on an H200; what is found is written at once, and the table comes last. Where a
command may not take so long, or a kernel breaks the process it is in, go on part by part:

    python -m experiments.benchmarks.gpu --write --resume --seconds 500 --only decode layers shapes
    python -m experiments.benchmarks.gpu --write --resume --seconds 500 --only conformance

Needs jax with CUDA; peers are measured where they are installed.
"""

import os

# torch is in this process too; memory that grows piece by piece has no room for large pieces.
os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", ".70")

import faulthandler
import gc
import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

import jaxmha
from experiments.benchmarks import gpu_cases, gpu_conformance, gpu_peers, gpu_report, gpu_timing
from experiments.benchmarks.gpu_cases import Shape
from jaxmha import Mask
from jaxmha.bench import machine

RESULTS = Path(__file__).parent / "results"
PARTS = ("decode", "layers", "shapes", "conformance")
# One of a kind, for --check.
SMALLEST = [next(s for s in gpu_cases.SHAPES if (s.kind, s.backward) == x) for x in (
    ("full", False), ("causal", True), ("padding", False), ("bias", True),
)]  # fmt: skip
# So long beyond its time a process is taken to hang.
GRACE = 120
Row = dict[str, Any]
Job = tuple[Row, Callable[[], Row]]


def parsed(arguments: Sequence[str] | None = None) -> Namespace:
    """The command line."""
    parser = ArgumentParser(
        prog="python -m experiments.benchmarks.gpu",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=float, default=1500, help="begin nothing after (1500)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--write", type=Path, nargs="?", const=RESULTS, help="folder of results")
    parser.add_argument("--resume", action="store_true", help="measure what is missing there")
    parser.add_argument(
        "--check", action="store_true", help="everything on tiny shapes, on any device"
    )
    chosen = parser.parse_args(arguments)
    if chosen.resume and chosen.write is None:
        parser.error("--resume goes on with what --write has written: give both")
    return chosen


def begun(chosen: Namespace) -> Row:
    """Results with nothing in them, or those that were written so far.

    Raises:
      ValueError: those are of another machine or other versions.
    """
    fresh: Row = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": jax.devices()[0].device_kind,
        "machine": machine.describe(),
        "versions": versions(),
        "chosen": chosen_implementations(),
        "peaks": {},
        "seconds": 0,
        **{part: [] for part in PARTS},
    }
    path = None if chosen.write is None else chosen.write / "gpu.json"
    if not chosen.resume or path is None or not path.exists():
        return fresh
    kept: Row = json.loads(path.read_text())
    for name in ("device", "versions"):
        if kept[name] != fresh[name]:
            raise ValueError(
                f"--resume: {path} is of {name} {kept[name]}, here is {fresh[name]}: write elsewhere"
            )
    return fresh | kept


def fill(
    rows: list[Row],
    jobs: Iterable[Job],
    late: Callable[[], bool],
    done: Callable[[Row], None],
) -> None:
    """Adds to rows what a job finds, in place of what was skipped before.

    After two entries in which every peer failed the process is taken to be broken.
    """
    places = {row["name"]: place for place, row in enumerate(rows)}
    broken = 0
    for head, work in jobs:
        place = places.setdefault(head["name"], len(rows))
        if place < len(rows) and "skipped" not in rows[place]:
            continue
        if late() or broken > 1:
            row = {**head, "skipped": "out of time" if broken < 2 else "all failed before it"}
        else:
            try:
                row = {**head, **work()}
            except Exception as error:  # noqa: BLE001  whatever a framework raises is a result
                row = {**head, "peers": {"jaxmha": {"failed": gpu_timing.why(error)}}}
            failed = all("failed" in x for x in row["peers"].values())
            broken = broken + 1 if failed else 0
            gc.collect()
        rows[place : place + 1] = [row]
        done(row)


def decode_jobs(*, check: bool) -> Iterable[Job]:
    """Steps over a full cache."""
    for sizes in ((2, 32, 4, 2, 8),) if check else gpu_cases.DECODE:
        B, S, N, K, H = sizes
        makers = {name: partial(gpu_peers.decode, name, *sizes) for name in gpu_peers.DECODE_PEERS}
        makers["decode_step"] = partial(gpu_peers.decode_step, *sizes)
        moved = 4.0 * B * (S - 3) * K * H
        head = {"name": f"decode B{B} S{S} N{N}/{K} H{H}", "sizes": sizes}
        yield head, partial(gpu_timing.entry, makers, moved=moved)


def layer_jobs(*, check: bool) -> Iterable[Job]:
    """Whole layers."""
    for T, E, N in ((16, 32, 4),) if check else gpu_cases.LAYERS:
        B = max(1, (32 if check else 16384) // T)
        flop = 8.0 * B * T * E * E + 2.0 * B * T * (T + 1) * E
        makers = {
            name: partial(gpu_peers.layer, name, T, E, N, B, "cpu" if check else "cuda")
            for name in gpu_peers.LAYER_PEERS
        }
        head = {"name": f"layer T{T} E{E}", "T": T, "E": E, "N": N}
        yield head, partial(gpu_timing.entry, makers, flop=flop)


def shape_jobs(*, check: bool) -> Iterable[Job]:
    """Attention alone."""

    def work(this: Shape) -> Row:
        given, device = gpu_peers.inputs(this), "cpu" if check else "cuda"
        makers = {
            name: partial(gpu_peers.program, name, this, given, device)
            for name in gpu_peers.names(this)
        }
        return gpu_timing.entry(makers, flop=this.flop)

    for shape in SMALLEST if check else gpu_cases.SHAPES:
        head = {"name": shape.name, **asdict(shape)}
        yield head, partial(work, tiny(shape) if check else shape)


TIMED = {"decode": decode_jobs, "layers": layer_jobs, "shapes": shape_jobs}


def tiny(shape: Shape) -> Shape:
    """The same on any device in no time."""
    return Shape(shape.kind, 16, 8, 4, 4 if shape.N == shape.K else 2, 32, shape.backward, "all")


def collect(
    chosen: Namespace, results: Row, say: Callable[[str], None], save: Callable[[], None]
) -> None:
    """Adds part by part, as far as the time reaches."""
    start, before = perf_counter(), results["seconds"]

    def late() -> bool:
        return perf_counter() - start > float(chosen.seconds)

    def done(row: Row) -> None:
        results["seconds"] = round(before + perf_counter() - start)
        save()
        if "peers" in row:
            say(gpu_report.line(row["name"], row["peers"]))

    def ceilings() -> None:
        found = gpu_timing.peaks(64 if chosen.check else 8192)
        results["peaks"] = {k: max(x, results["peaks"].get(k, 0.0)) for k, x in found.items()}
        say(f"ceilings: {results['peaks']}")

    ceilings()
    for part in (part for part in TIMED if part in chosen.only):
        fill(results[part], TIMED[part](check=chosen.check), late, done)
    if set(TIMED) & set(chosen.only) and not chosen.check:
        ceilings()  # at the clocks of a device that has worked
    if "conformance" in chosen.only:
        gpu_conformance.run(
            results["conformance"],
            gpu_cases.CASES[1:8:6] if chosen.check else gpu_cases.CASES,
            ["blocked"] if chosen.check else ["cudnn", "tokamax", "blocked"],
            ["bfloat16"] if chosen.check else ["bfloat16", "float16"],
            late=late,
            threads=min(12, machine.threads()),
            done=done,
        )
        say(gpu_report.conformance(results["conformance"]))
    save()


def chosen_implementations() -> dict[str, str]:
    """The implementation that jaxmha chooses for each shape on this device, for the report."""
    found = {}
    for shape in gpu_cases.SHAPES:
        make: Any = jax.ShapeDtypeStruct
        heads = [make((shape.B, shape.T, n, shape.H), jnp.bfloat16) for n in (shape.N, shape.K)]
        bias = make((1, shape.N, shape.T, shape.T), jnp.bfloat16) if shape.kind == "bias" else None
        mask = None
        if shape.lengths is not None:
            lengths = jnp.asarray(shape.lengths)
            mask = Mask.lengths(key_value=lengths)
            if shape.kind == "padding":
                mask = Mask.padding(key_value=jnp.arange(shape.T)[None] < lengths[:, None])
        explained = jaxmha.explain(
            heads[0], heads[1], heads[1], bias, mask, is_causal=shape.kind == "causal"
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
    for name in ("torch", "flax.linen", "flax.nnx"):  # before threads import them
        try:
            import_module(name)
        except Exception as error:  # noqa: BLE001  its peers will say it too
            found[f"{name} failed"] = gpu_timing.why(error)
    try:
        import torch

        found["cuda of torch"] = str(torch.version.cuda)
        found["cudnn of torch"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    except (ImportError, RuntimeError):
        pass
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes, prints the table last."""
    chosen = parsed(arguments)
    if jax.default_backend() != "gpu" and not chosen.check:
        text = f"no GPU: JAX runs on {jax.default_backend()} (--check runs anywhere)"
        print(text, file=sys.stderr)
        return 2
    start = perf_counter()
    if not chosen.check:
        faulthandler.dump_traceback_later(chosen.seconds + GRACE, exit=True)

    def say(text: str) -> None:
        print(f"{perf_counter() - start:5.0f} s  {text}", file=sys.stderr, flush=True)

    def save() -> None:
        if chosen.write is not None:
            chosen.write.mkdir(parents=True, exist_ok=True)
            part = chosen.write / "gpu.json.part"
            part.write_text(json.dumps(results, indent=1) + "\n")
            part.replace(chosen.write / "gpu.json")

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
