"""Measures one case on this machine, for `jaxmha bench`."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from jaxmha.bench import machine, measure, memory
from jaxmha.bench.case import Case
from jaxmha.bench.fleet import Fleet
from jaxmha.bench.peers import CACHES, IMPLEMENTATIONS, OURS, PEERS, VARIANTS, cache_of, stored_by

# Seconds for the rounds of all peers, since a person waits; `measure.FEWEST` rounds always run.
BUDGET = 30.0
# Variants of peers that run on GPUs alone.
ON_GPU = ("jax-nn:cudnn", "torch-sdpa:cudnn", "torch-sdpa:flash", "torch-sdpa:efficient")
Row = dict[str, Any]


def peers(case: Case, choice: dict[str, Any], platform: str) -> list[str]:
    """Every implementation of jaxmha that can compute the case, and every installed peer."""
    ours = [f"{OURS}:{name}" for name in choice["supported"]]
    if case.kind == "decode":
        ours = [OURS] if case.scope == "layer" else ours
        ours += [f"{OURS}:{name}" for name in CACHES]
    others = [name for name, peer in PEERS.items() if name != OURS and not peer.absent]
    others = [name for name in others if PEERS[name].takes(case) and "+jaxmha" not in name]
    if case.scope == "core":  # paths of torch's layer, not of its function
        others = [x for x in others if x not in ("torch-native", "torch-weights")]
    if platform == "gpu":
        others += [name for name in ON_GPU if name.partition(":")[0] in others]
    return ours + others


def check(names: Sequence[str], threads: int | None = None) -> None:
    """Raises ValueError that names an unknown or absent peer, or more threads than cores."""
    for name in names:
        base, colon, variant = name.partition(":")
        if base not in PEERS:
            raise ValueError(f"--peer {name!r} is unknown: it may be {', '.join(PEERS)}")
        if PEERS[base].absent:
            raise ValueError(f"--peer {name}: {PEERS[base].absent}")
        known = VARIANTS.get(base, ())
        if colon and variant not in known:
            may = f"{base}:NAME, NAME of {', '.join(known)}" if known else f"{base} alone"
            raise ValueError(f"--peer {name!r} is unknown: it may be {may}")
    if threads is not None and not 1 <= threads <= memory.cores():
        raise ValueError(f"--threads must be between 1 and {memory.cores()}, got {threads}")


def check_caches(names: Sequence[str], case: Case) -> None:
    """Raises ValueError for a peer with a cache, unless the case is decoding."""
    for name in names:
        if cache_of(name) is not None and case.kind != "decode":
            raise ValueError(f"--peer {name} is a cache, which only decode is timed with")


def run(
    case: Callable[[str], Case],
    only: Sequence[str] = (),
    *,
    rounds: int = 7,
    threads: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measures `case(platform)`; returns the device, its limits, and a row for every peer.

    `say` receives a description of every step, the first within a second.

    Raises:
      ValueError: a peer is unknown, absent or no peer of the case, or there are fewer cores.
      RuntimeError: the device cannot be used.
    """
    check(only, threads)
    threads = threads or memory.cores()
    say("the device")
    with Fleet(threads, None) as fleet:
        device = _checked(fleet["limits"].ask("device"))
        platform = device["platform"]
        this = case(platform)
        check_caches(only, this)
        choice = _checked(fleet["limits"].ask("explain", case=this.as_dict()))
    limits = _limits(threads, platform, this.products)
    names = list(only) or peers(this, choice, platform)
    found = measure.measure(
        [this],
        names,
        rounds=rounds,
        budget=BUDGET / len(names),
        threads=threads,
        platform=_platform_of_fleet(platform),
        backends=["xla"],
        say=say,
        step=say,
        attempts=1,
    )
    (entry,) = found["cases"]
    say("the device again")
    again = _limits(threads, platform, this.products)  # keep the better: others may use the machine
    limits = {name: max(rate, again[name]) for name, rate in limits.items()}
    return {
        "case": this.as_dict(),
        "name": this.name,
        "call": choice["call"],
        "chosen": choice["chosen"],
        "date": measure.today(),
        "device": device["device"] if platform != "cpu" else machine.describe()["processor"],
        "platform": platform,
        "threads": threads,
        "rounds": rounds,
        "limits": limits,
        "disturbed": entry["noisy"],
        "versions": machine.versions(),
        "rows": [row(this, name, entry["peers"][name], limits, choice) for name in names],
    }


def row(case: Case, name: str, found: Row, limits: Row, choice: Row) -> Row:
    """The result of one peer, with rates and their share of the limit of the device."""
    made: Row = {"peer": name, "chosen": name in (OURS, f"{OURS}:{choice['chosen']}")}
    if "failed" in found:
        return made | {"failed": found["failed"]}
    seconds = median(found["seconds"])
    quarter, three_quarters = np.quantile(found["seconds"], [0.25, 0.75])
    nbytes = case.bytes_with(stored_by(name))
    least = max(case.flop * 1e-12 / limits["tflops"], nbytes * 1e-9 / limits["gb_per_second"])
    return made | {key: found[key] for key in measure.KEPT if key in found} | {
        "seconds": seconds,
        "spread": float(three_quarters - quarter) / seconds,
        "tflops": case.flop * 1e-12 / seconds,
        "gb_per_second": nbytes * 1e-9 / seconds,
        "share": least / seconds,
    }  # fmt: skip


def order(found: dict[str, Any]) -> list[str]:
    """Implementations of jaxmha that computed the case, fastest first."""
    ours = [
        (row["seconds"], row["peer"].partition(":")[2])
        for row in found["rows"]
        if row["peer"].startswith(f"{OURS}:") and "seconds" in row
    ]
    return [name for _, name in sorted(ours) if name in IMPLEMENTATIONS]


def _limits(threads: int, platform: str, products: str) -> dict[str, float]:
    with Fleet(threads, _platform_of_fleet(platform)) as fleet:
        return _checked(fleet["limits"].ask("limits", products=products))


def _platform_of_fleet(platform: str) -> str | None:
    """The `platform` of a Fleet: "cpu" for CPUs, else None, since libraries then choose the device."""
    return "cpu" if platform == "cpu" else None


def _checked(found: dict[str, Any]) -> dict[str, Any]:
    if "failed" in found:
        raise RuntimeError(found["failed"])
    return found
