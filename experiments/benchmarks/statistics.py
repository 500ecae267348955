"""Medians, spreads and ratios of stored results; numbers only, no words."""

from collections.abc import Callable, Iterable
from statistics import median, quantiles
from typing import Any, NamedTuple

from jaxmha.bench.case import Case
from jaxmha.bench.peers import ON_JAX, OURS, PEERS, SWAPPED

Entry = dict[str, Any]  # one of results["cases"]
# Distance of the quartiles, relative to the median, above which a time is not to be trusted.
WIDE = 0.2
TORCH = tuple(peer for peer in PEERS if peer.startswith("torch"))
OTHERS = tuple(peer for peer in PEERS if peer != OURS and peer not in SWAPPED.values())


def case_of(entry: Entry) -> Case:
    """The case of an entry."""
    return Case(**entry["case"])


def time_of(entry: Entry, peer: str) -> float | None:
    """Median seconds of a call, None where there is none."""
    seconds = entry["peers"].get(peer, {}).get("seconds")
    return median(seconds) if seconds else None


def quartiles_of(entry: Entry, peer: str) -> float | None:
    """Distance of the quartiles relative to the median."""
    seconds = entry["peers"].get(peer, {}).get("seconds")
    if not seconds or len(seconds) < 2:
        return None
    low, _, high = quantiles(seconds, n=4, method="inclusive")
    return float((high - low) / median(seconds))


def disturbed(entry: Entry) -> bool:
    """True if the machine was busy, or times of jaxmha or of the fastest other peer vary widely."""
    shown = (OURS, fastest(entry, OTHERS))
    spreads = [quartiles_of(entry, peer) or 0.0 for peer in shown if peer]
    return bool(entry["noisy"]) or max(spreads) > WIDE


def fastest(entry: Entry, peers: Iterable[str]) -> str | None:
    """The peer with the smallest median."""
    times = {peer: time for peer in peers if (time := time_of(entry, peer)) is not None}
    return min(times, key=times.__getitem__) if times else None


def speed_of(entry: Entry, peer: str) -> float | None:
    """GFLOP/s of the work that is needed."""
    time = time_of(entry, peer)
    return None if time is None else float(entry["gflop"]) / time


def relative(entry: Entry, peers: Iterable[str]) -> float | None:
    """Our time relative to the fastest of these."""
    ours, best = time_of(entry, OURS), fastest(entry, peers)
    theirs = None if best is None else time_of(entry, best)
    return None if ours is None or theirs is None else ours / theirs


def memory_of(entry: Entry, peer: str) -> float | None:
    """Growth of the peak in MiB."""
    grown = entry["peers"].get(peer, {}).get("memory")
    return grown / 2**20 if isinstance(grown, int | float) else None


def memory_relative(entry: Entry, peers: Iterable[str]) -> float | None:
    """Our growth relative to the smallest of these."""
    ours = memory_of(entry, OURS)
    theirs = [m for peer in peers if (m := memory_of(entry, peer)) is not None]
    return None if ours is None or not theirs else ours / max(min(theirs), 1.0)


def swapped_relative(entry: Entry, of: Callable[[Entry, str], float | None]) -> float | None:
    """Flax's own layers with jaxmha's `attention_fn` relative to without: the worse of the two."""
    ratios = []
    for peer, swapped in SWAPPED.items():
        own, ours = of(entry, peer), of(entry, swapped)
        if own and ours is not None:
            ratios.append(ours / own)
    return max(ratios, default=None)


def gap_to_torch(entry: Entry) -> tuple[float, float, float] | None:
    """Our time relative to torch's fastest way = rate of plain products, torch to XLA, times rest.

    Both rates are of the layer's own query, key and value projections as one product.
    """
    gap, rates = relative(entry, TORCH), entry["sgemm"]
    if gap is None or not {"xla", "torch"} <= rates.keys():
        return None
    products = rates["torch"] / rates["xla"]
    return gap, products, gap / products


