"""All experiments on one page: what the code has outgrown is run again, the rest is shown as stored.

Writes build/report/index.html, which needs no network and no other file, and the Markdown pages in
experiments/ that are made from results.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments import frame, records
from experiments.report import build, refresh, registry
from experiments.report.registry import EXPERIMENTS, Entry

EXAMPLES = """examples:
  python -m experiments.report                    seconds when nothing changed, else minutes
  python -m experiments.report --keep             from the results as they are
  python -m experiments.report --remake numerics  this one in any case
  python -m experiments.report --remake all       from nothing
  python -m experiments.report --check            what is stale; exit code 1 if anything is
  python -m experiments.report --json             every experiment, for scripts
"""
TARGET = records.ROOT / "build" / "report" / "index.html"


def main(arguments: list[str] | None = None) -> int:
    """0: fine; 1: something is stale (--check) or failed; 2: bad input, a damaged file among it."""
    parser = frame.bare("report", __doc__, EXAMPLES)
    remade = [experiment.name for experiment in EXPERIMENTS if experiment.seconds is not None]
    parser.add_argument("--keep", action="store_true", help="run nothing")
    parser.add_argument("--remake", action="append", default=[], choices=[*remade, "all"])
    parser.add_argument("--check", action="store_true", help="say what is stale, write nothing")
    parser.add_argument("--json", action="store_true", help="list experiments, write nothing")
    parser.add_argument("--output", type=Path, default=TARGET, help=f"default {TARGET.name}")
    options = parser.parse_args(arguments)
    if options.keep and options.remake:
        parser.error("--keep runs nothing: leave it or --remake out")
    if options.json:
        print(json.dumps([listed(experiment) for experiment in EXPERIMENTS], indent=1))
        return 0
    if options.check:
        return check()
    try:
        frame.writable(options.output.absolute().parent, [options.output.name])
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    chosen = set(remade if "all" in options.remake else options.remake)
    return make(options.output, chosen, keep=options.keep)


def make(target: Path, chosen: set[str], *, keep: bool) -> int:
    """Runs what is stale or chosen, then writes everything."""
    start = time.monotonic()
    console = Console(stderr=True)
    again = [e for e in EXPERIMENTS if not keep and (e.name in chosen or registry.stale(e))]
    damage = damaged([e for e in EXPERIMENTS if e not in again])
    failed = {} if damage else refresh.remake(again, console)
    for name, message in failed.items():
        console.print(f"{name} failed: {message}", style="red", highlight=False, markup=False)
    damage = damage or damaged(again)
    if damage:
        console.print("\n".join(damage), style="red", highlight=False, markup=False, soft_wrap=True)
        return 2
    for path, text in build.files().items():
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(build.page())
    ran = f"{len(again) - len(failed)} of {len(again)} run again, " if again else ""
    console.print(f"{target}: {ran}{time.monotonic() - start:.0f} s", highlight=False)
    return int(bool(failed))


def damaged(experiments: Sequence[Entry]) -> list[str]:
    """Lines on those whose page cannot be made, with what makes them again."""
    return [
        f"{experiment.name}: {reason}; {experiment.page.command} makes it again"
        for experiment in experiments
        if (reason := registry.damaged(experiment)) is not None
    ]


def check() -> int:
    """1 where a result is older than its sources, or a page than its results."""
    reasons = [
        f"{experiment.name}: {reason}"
        for experiment in EXPERIMENTS
        if (reason := registry.stale(experiment)) is not None
    ]
    damage = damaged(EXPERIMENTS)
    reasons += [line for line in damage if not line.startswith(tuple(f"{r};" for r in reasons))]
    reasons += [
        f"{path.relative_to(records.ROOT)} is not what the results make"
        for path, text in ({} if damage else build.files()).items()
        if not path.is_file() or path.read_text() != text
    ]
    print("\n".join(reasons) or "nothing is stale")
    return int(bool(reasons))


def listed(experiment: Entry) -> dict[str, Any]:
    """The question, result, conclusion and state of one experiment, for JSON."""
    damage = registry.damaged(experiment)
    found = None if damage else registry.found(experiment)
    return {
        "name": experiment.name,
        "question": experiment.page.question,
        "command": experiment.page.command,
        "result": records.shown(experiment.results),
        "date": None if found is None else build.date(found),
        "conclusion": None if found is None else experiment.page.conclusion(found),
        "remade": experiment.seconds is not None,
        "stale": damage or registry.stale(experiment) or registry.outgrown(experiment),
    }


if __name__ == "__main__":
    sys.exit(main())
