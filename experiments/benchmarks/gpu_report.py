"""The results of the GPU suite as text; the targets come last."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from experiments.pages import Rows, fill

QUESTION = "How fast, and how right, is attention on a GPU, next to every peer?"
COMMAND = "python -m experiments.benchmarks.gpu --write"
Row = dict[str, Any]
# Peers by what they are to the targets.
SLOW = ("jax-nn", "flax-nnx", "flax-linen")


def conclusion(found: Row) -> str:
    """One sentence."""
    of = targets(found)
    held = sum(hits(value, target, at_least) for _, value, target, at_least in of)
    return f"{conformance(found['conformance'])}; {held} of {len(of)} targets are reached."


def page(results: Row) -> str:
    """Markdown: where, what is wrong, every shape, and the targets."""
    return fill(globals(), template="gpu.md", results=results)


def text(found: Row) -> str:
    """The page without its title."""
    return page(found).partition("\n")[2]


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


def wrong(rows: list[Row]) -> Rows:
    """What failed or was skipped, and the largest errors."""
    found = [["case", "implementation", "dtype", "what"]]
    worst: dict[str, float] = {}
    for row in rows:
        if what := row.get("failed") or row.get("skipped"):
            kind = "**failed**" if "failed" in row else "skipped"
            found.append([row["case"], row["implementation"], row["dtype"], f"{kind}: {what}"])
        for name, error in row.get("errors", {}).items():
            key = f"{row['implementation']}, {row['dtype']}, {name}"
            worst[key] = max(worst.get(key, 0.0), error)
    return found + [["largest error", key, "", f"{error:.3g}"] for key, error in worst.items()]


def speed(results: Row) -> Rows:
    """Of every shape our rate, and the times of peers relative to ours."""
    peers = dict.fromkeys(p for x in results["shapes"] for p in x.get("peers", {}) if p != "jaxmha")
    rows = [["shape", "by", "TFLOP/s", "% of product", *peers]]
    for shape in results["shapes"]:
        of = shape.get("peers", {})
        own, start = of.get("jaxmha", {}), [shape["name"], results["chosen"].get(shape["name"], "")]
        if "tflops" not in own:
            rows.append(
                [*start, own.get("failed") or shape.get("skipped", ""), "", *("" for _ in peers)]
            )
            continue
        share = f"{100 * own['tflops'] / results['peaks']['tflops']:.0f}"
        cells = [
            "–" if peer not in of else "failed" if "failed" in of[peer]
            else f"{of[peer]['seconds'] / own['seconds']:.2f}"
            for peer in peers
        ]  # fmt: skip
        rows.append([*start, f"{own['tflops']:.0f}", share, *cells])
    return rows


def bandwidth(entry: Row, peak: float) -> str:
    """Of one decoding step, peer by peer."""
    cells = [
        f"{name} failed ({row['failed']})" if "failed" in row
        else f"{name} {row['gb_per_second']:.0f} GB/s ({100 * row['gb_per_second'] / peak:.0f} % of the copy)"
        for name, row in entry.get("peers", {}).items()
    ]  # fmt: skip
    return f"{entry['name']}: {', '.join(cells) or entry.get('skipped')}"


def _extreme(pick: Callable[[Iterable[float]], float], values: Sequence[float]) -> float | None:
    return pick(values) if values else None


def targets(results: Row) -> list[tuple[str, float | None, float, bool]]:
    """Words, the worst value measured (None: nothing), the target, and whether at least it."""
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
        ("slower than the fastest implementation, worst", slower, 1.03, False),
        ("TFLOP/s, full forward, H 128, T 8k", rate(f"full-{at}-forward"), 660, True),
        ("TFLOP/s, causal forward", rate(f"causal-{at}-forward"), 610, True),
        ("TFLOP/s, full forward + backward", rate(f"full-{at}-backward"), 580, True),
        ("TFLOP/s, causal forward + backward", rate(f"causal-{at}-backward"), 535, True),
        ("times as fast as jax.nn and Flax, full", against(SLOW, "full"), 7, True),
        ("times as fast, causal", against(SLOW, "causal"), 15, True),
        ("times less memory than they, T 8k", memory, 20, True),
        ("times as fast as torch by cuDNN", against(["torch-cudnn"]), 1.0, True),
        ("times as fast as torch by flash", against(["torch-flash"]), 1.6, True),
        ("cost of lengths, per operation", costs("lengths"), 1.05, False),
        ("cost of padding, per operation", costs("padding"), 1.10, False),
        ("% of memory bandwidth, decode_step", share("decode_step"), 75, True),
        ("% of memory bandwidth, attention over a cache", share("jaxmha"), 75, True),
    ]


def _of(entry: Row, peer: str) -> Row:
    found: Row = entry.get("peers", {}).get(peer, {})
    return found


def hits(value: float | None, target: float, at_least: bool) -> bool:
    """Whether the target is reached."""
    return value is not None and (value >= target if at_least else value <= target)


def reached(results: Row) -> Rows:
    """Every target, and what was measured."""
    rows = [["target", "measured", "bound", "reached"]]
    for words, value, target, at_least in targets(results):
        bound = f"{'>=' if at_least else '<='} {target:g}"
        if value is None:
            rows.append([words, "not measured", bound, ""])
        else:
            yes = "yes" if hits(value, target, at_least) else "**no**"
            rows.append([words, f"{value:.3g}", bound, yes])
    return rows
