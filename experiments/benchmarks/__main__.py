"""How fast is jaxmha on this CPU, next to every peer?

Every peer works in a process of its own on the same arrays, in turns; each output is checked
against float64 before it is timed. Peers that are not installed are listed as such.
"""

import json
import sys
import time
from argparse import Namespace
from importlib.util import find_spec
from typing import Any

from experiments import frame
from experiments.benchmarks import report, unfinished
from experiments.benchmarks import statistics as stats
from experiments.benchmarks.cases import select
from jaxmha.bench import measure, memory, run, sgemm
from jaxmha.bench.case import Case
from jaxmha.bench.peers import PEERS

EXAMPLES = """examples:
  python -m experiments.benchmarks                             some cases of every kind, minutes
  python -m experiments.benchmarks --full --rounds 9           every case, hours
  python -m experiments.benchmarks --full --resume --minutes 30   go on with it, for half an hour
  python -m experiments.benchmarks --full --again --case causal   these again, in the stored page
  python -m experiments.benchmarks --case layer-*-causal --peer jaxmha --peer torch-sdpa
  python -m experiments.benchmarks --case T4096 --json > results.json
"""
ROUNDS = 7
BUDGET = {"quick": 3.0, "full": 600.0, "chosen": 60.0}


def parsed(arguments: list[str] | None = None) -> Namespace:
    """The command line; exits with 2 and one message where it is wrong."""
    parser = frame.parser("benchmarks", __doc__, EXAMPLES)
    parser.add_argument("--full", action="store_true", help="every case")
    parser.add_argument("--case", action="append", default=[], help="part of a name, with *")
    parser.add_argument("--peer", action="append", default=[], help=f"of {', '.join(PEERS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    parser.add_argument("--threads", type=int, help="of every peer, default all cores")
    again = "measure the --case, or all marked ~, again; in the end put them among those stored"
    parser.add_argument("--resume", action="store_true", help="what is missing or was disturbed")
    parser.add_argument("--again", action="store_true", help=again)
    parser.add_argument("--minutes", type=float, help="begin no case after so long")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    chosen = parser.parse_args(arguments)
    try:
        chosen.cases = select(chosen.case, quick=not chosen.full)
        check(chosen)
        settle(chosen)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    return chosen


def check(chosen: Namespace) -> None:
    """Raises ValueError that names the argument and what it may be."""
    for peer in chosen.peer:
        if peer not in PEERS:
            raise ValueError(f"--peer {peer!r} is unknown: it may be {', '.join(PEERS)}")
    run.check(chosen.peer, chosen.threads)
    if not 1 <= chosen.rounds <= 1000:
        raise ValueError(f"--rounds must be between 1 and 1000, got {chosen.rounds}")
    if chosen.minutes is not None and not chosen.minutes > 0:
        raise ValueError(f"--minutes must be more than 0, got {chosen.minutes:g}")
    if chosen.again and (chosen.peer or chosen.resume or chosen.minutes):
        raise ValueError(
            "--again measures every peer of its cases: leave --peer, --resume and --minutes out"
        )
    if chosen.write and not chosen.again and (chosen.case or chosen.peer):
        raise ValueError("--write stores whole selections: leave --case and --peer out")


def settle(chosen: Namespace) -> None:
    """Adds what follows from the options, and what an earlier run found.

    Raises:
      ValueError: that run cannot be gone on with.
    """
    some = not chosen.again and (chosen.case or chosen.peer)
    chosen.selection = "chosen" if some else "full" if chosen.full else "quick"
    chosen.threads = chosen.threads or memory.cores()
    chosen.peers = [peer for peer in PEERS if not chosen.peer or peer in chosen.peer]
    chosen.kept = unfinished.BUILD / f"{chosen.selection}.json"
    chosen.identity = unfinished.identity(
        rounds=chosen.rounds,
        threads=chosen.threads,
        peers={peer: PEERS[peer].absent for peer in chosen.peers},
        cases=[case.name for case in chosen.cases],
    )
    chosen.known, chosen.spent = measure.NOTHING, 0.0
    chosen.answered, chosen.date = chosen.cases, measure.today()
    chosen.digest = chosen.identity["sources"]
    chosen.command = " ".join(["python -m experiments.benchmarks", *sys.argv[1:]])
    if chosen.resume:
        chosen.known, chosen.spent = unfinished.resume(chosen.kept, chosen.identity)
    elif chosen.again:
        replace_some(chosen)
    if not chosen.list:
        frame.writable(chosen.kept.parent, [chosen.kept.name])
        if chosen.write:
            frame.writable(report.RESULTS, report.files(chosen.selection))
            if find_spec("matplotlib") is None:
                raise ValueError("--write draws figures: matplotlib is not installed")


def replace_some(chosen: Namespace) -> None:
    """Of the stored cases those that were asked for, or marked, are not known any more.

    Raises:
      ValueError: there are none, or they are another machine's, or of other versions.
    """
    stored = unfinished.stored(report.RESULTS / f"{chosen.selection}.json", chosen.identity)
    entries = {entry["name"]: entry for entry in stored["cases"]}
    stale = {name for name, e in entries.items() if chosen.case or stats.disturbed(e)}
    chosen.cases = [case for case in chosen.cases if case.name in stale]
    if not chosen.cases:
        raise ValueError("--again: none of the stored cases is named by --case, or marked ~")
    again = {case.name for case in chosen.cases}
    chosen.known = stored | {"cases": [e for name, e in entries.items() if name not in again]}
    chosen.answered = select(quick=not chosen.full)
    chosen.spent, chosen.write = stored["seconds"], True
    chosen.date, chosen.command = stored["date"], stored["command"]
    chosen.digest = stored.get("digest")


def collect(chosen: Namespace) -> dict[str, Any]:
    """Measures, with a bar on a terminal and a line per case elsewhere; adds what ran where."""
    full = chosen.selection != "quick"
    start = time.perf_counter()

    def passed() -> float:
        return time.perf_counter() - start

    with frame.bars(cases=len(chosen.cases) + 1) as tick:

        def done(found: dict[str, Any]) -> None:
            if not chosen.again:
                seconds = chosen.spent + passed()
                key = chosen.identity
                unfinished.keep(chosen.kept, {"identity": key, "seconds": seconds, "found": found})

        results = measure.measure(
            sorted(chosen.cases, key=lambda case: case.flop),
            [peer for peer in chosen.peers if not PEERS[peer].absent],
            rounds=chosen.rounds, budget=BUDGET[chosen.selection], threads=chosen.threads,
            backends=[b for b in sgemm.BACKENDS if b == "xla" or not PEERS["torch-sdpa"].absent],
            memory=lambda case: case.measures_memory and (full or case.direction == "backward"),
            takes=lambda peer, case: PEERS[peer].takes(case),
            say=lambda text: tick("cases", f"{passed():6.0f} s  {text}"),
            known=chosen.known, answered=chosen.answered, done=done,
            late=lambda: passed() > 60 * (chosen.minutes or float("inf")),
        )  # fmt: skip
    again = {case.name for case in chosen.cases} if chosen.again else ()
    for entry in results["cases"]:
        if entry["name"] in again:
            entry |= {"again": measure.today(), "digest": chosen.identity["sources"]}
    return {
        "command": chosen.command,
        "selection": chosen.selection,
        "seed": "crc32 of the name of the case",
        "date": chosen.date if chosen.again else measure.last_date(results["cases"], chosen.date),
        "digest": chosen.digest,
        "seconds": round(chosen.spent + passed()),
        "asked": len(chosen.answered),
        **{name: chosen.identity[name] for name in ("machine", "versions", "settings", "native")},
        "threads": chosen.threads,
        "rounds": chosen.rounds,
        "peers": {p: {"about": PEERS[p].about, "absent": PEERS[p].absent} for p in chosen.peers},
        **results,
    }


def main() -> None:
    """Measures, prints, and writes where asked."""
    chosen = parsed()
    if chosen.list:
        print("\n".join(map(described, chosen.cases)))
        return
    try:
        results = collect(chosen)
    except KeyboardInterrupt:
        print("stopped; --resume goes on", file=sys.stderr)
        sys.exit(130)
    if chosen.json:
        print(json.dumps(results, indent=1))
    else:
        frame.show(report.page(results, f"{chosen.selection}.png"), width=190)
    if chosen.write:
        print(report.write(results), file=sys.stderr)


def described(case: Case) -> str:
    """A line of `--list`."""
    return f"{case.name:48} {case.flop * 1e-9:9.3g} GFLOP{'  quick' if case.quick else ''}"


if __name__ == "__main__":
    main()
