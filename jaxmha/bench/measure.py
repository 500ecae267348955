"""Measures cases in interleaved rounds: A B C, B C A, so that each round begins with another peer.
One process works at a time."""

import json
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from jaxmha.bench import sgemm
from jaxmha.bench.case import Case
from jaxmha.bench.fleet import Fleet

# A machine whose plain product is slower than its best by more than this was disturbed.
DISTURBED = 1.3
ATTEMPTS = 2
# Attempts of a case in all runs that continue one another; then its best is kept, marked as noisy.
MOST_ATTEMPTS = 6
# Rounds that a slow peer gets even if they take longer than its budget.
FEWEST = 3
# After a case, a process whose JAX still reserves more bytes of a device is ended: peers share it.
MOST_HELD = 2**31

# Fields of the reply to `prepare` that become results.
KEPT = ("error", "gradient_error", "compile", "bytes")
# Field of the reply to `memory` -> its field in the results.
MEMORY = {"bytes": "memory", "failed": "memory_failed"}

# Nothing measured yet.
NOTHING: dict[str, Any] = {"sgemm": {}, "quiet": {}, "cases": []}

Say = Callable[[str], None]


class Probe:
    """Rates of plain matrix products, by backend. `best`: the highest of any shape, to which results
    are compared. `quiet`: the highest of the square product; if it is measured again and is slower,
    other programs disturb the machine."""

    def __init__(self, fleet: Fleet, backends: Sequence[str], known: dict[str, Any]) -> None:
        self.fleet, self.backends = fleet, backends
        self.best = dict.fromkeys(backends, 0.0) | known["sgemm"]
        self.quiet = dict.fromkeys(backends, 0.0) | known["quiet"]

    def rates(self, shape: sgemm.Shape) -> dict[str, float]:
        """GFLOP/s of one product, by backend."""
        found = {}
        for backend in self.backends:
            reply = self.fleet[f"sgemm-{backend}"].ask("sgemm", shape=shape)
            if "failed" in reply:
                raise RuntimeError(f"sgemm in {backend}: {reply['failed']}")
            found[backend] = reply["rate"]
            self.best[backend] = max(self.best[backend], reply["rate"])
            if shape == sgemm.SQUARE:
                self.quiet[backend] = max(self.quiet[backend], reply["rate"])
        return found


