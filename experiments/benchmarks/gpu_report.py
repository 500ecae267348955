"""Functions for gpu.md: summaries of the GPU suite, and its targets."""

from collections.abc import Callable, Iterable, Sequence
from operator import ge, le
from typing import Any, NamedTuple

from experiments.pages import Page

Row = dict[str, Any]
# Peers by what they are to the targets.
SLOW = ("jax-nn", "flax-nnx", "flax-linen")


def page(results: Row) -> str:
    """Markdown: where, what is wrong, every shape, and the targets."""
    text = Page("benchmarks/gpu.md", __name__).text(results)
    return f"# {results['device']}, {results['date']}\n\n{text}\n"


def line(name: str, peers: dict[str, Row]) -> str:
    """Milliseconds of every peer of one shape."""
    cells = [
        f"{peer} failed" if "failed" in row else f"{peer} {1e3 * row['seconds']:.3g} ms"
        for peer, row in peers.items()
    ]
    return f"{name}: {', '.join(cells)}"


def conformance(rows: list[Row]) -> str:
    """How many were right, by implementation."""
    parts = []
    for name in dict.fromkeys(row["implementation"] for row in rows):
        mine = [row for row in rows if row["implementation"] == name]
        counts = {key: sum(key in row for row in mine) for key in ("failed", "declined", "skipped")}
        right = f"{name}: {len(mine) - sum(counts.values())} right"
        parts.append(", ".join([right, *(f"{n} {key}" for key, n in counts.items() if n)]))
    return "; ".join(parts)


def worst(rows: list[Row]) -> dict[str, float]:
    """The largest error, by implementation, dtype and array."""
    found: dict[str, float] = {}
    for row in rows:
        for name, error in row.get("errors", {}).items():
            key = f"{row['implementation']}, {row['dtype']}, {name}"
            found[key] = max(found.get(key, 0.0), error)
    return found


class Target(NamedTuple):
    """The worst measured value (None if there is none), and the bound that it should keep."""

    words: str
    value: float | None
    bound: float
    keeps: Callable[[float, float], bool]

    @property
    def reached(self) -> bool:
        """True if the value was measured and keeps the bound."""
        return self.value is not None and self.keeps(self.value, self.bound)

    @property
    def limit(self) -> str:
        """The bound as text, such as `<= 1.03`."""
        return f"{'>=' if self.keeps is ge else '<='} {self.bound:g}"


def _extreme(pick: Callable[[Iterable[float]], float], values: Sequence[float]) -> float | None:
    return pick(values) if values else None


def targets(results: Row) -> list[Target]:
    """Every target with its measured value."""
    shapes = {x["name"]: x for x in results["shapes"] if "seconds" in _of(x, "jaxmha")}

    def rate(name: str) -> float | None:
        tflops: float | None = _of(shapes.get(name, {}), "jaxmha").get("tflops")
        return tflops

    def against(peers: Sequence[str], kind: str | None = None) -> float | None:
        """Times as fast as peers: forward of a kind, or everything."""
        return _extreme(min, [
            _of(x, peer)["seconds"] / _of(x, "jaxmha")["seconds"]
            for x in shapes.values() for peer in peers
            if kind in (None, x["kind"]) and not (kind and x["backward"])
            and "seconds" in _of(x, peer)
        ])  # fmt: skip

    slower = _extreme(max, [
        _of(x, "jaxmha")["seconds"] / min(p["seconds"] for p in x["peers"].values() if "seconds" in p)
        for x in shapes.values()
    ])  # fmt: skip

    def costs(kind: str) -> float | None:
        """Over a shape without padding, per needed operation."""
        pairs = [
            (rate(name.replace(kind, "full")), rate(name))
            for name, x in shapes.items()
            if x["kind"] == kind
        ]
        return _extreme(max, [full / own for full, own in pairs if full and own])

    memory = _extreme(min, [
        _of(x, peer)["bytes"] / _of(x, "jaxmha")["bytes"]
        for x in shapes.values() for peer in SLOW
        if x["T"] == 8192 and _of(x, peer).get("bytes") and _of(x, "jaxmha").get("bytes")
    ])  # fmt: skip

    def share(peer: str) -> float | None:
        return _extreme(min, [
            100 * _of(x, peer)["gb_per_second"] / results["peaks"]["gb_per_second"]
            for x in results["decode"]
            if x["sizes"][0] * x["sizes"][3] >= 128 and "gb_per_second" in _of(x, peer)
        ])  # fmt: skip

    at = "T8192-H128-N16"
    return [
        Target("slower than the fastest implementation, worst", slower, 1.03, le),
        Target("TFLOP/s, full forward, H 128, T 8k", rate(f"full-{at}-forward"), 660, ge),
        Target("TFLOP/s, causal forward", rate(f"causal-{at}-forward"), 610, ge),
        Target("TFLOP/s, full forward + backward", rate(f"full-{at}-backward"), 580, ge),
        Target("TFLOP/s, causal forward + backward", rate(f"causal-{at}-backward"), 535, ge),
        Target("times as fast as jax.nn and Flax, full", against(SLOW, "full"), 7, ge),
        Target("times as fast, causal", against(SLOW, "causal"), 15, ge),
        Target("times less memory than they, T 8k", memory, 20, ge),
        Target("times as fast as torch by cuDNN", against(["torch-cudnn"]), 1.0, ge),
        Target("times as fast as torch by flash", against(["torch-flash"]), 1.6, ge),
        Target("cost of lengths, per operation", costs("lengths"), 1.05, le),
        Target("cost of padding, per operation", costs("padding"), 1.10, le),
        Target("% of memory bandwidth, decode_step", share("decode_step"), 75, ge),
        Target("% of memory bandwidth, attention over a cache", share("jaxmha"), 75, ge),
    ]


def _of(entry: Row, peer: str) -> Row:
    found: Row = entry.get("peers", {}).get(peer, {})
    return found
