"""Which flags of XLA and settings of the allocator help on this CPU, and how long does a call take
on the smallest arrays?

Both belong to the process: the library sets none of them. Every setting runs in processes of its
own, in turns, and the fastest of them counts, because a disturbance only adds time. Outputs are
checked against float64.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from experiments import command, machine, tables
from experiments.environment import calls

HERE = Path(__file__).parent
EXAMPLES = """examples:
  python -m experiments.environment                    ten minutes on a quiet machine
  python -m experiments.environment --rounds 5 --json
"""
NONE = "none"
SETTINGS: dict[str, dict[str, str]] = {
    NONE: {},
    "vectors of 512 bits": {"XLA_FLAGS": "--xla_cpu_prefer_vector_width=512"},
    "fast math": {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"},
    "no fused kernels of YNNPACK": {"XLA_FLAGS": "--xla_cpu_experimental_ynn_fusion_type="},
    "no concurrency between kernels": {
        "XLA_FLAGS": "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    },
    # By default glibc returns blocks above 32 MiB to the kernel at every free.
    "temporaries kept by glibc": {
        "MALLOC_MMAP_THRESHOLD_": "4294967296",
        "MALLOC_TRIM_THRESHOLD_": "8589934592",
    },
}
CASES = (
    "layer-forward-plain-B8-T128-E512",
    "layer-forward-plain-B1-T2048-E512",
    "layer-forward-plain-B32-T512-E512",
    "layer-forward-causal-B1-T2048-E512",
    "layer-forward-padded-B4-T1024-E512",
    "layer-backward-plain-B2-T512-E512",
    "layer-backward-plain-B1-T2048-E1024",
)
Found = dict[str, dict[str, float]]


def measured(variables: dict[str, str]) -> Found:
    """Seconds of a call and largest error of every case, by name, in a process of its own.

    Raises:
      ValueError: the process ended with an error, or a case was not computed.
    """
    command = [sys.executable, "-m", "experiments.benchmarks", "--json", "--peer", "jaxmha"]
    command += ["--rounds", "3", *(part for case in CASES for part in ("--case", case))]
    alone = {name: x for name, x in os.environ.items() if name not in machine.settings()}
    ran = subprocess.run(
        command, env=alone | variables, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise ValueError(f"{shown(variables)}: {ran.stderr.strip().splitlines()[-1]}")
    found: Found = {}
    for entry in json.loads(ran.stdout)["cases"]:
        ours = entry["peers"]["jaxmha"]
        if "failed" in ours:
            raise ValueError(f"{shown(variables)}: {ours['failed']}")
        found[entry["name"]] = {"seconds": median(ours["seconds"]), "error": ours["error"]}
    return found


def collect(rounds: int) -> dict[str, Any]:
    """Settings, seconds (the least of all rounds) and errors by setting and case, and calls.

    Progress goes to stderr.

    Raises:
      ValueError: a process ended with an error.
    """
    runs: dict[str, list[Found]] = {name: [] for name in SETTINGS}
    for i in range(rounds):
        for name, variables in SETTINGS.items():
            print(f"settings: {name}, round {i + 1} of {rounds}", file=sys.stderr, flush=True)
            runs[name].append(measured(variables))
    results = {
        name: {
            case: {key: min(run[case][key] for run in found) for key in ("seconds", "error")}
            for case in CASES
        }
        for name, found in runs.items()
    }
    return {"rounds": rounds, "settings": SETTINGS, "results": results, "calls": calls.collect()}


def shown(variables: dict[str, str]) -> str:
    """As a shell has them.

    >>> shown({"A": "1", "B": ""})
    'A=1 B='
    """
    return " ".join(f"{name}={value}" for name, value in variables.items())


def table(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Time and error of every setting relative to none, by case.

    >>> one, two = {"x": {"seconds": 2.0, "error": 1.0}}, {"x": {"seconds": 1.0, "error": 3.0}}
    >>> settings = {"none": {}, "fast": {"A": "1"}}
    >>> table({"settings": settings, "results": {"none": one, "fast": two}})
    [('setting', '`x`'), ('fast (`A=1`)', '0.50 / 3.00')]
    """
    results = found["results"]
    none = results[NONE]
    rows: list[tuple[str, ...]] = [("setting", *(f"`{case}`" for case in none))]
    for name, by_case in results.items():
        if name != NONE:
            ratios = [[x[key] / none[case][key] for key in x] for case, x in by_case.items()]
            cells = (" / ".join(f"{x:.2f}" for x in both) for both in ratios)
            rows.append((f"{name} (`{shown(found['settings'][name])}`)", *cells))
    return rows


def show(found: dict[str, Any]) -> None:
    """Both tables."""
    from rich.console import Console

    console = Console()
    console.width = max(console.width, 160)  # the settings need it
    console.print(tables.terminal("time / error, relative to none", table(found)))
    console.print(tables.terminal("microseconds of a call", calls.table(found["calls"])))


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints, and writes where requested."""
    command.in_rounds(HERE, __doc__, EXAMPLES, arguments, collect, show, rounds=3)


if __name__ == "__main__":
    main()
