"""Where the time of a program goes, by kind of work.

    python -m experiments.profile.kernels layer-forward-plain-B1-T2048-E512
    python -m experiments.profile.kernels --peer flax-nnx --json layer-*-causal-B1-T2048-E512

XLA's own trace of each kernel; kinds from what the compiled program computes in it. Kernels of
one program may run side by side, so their times may add up to more than its own.
"""

import json
import re
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import defaultdict
from pathlib import Path
from typing import Any

from experiments.benchmarks import cases, data, programs
from experiments.benchmarks.peers import ON_JAX, OURS

TRACED = (
    "layer-forward-plain-B2-T512-E512",
    "layer-forward-plain-B32-T512-E512",
    "layer-forward-plain-B1-T2048-E512",
    "layer-forward-plain-B1-T4096-E512",
    "layer-forward-causal-B1-T2048-E512",
    "layer-forward-padded-B8-T512-E512",
    "layer-backward-plain-B2-T512-E512",
    "layer-backward-plain-B1-T2048-E512",
    "layer-backward-cross-B2-T1024-S77-E512",
)
CALLS = 5
# The first that a kernel has decides; what has none of them moves data.
KINDS: tuple[tuple[str, str], ...] = (
    (" dot(", "products"),
    (" exponential(", "exponentials"),
    (" reduce(", "sums and maxima"),
    (" while(", "loops"),
    (" conditional(", "loops"),
    (" call(", "loops"),
)
MOVES = "layout, conditions and the rest"


def kinds(text: str) -> dict[str, str]:
    """The kind of every instruction of a compiled program, by name.

    >>> kinds("%a (p: f32[2]) -> f32[2] {\\n  ROOT %e = f32[2] exponential(%p)\\n}\\n"
    ...       "ENTRY %m (p: f32[2]) -> f32[2] {\\n  ROOT %f = f32[2] fusion(%p), calls=%a\\n}")["f"]
    'exponentials'
    """
    bodies: dict[str, str] = {}
    lines: dict[str, str] = {}
    for name, body in re.findall(
        r"^(?:ENTRY )?%(\S+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL
    ):
        bodies[name] = body
        for line in body.splitlines():
            if found := re.match(r"\s+(?:ROOT )?%(\S+) = ", line):
                lines[found[1]] = line
    called = {
        name: re.search(r" fusion\(.*calls=%([^\s,}]+)", line) for name, line in lines.items()
    }
    whole = {name: lines[name] + (bodies.get(c[1], "") if c else "") for name, c in called.items()}
    return {
        name: next((kind for sign, kind in KINDS if sign in work), MOVES)
        for name, work in whole.items()
    }


def profile(peer: str, case: cases.Case) -> dict[str, Any]:
    """Milliseconds of a call, and of its kernels by kind, under the trace.

    Raises:
      ValueError: the peer has no compiled program.
    """
    import jax

    if peer not in (OURS, *ON_JAX):
        raise ValueError(f"{peer} has no compiled program to look at")
    program = programs.program(peer, case, data.make(case))
    program.compile()
    assert program.text is not None
    program.run()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            for _ in range(CALLS):
                program.run()
            seconds = (time.perf_counter() - start) / CALLS
        (path,) = Path(folder).rglob("*.xplane.pb")
        traced = jax.profiler.ProfileData.from_file(str(path))
    known, spent = kinds(program.text()), defaultdict[str, float](float)
    for plane in traced.planes:
        for line in plane.lines:
            for event in line.events:
                operation = dict(event.stats).get("hlo_op")
                if operation is not None:
                    spent[known.get(str(operation), MOVES)] += event.duration_ns / 1e6 / CALLS
    spent.pop("loops", None)  # their bodies are there
    return {"case": case.name, "peer": peer, "ms": 1e3 * seconds, "kernels": dict(spent)}


def main() -> None:
    """Prints a table or JSON."""
    parser = ArgumentParser(
        prog="python -m experiments.profile.kernels",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("case", nargs="+", help="part of a name; * is a wildcard")
    parser.add_argument("--peer", default=OURS, choices=(OURS, *ON_JAX))
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    chosen = parser.parse_args()
    try:
        found = [profile(chosen.peer, case) for case in cases.select(chosen.case, quick=False)]
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    if chosen.json:
        print(json.dumps(found, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    columns = [*dict.fromkeys(kind for _, kind in KINDS if kind != "loops"), MOVES]
    table = Table("case", "ms", *columns, caption=f"{chosen.peer}, milliseconds of a call")
    for entry in found:
        times = (entry["kernels"].get(kind, 0.0) for kind in columns)
        table.add_row(entry["case"], *(f"{x:.1f}" for x in (entry["ms"], *times)))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