def measure(
    cases: Sequence[Case],
    peers: Sequence[str],
    *,
    rounds: int,
    budget: float,
    threads: int,
    platform: str | None = "cpu",
    backends: Sequence[str],
    memory: Callable[[Case], bool] = lambda case: False,
    takes: Callable[[str, Case], bool] = lambda peer, case: True,
    say: Say = lambda line: None,
    step: Say = lambda line: None,
    attempts: int = ATTEMPTS,
    known: dict[str, Any] = NOTHING,
    answered: Sequence[Case] = (),
    late: Callable[[], bool] = lambda: False,
    done: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Measures every case, with one process per peer, and the memory of some, in new processes.

    `budget`: seconds after which a peer gets no more than `FEWEST` rounds of a case.
    `known`: results of an earlier call; only cases that it lacks, or that were disturbed, are
    measured, at most `MOST_ATTEMPTS` times in all. `answered`: the cases to return results of,
    default `cases`. No case is begun once `late()` is True. `say` receives the name of every case,
    `step` a description of each step, and `done`, after each case, all results so far. A case that
    was disturbed is measured again, at most `attempts` times.
    """
    measured = {entry["name"]: entry for entry in known["cases"]}

    def found() -> dict[str, Any]:
        for entry in measured.values():  # relative to the best of all runs
            entry["noisy"] = _worst(probe, entry) > DISTURBED
        entries = [measured[case.name] for case in answered or cases if case.name in measured]
        return {"sgemm": _rounded(probe.best), "quiet": _rounded(probe.quiet), "cases": entries}

    with Fleet(threads, platform) as fleet, tempfile.TemporaryDirectory() as folder:
        probe = Probe(fleet, backends, known)
        say("machine")
        probe.rates(sgemm.SQUARE)
        for case in cases:
            before = measured.get(case.name)
            if late() or (before and _finished(probe, before)):
                done(found())
                continue
            say(case.name)
            expected = Path(folder) / "expected.npz"
            asked = [peer for peer in peers if takes(peer, case)]
            entry, live = _case(
                case, asked, fleet, probe, expected, rounds, budget, step=step, most=attempts
            )
            for peer in live if memory(case) else ():
                grown = fleet.fresh(peer, "memory", case=case.as_dict())
                entry["peers"][peer] |= {MEMORY[key]: value for key, value in grown.items()}
            tried = entry["attempts"] + (before or {}).get("attempts", 0)
            if before is None or _worst(probe, entry) < _worst(probe, before):
                measured[case.name] = entry
            measured[case.name] |= {"attempts": tried}
            done(found())
        return found()


def _case(
    case: Case,
    peers: Sequence[str],
    fleet: Fleet,
    probe: Probe,
    expected: Path,
    rounds: int,
    budget: float,
    *,
    step: Say,
    most: int,
) -> tuple[dict[str, Any], list[str]]:
    """Measures one case; returns its entry in the results, and the peers that computed it."""
    step("the float64 output")
    with ThreadPoolExecutor(len(peers) + 1) as pool:  # all start at once: none is timed yet
        if fleet.platform != "cpu":
            for peer in peers:
                pool.submit(fleet[peer].ask, "draw", case=case.as_dict())
        made = fleet["oracle"].ask("expect", case=case.as_dict(), path=str(expected))
    unchecked = {"failed": f"no float64 output to compare with: {made.get('failed')}"}
    ready, ask = {}, {"case": case.as_dict(), "expected": str(expected)}
    for number, peer in enumerate(peers, 1):
        step(f"{peer}, {number} of {len(peers)}: compile and check")
        ready[peer] = unchecked if "failed" in made else fleet[peer].ask("prepare", **ask)
    results = {peer: reply for peer, reply in ready.items() if "failed" in reply}
    live = {peer: reply for peer, reply in ready.items() if "failed" not in reply}
    attempts = [_rounds(case, live, fleet, probe, rounds, budget, step)]
    while _worst(probe, attempts[-1]) > DISTURBED and len(attempts) < most:
        for peer, found in attempts[-1]["peers"].items():
            if "failed" in found:
                results[peer] = found
                del live[peer]
        attempts.append(_rounds(case, live, fleet, probe, rounds, budget, step))
    chosen = min(attempts, key=lambda attempt: _worst(probe, attempt))
    for peer, reply in live.items():
        kept = {key: reply[key] for key in KEPT if key in reply}
        results[peer] = kept | chosen["peers"][peer]
    for peer in live:
        if fleet[peer].ask("release").get("held", 0) > MOST_HELD:
            fleet[peer].stop()
    entry = {
        "name": case.name,
        "case": case.as_dict(),
        "gflop": case.flop * 1e-9,
        "sgemm": {backend: median(rates) for backend, rates in chosen["sgemm"].items()},
        "probes": chosen["probes"],
        "attempts": len(attempts),
        "date": today(),
        "peers": {peer: _rounded(results[peer]) for peer in peers},
    }
    return entry, list(live)


def _rounds(
    case: Case,
    live: dict[str, Any],
    fleet: Fleet,
    probe: Probe,
    rounds: int,
    budget: float,
    step: Say,
) -> dict[str, Any]:
    """Runs all rounds of a case, between two probes of the machine; each round of a layer also times
    the plain product of its projections."""
    seconds: dict[str, list[float]] = {peer: [] for peer in live}
    failed: dict[str, str] = {}
    products: dict[str, list[float]] = {}
    probes = [probe.rates(sgemm.SQUARE)]
    for number in range(rounds):
        step(f"round {number + 1} of {rounds}")
        for peer in _turned(list(live), number):
            reply = live[peer]
            slow = number >= FEWEST and number * reply["estimate"] > budget
            if peer in failed or slow:
                continue
            timed = fleet[peer].ask("round")
            if "failed" in timed:
                failed[peer] = timed["failed"]
            else:
                seconds[peer].append(timed["seconds"])
        if case.scope == "layer":
            for backend, rate in probe.rates(sgemm.projection(case)).items():
                products.setdefault(backend, []).append(rate)
    probes.append(probe.rates(sgemm.SQUARE))
    return {
        "peers": {
            peer: {"failed": failed[peer]} if peer in failed else {"seconds": seconds[peer]}
            for peer in live
        },
        "sgemm": products,
        "probes": probes,
    }


def _turned(peers: list[str], number: int) -> list[str]:
    start = number % max(len(peers), 1)
    return peers[start:] + peers[:start]


def today() -> str:
    """The day, in UTC."""
    return datetime.now(UTC).date().isoformat()


def last_date(entries: Sequence[dict[str, Any]], otherwise: str) -> str:
    """The latest day of some measurements; `otherwise` if none has a date.

    >>> last_date([{"date": "2026-01-03"}, {"date": "2026-01-02"}, {}], "2026-02-01")
    '2026-01-03'
    """
    return max((entry["date"] for entry in entries if "date" in entry), default=otherwise)


def _finished(probe: Probe, entry: dict[str, Any]) -> bool:
    """True if a case was measured undisturbed, or `MOST_ATTEMPTS` times: it is not measured again."""
    return _worst(probe, entry) <= DISTURBED or entry.get("attempts", 0) >= MOST_ATTEMPTS


def _worst(probe: Probe, attempt: dict[str, Any]) -> float:
    return max(_slowdown(probe, rates) for rates in attempt["probes"])


def _slowdown(probe: Probe, rates: dict[str, float]) -> float:
    return float(max(probe.quiet[backend] / rate for backend, rate in rates.items()))


def _rounded(value: Any) -> Any:
    """Rounds every float to four digits, more than a clock is good for."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.4g}"))
