"""Functions for gpu.md: rows, summaries and targets of the GPU suite."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from experiments.benchmarks import statistics as stats
from experiments.benchmarks.gpu_cases import PEERS
from experiments.benchmarks.statistics import Entry
from experiments.pages import Page
from jaxmha.bench import run
from jaxmha.bench.peers import OURS
from tests.h100 import on_device

Row = dict[str, Any]
# Peers that hold all scores.
SLOW = ("jax-nn", "flax-nnx", "flax-linen")
CUDNN = "jax-nn:cudnn"


def page(results: Row) -> str:
    """Markdown: where, what is wrong, every case, and the targets."""
    text = Page("benchmarks/gpu.md", __name__).text(results)
    return f"# {results['device']}, {results['date']}\n\n{text}\n"


def rows(results: Row, entry: Entry) -> dict[str, Row]:
    """Peer -> its row, with the rates and the share that `jaxmha bench` shows."""
    case, chosen = stats.case_of(entry), {"chosen": results["chosen"].get(entry["name"])}
    limits = results["limits"][case.products]
    return {peer: run.row(case, peer, x, limits, chosen) for peer, x in entry["peers"].items()}


def conformance(rows: list[Row]) -> str:
    """How many were right, by implementation."""
    parts = []
    for name in dict.fromkeys(row["implementation"] for row in rows):
        mine = [row for row in rows if row["implementation"] == name]
        counts = {key: sum(key in row for row in mine) for key in ("failed", "declined", "skipped")}
        right = f"{name}: {len(mine) - sum(counts.values())} right"
        parts.append(", ".join([right, *(f"{n} {key}" for key, n in counts.items() if n)]))
    return "; ".join(parts)


def worst(rows: list[Row]) -> dict[str, tuple[float, float]]:
    """The largest error and its bound, by implementation, dtype and array."""
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        for name, error in row.get("errors", {}).items():
            key = f"{row['implementation']}, {row['dtype']}, {name}"
            found[key] = max(found.get(key, (0.0, 0.0)), (error, on_device.bound(name)))
    return found


class Target(NamedTuple):
    """Measured values, and the bound that each should keep: at most it, or (`least`) at least it."""

    about: str
    values: list[float]
    bound: float
    least: bool = True

    @property
    def value(self) -> float | None:
        """The worst value, if one was measured."""
        return (min if self.least else max)(self.values, default=None)

    @property
    def reached(self) -> bool:
        """True if values were measured and all keep the bound."""
        kept = (v >= self.bound if self.least else v <= self.bound for v in self.values)
        return bool(self.values) and all(kept)

    @property
    def limit(self) -> str:
        """The bound as text, such as `<= 1.03`."""
        return f"{'>=' if self.least else '<='} {self.bound:g}"


def targets(results: Row) -> list[Target]:
    """Every target with its measured values."""
    found = {entry["name"]: entry for entry in results["cases"]}

    def of(**wanted: Any) -> list[Entry]:
        cases = ((entry, stats.case_of(entry)) for entry in found.values())
        return [e for e, case in cases if all(getattr(case, k) == x for k, x in wanted.items())]

    def values(key: str, entries: Iterable[Entry], scale: float = 1) -> list[float]:
        ours = (rows(results, entry).get(OURS, {}) for entry in entries)
        return [scale * row[key] for row in ours if key in row]

    def tflops(direction: str, kind: str) -> list[float]:
        return values("tflops", of(direction=direction, kind=kind, T=8192, N=64, packed=0))

    def faster(entries: Iterable[Entry], *peers: str) -> list[float]:
        ratios = (stats.relative(entry, [peer]) for entry in entries for peer in peers)
        return [1 / ratio for ratio in ratios if ratio is not None]

    def costs(**wanted: Any) -> list[float]:
        """Time per needed operation, relative to the same case without padding."""
        pairs = []
        for entry in of(kind="padded", **wanted):
            full = found.get(replace(stats.case_of(entry), kind="plain", boolean=False).name)
            rates = [x and stats.speed_of(x, OURS) for x in (full, entry)]
            pairs += [rates[0] / rates[1]] if all(rates) else []  # type: ignore[operator]
        return pairs

    core, cached = of(scope="core"), of(scope="core", kind="decode", T=1)
    others = [peer for peer in PEERS if not peer.startswith(OURS)]
    slower = [ratio for e in core if (ratio := stats.relative(e, others)) is not None]
    memory = [x["bytes"] / own for e in of(scope="core", T=8192) for peer in SLOW
              if (own := e["peers"].get(OURS, {}).get("bytes"))
              and (x := e["peers"].get(peer, {})).get("bytes")]  # fmt: skip
    full, causal = (of(scope="core", direction="forward", kind=x) for x in ("plain", "causal"))
    busy = [entry for entry in cached if entry["case"]["B"] * entry["case"]["K"] >= 64]
    return [
        Target("slower than the fastest other, worst", slower, 1.03, least=False),
        Target("TFLOP/s, full forward, N 64/8, H 128, T 8k", tflops("forward", "plain"), 690),
        Target("TFLOP/s, causal forward", tflops("forward", "causal"), 645),
        Target("TFLOP/s, full forward + backward", tflops("backward", "plain"), 590),
        Target("TFLOP/s, causal forward + backward", tflops("backward", "causal"), 550),
        Target("times as fast as jax.nn and Flax, full", faster(full, *SLOW), 7),
        Target("times as fast, causal", faster(causal, *SLOW), 15),
        Target("times less memory than they, T 8k", memory, 20),
        Target("times as fast as torch by cuDNN", faster(core, "torch-sdpa:cudnn"), 1),
        Target("times as fast as torch by flash", faster(core, "torch-sdpa:flash"), 1.6),
        Target("cost of lengths, per operation", costs(boolean=False), 1.05, least=False),
        Target("cost of padding, per operation", costs(boolean=True), 1.05, least=False),
        Target("times as fast as blocked, packed", faster(of(packed=12), "jaxmha:blocked"), 3),
        Target("% of the limit, decode_step", values("share", of(scope="layer", kind="decode"), 100), 75),
        Target("% of the limit, one query over a cache", values("share", busy, 100), 85),
        Target("times as fast as cuDNN, 8 queries", faster(of(kind="decode", T=8), CUDNN), 2),
    ]  # fmt: skip