def to_products(entry: Entry) -> float | None:
    """Our time relative to that of the same work at the rate of XLA's plain square product, which
    is timed before and after the rounds of the case."""
    speed = speed_of(entry, OURS)
    rates = [probe["xla"] for probe in entry["probes"] if "xla" in probe]
    return None if speed is None or not rates else max(rates) / speed


class Goal(NamedTuple):
    """A line of the summary: a ratio over some cases, and its target (smaller is better)."""

    what: str
    of: Callable[[Case], bool]
    ratio: Callable[[Entry], float | None]
    mean: float | None = None
    worst: float | None = None


def _layer(direction: str, *kinds: str, least: int = 0, below: int = 1 << 30) -> Any:
    def chosen(case: Case) -> bool:
        right = case.scope == "layer" and case.direction == direction
        return right and (not kinds or case.kind in kinds) and least <= case.T < below

    return chosen


def _to(peers: Iterable[str]) -> Callable[[Entry], float | None]:
    return lambda entry: relative(entry, peers)


GOALS: tuple[Goal, ...] = (
    Goal("layer, forward, T >= 512 / fastest peer", _layer("forward", least=512), _to(OTHERS), 0.85, 1.0),
    Goal("layer, forward, causal or padded, T >= 512 / fastest peer", _layer("forward", "causal", "padded", least=512), _to(OTHERS), 0.65),
    Goal("layer, forward, T < 512 / fastest on JAX", _layer("forward", below=512), _to(ON_JAX), 0.85, 1.0),
    Goal("layer, forward + backward, T >= 512 / fastest peer", _layer("backward", least=512), _to(OTHERS), 0.85, 1.0),
    Goal("forward + backward of one head / fastest of torch", lambda c: c.direction == "backward" and c.B * c.N == 1, _to(TORCH), None, 0.7),
    Goal("layer, forward, T < 512 / fastest of torch, as if products were as fast", _layer("forward", below=512), lambda e: (gap_to_torch(e) or (None,) * 3)[2], None, 0.95),
    Goal("layer, T >= 2048 / its work at the rate of XLA's plain square product", lambda c: c.scope == "layer" and c.T >= 2048, to_products, None, 1 / 0.85),
    Goal("everything / fastest on JAX", lambda c: True, _to(ON_JAX), None, 1 / 1.2),
    Goal("T >= 2048 / fastest on JAX", lambda c: c.T >= 2048, _to(ON_JAX), None, 1 / 3),
    Goal("T >= 4096 / fastest on JAX", lambda c: c.T >= 4096, _to(ON_JAX), None, 1 / 4),
    Goal("seconds to compile a layer", lambda c: c.scope == "layer", lambda e: e["peers"].get(OURS, {}).get("compile"), None, 2.0),
    Goal("layer of Flax with attention_fn / without, T = 1024", lambda c: c.scope == "layer" and 1024 <= c.T < 2048, lambda e: swapped_relative(e, time_of), None, 0.45),
    Goal("layer of Flax with attention_fn / without, T >= 2048", lambda c: c.scope == "layer" and c.T >= 2048, lambda e: swapped_relative(e, time_of), None, 0.25),
    Goal("growth of memory, layer of Flax with attention_fn / without, T >= 2048", lambda c: c.scope == "layer" and c.T >= 2048, lambda e: swapped_relative(e, memory_of), None, 1 / 2),
    Goal("growth of memory, T >= 2048 / smallest on JAX", lambda c: c.T >= 2048, lambda e: memory_relative(e, ON_JAX), None, 0.5),
    Goal("layer, T < 512 / fastest of torch", lambda c: c.scope == "layer" and c.T < 512, _to(TORCH)),
    Goal("core, one query over a cache / fastest of torch", lambda c: c.scope == "core" and c.kind == "decode", _to(TORCH), None, 1.0),
)  # fmt: skip
