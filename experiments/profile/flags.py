"""What XLA's process-wide flags do to jaxmha on this CPU. The library never sets one.

    python -m experiments.profile.flags
    python -m experiments.profile.flags --rounds 5 --json > flags.json

Every setting runs in processes of its own, in turns; a call is jaxmha's, checked against float64.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from datetime import UTC, datetime
from statistics import median
from typing import Any

from experiments import machine

FLAGS: dict[str, str] = {
    "none": "",
    "vectors of 512 bits": "--xla_cpu_prefer_vector_width=512",
    "fast math": "--xla_cpu_enable_fast_math=true",
    "no fused kernels of YNNPACK": "--xla_cpu_experimental_ynn_fusion_type=",
    "no concurrency between kernels": "--xla_cpu_enable_concurrency_optimized_scheduler=false",
}
CASES = (
    "layer-forward-plain-B8-T128-E512",
    "layer-forward-plain-B1-T2048-E512",
    "layer-forward-causal-B1-T2048-E512",
    "layer-backward-plain-B2-T512-E512",
)


def measured(flags: str) -> dict[str, tuple[float, float]]:
    """Seconds of a call and largest error of every case, by name, in a process of its own.

    Raises:
      ValueError: the process ended with an error, or a case was not computed.
    """
    command = [sys.executable, "-m", "experiments.benchmarks", "--json", "--peer", "jaxmha"]
    command += ["--rounds", "3", *(part for case in CASES for part in ("--case", case))]
    ran = subprocess.run(
        command,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise ValueError(f"XLA_FLAGS={flags}: {ran.stderr.strip().splitlines()[-1]}")
    found: dict[str, tuple[float, float]] = {}
    for entry in json.loads(ran.stdout)["cases"]:
        ours = entry["peers"]["jaxmha"]
        if "failed" in ours:
            raise ValueError(f"XLA_FLAGS={flags}: {ours['failed']}")
        found[entry["name"]] = median(ours["seconds"]), ours["error"]
    return found


def collect(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Medians of seconds and errors, by setting and case; says on stderr what it is at.

    Raises:
      ValueError: a process ended with an error.
    """
    runs: dict[str, list[dict[str, tuple[float, float]]]] = {name: [] for name in FLAGS}
    for i in range(rounds):
        for name, flags in FLAGS.items():
            print(f"flags: {name}, round {i + 1} of {rounds}", file=sys.stderr, flush=True)
            runs[name].append(measured(flags))
    return {
        name: {
            case: {
                "seconds": median(run[case][0] for run in found),
                "error": median(run[case][1] for run in found),
            }
            for case in CASES
        }
        for name, found in runs.items()
    }


def relative(results: dict[str, dict[str, dict[str, float]]]) -> dict[str, list[str]]:
    """Time and error of every setting relative to none, by case, as cells of a table.

    >>> one, two = {"x": {"seconds": 2.0, "error": 1.0}}, {"x": {"seconds": 1.0, "error": 3.0}}
    >>> relative({"none": one, "fast": two})
    {'none': ['1.00 / 1.00'], 'fast': ['0.50 / 3.00']}
    """
    none = results["none"]
    return {
        name: [
            " / ".join(f"{found[key] / none[case][key]:.2f}" for key in ("seconds", "error"))
            for case, found in by_case.items()
        ]
        for name, by_case in results.items()
    }


def main() -> None:
    """Prints a table or JSON."""
    parser = ArgumentParser(
        prog="python -m experiments.profile.flags",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes per setting")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    chosen = parser.parse_args()
    try:
        table = collect(max(chosen.rounds, 1))
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    if chosen.json:
        about: dict[str, Any] = {"machine": machine.describe(), "versions": machine.versions()}
        date = datetime.now(UTC).date().isoformat()
        print(json.dumps({"date": date, **about, "flags": FLAGS, "results": table}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    shown = Table("flags", *CASES, caption="time relative to none / error relative to none")
    for name, cells in relative(table).items():
        shown.add_row(name, *cells)
    Console(width=160).print(shown)


if __name__ == "__main__":
    main()
