"""The results of the GPU suite as text; the aims come last."""

from typing import Any

Row = dict[str, Any]
# Peers by what they are to the aims.
SLOW = ("jax-nn", "flax-nnx", "flax-linen")


def line(name: str, peers: dict[str, Row]) -> str:
    """Milliseconds of every peer of one shape."""
    cells = [f"{peer} {_ms(row)}" for peer, row in peers.items()]
    return f"{name}: {', '.join(cells)}"


def _ms(row: Row) -> str:
    return "failed" if "failed" in row else f"{1e3 * row['seconds']:.3g} ms"


def conformance(rows: list[Row]) -> str:
    """How many were right, by implementation."""
    parts = []
    for name in dict.fromkeys(row["implementation"] for row in rows):
        mine = [row for row in rows if row["implementation"] == name]
        counts = {key: sum(key in row for row in mine) for key in ("failed", "declined", "skipped")}
        right = len(mine) - sum(counts.values())
        counted = ", ".join(f"{n} {key}" for key, n in counts.items() if n)
        parts.append(f"{name}: {right} right" + (f", {counted}" if counted else ""))
    return "; ".join(parts)


def page(results: Row) -> str:
    """Markdown: where, what is wrong, every shape, and the aims."""
    peak = results["peaks"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        f"# {results['device']}, {results['date']}",
        "",
        f"{versions}.",
        "",
        f"Measured ceilings: {peak['tflops']:.0f} TFLOP/s (bfloat16 product), "
        + f"{peak['gb_per_second']:.0f} GB/s (copy). {results['seconds']} s in all. Medians of "
        + "interleaved rounds; nothing is flushed between calls. With a bias cuDNN computes its "
        + "gradient too, which nobody asks for here.",
        "",
        "## Against float64",
        "",
        f"{conformance(results['conformance'])}.",
        "",
        *_conformance_table(results["conformance"]),
        "",
        "## Speed",
        "",
        "TFLOP/s of the work that is needed; the ratio is a peer's time over ours.",
        "",
        *_speed_table(results),
        "",
        "## Layers (causal, forward) and decoding",
        "",
        *(f"- {line(x['name'], x.get('peers', {}))}" for x in results["layers"]),
        *(_decode_line(x, peak) for x in results["decode"]),
        "",
        "## Aims",
        "",
        *_aims_table(results),
        "",
    ]
    return "\n".join(lines)


def _conformance_table(rows: list[Row]) -> list[str]:
    lines = ["| case | implementation | dtype | what |", "|---|---|---|---|"]
    for row in rows:
        what = row.get("failed") or row.get("skipped")
        if what:
            kind = "**failed**" if "failed" in row else "skipped"
            lines.append(
                f"| {row['case']} | {row['implementation']} | {row['dtype']} | {kind}: {what} |"
            )
    worst: dict[str, float] = {}
    for row in rows:
        for name, error in row.get("errors", {}).items():
            key = f"{row['implementation']}, {row['dtype']}, {name}"
            worst[key] = max(worst.get(key, 0.0), error)
    lines += [f"| largest error | {key} | | {error:.3g} |" for key, error in worst.items()]
    return lines if len(lines) > 2 else ["Nothing failed."]


def _speed_table(results: Row) -> list[str]:
    peers = list(dict.fromkeys(p for x in results["shapes"] for p in x.get("peers", {})))
    others = [peer for peer in peers if peer != "jaxmha"]
    lines = [
        f"| shape | by | TFLOP/s | % of product | {' | '.join(others)} |",
        f"|---|---|---|---|{'---|' * len(others)}",
    ]
    for shape in results["shapes"]:
        name, by = shape["name"], results["chosen"].get(shape["name"], "")
        own = shape.get("peers", {}).get("jaxmha", {})
        if "tflops" not in own:
            why = own.get("failed") or shape.get("skipped")
            lines.append(f"| {name} | {by} | {why} | | {' | '.join('' for _ in others)} |")
            continue
        cells = [_ratio(shape, peer) for peer in others]
        share = 100 * own["tflops"] / results["peaks"]["tflops"]
        lines.append(f"| {name} | {by} | {own['tflops']:.0f} | {share:.0f} | {' | '.join(cells)} |")
    return lines


def _ratio(shape: Row, peer: str) -> str:
    row = shape["peers"].get(peer)
    if row is None:
        return "–"
    return "failed" if "failed" in row else f"{row['seconds'] / seconds(shape):.2f}"


def seconds(shape: Row, peer: str = "jaxmha") -> float:
    """Of a call; infinite where there is none."""
    return float(shape.get("peers", {}).get(peer, {}).get("seconds", float("inf")))


def _decode_line(entry: Row, peak: Row) -> str:
    cells = []
    for name, row in entry.get("peers", {}).items():
        if "failed" in row:
            cells.append(f"{name} failed ({row['failed']})")
            continue
        share = 100 * row["gb_per_second"] / peak["gb_per_second"]
        cells.append(f"{name} {row['gb_per_second']:.0f} GB/s ({share:.0f} % of the copy)")
    return f"- {entry['name']}: {', '.join(cells) or entry.get('skipped')}"


def aims(results: Row) -> list[tuple[str, float | None, float, bool]]:
    """What is aimed at: words, the worst value measured (None: nothing), the aim, at least?"""
    by_name = {x["name"]: x for x in results["shapes"] if "peers" in x}

    def rate(name: str) -> float | None:
        found = by_name.get(name, {}).get("peers", {}).get("jaxmha", {}).get("tflops")
        return None if found is None else float(found)

    def least(values: list[float]) -> float | None:
        return min(values) if values else None

    def against(peers: tuple[str, ...], kind: str | None = None, **fields: Any) -> float | None:
        return least([
            seconds(x, peer) / seconds(x)
            for x in by_name.values() for peer in peers
            if (kind in (None, x["kind"])) and all(x[k] == v for k, v in fields.items())
            and "seconds" in x["peers"].get(peer, {}) and x["T"] >= fields.get("least", 0)
        ])  # fmt: skip

    def slower() -> float | None:
        ratios = [
            seconds(x) / min(seconds(x, peer) for peer in x["peers"])
            for x in by_name.values()
            if "seconds" in x["peers"].get("jaxmha", {})
        ]
        return max(ratios) if ratios else None

    def costs(kind: str) -> float | None:
        """Over a shape without padding, per needed operation."""
        ratios = []
        for x in by_name.values():
            full = x["name"].replace(kind, "full")
            if x["kind"] == kind and rate(full) and rate(x["name"]):
                ratios.append(rate(full) / rate(x["name"]))  # type: ignore[operator]
        return max(ratios) if ratios else None

    memory = least([
        x["peers"][peer]["bytes"] / x["peers"]["jaxmha"]["bytes"]
        for x in by_name.values() for peer in SLOW
        if x["T"] == 8192 and x["peers"].get(peer, {}).get("bytes") and x["peers"].get("jaxmha", {}).get("bytes")
    ])  # fmt: skip
    peak = results["peaks"]["gb_per_second"]

    def bandwidth(peer: str) -> float | None:
        return least([
            100 * x["peers"][peer]["gb_per_second"] / peak
            for x in results["decode"]
            if x["sizes"][0] * x["sizes"][3] >= 128
            and "gb_per_second" in x.get("peers", {}).get(peer, {})
        ])  # fmt: skip

    at = "T8192-H128-N16"
    return [
        ("slower than the fastest implementation, worst", slower(), 1.03, False),
        ("TFLOP/s, full forward, H 128, T 8k", rate(f"full-{at}-forward"), 660, True),
        ("TFLOP/s, causal forward", rate(f"causal-{at}-forward"), 610, True),
        ("TFLOP/s, full forward + backward", rate(f"full-{at}-backward"), 580, True),
        ("TFLOP/s, causal forward + backward", rate(f"causal-{at}-backward"), 535, True),
        ("times as fast as jax.nn and Flax, full", against(SLOW, "full", backward=False), 7, True),
        ("times as fast, causal", against(SLOW, "causal", backward=False), 15, True),
        ("times less memory than they, T 8k", memory, 20, True),
        ("times as fast as torch by cuDNN", against(("torch-cudnn",)), 1.0, True),
        ("times as fast as torch by flash", against(("torch-flash",)), 1.6, True),
        ("cost of lengths, per operation", costs("lengths"), 1.05, False),
        ("cost of padding, per operation", costs("padding"), 1.10, False),
        ("% of memory bandwidth, decode_step", bandwidth("decode_step"), 75, True),
        ("% of memory bandwidth, attention over a cache", bandwidth("jaxmha"), 75, True),
    ]


def _aims_table(results: Row) -> list[str]:
    lines = ["| aim | measured | aimed at | |", "|---|---|---|---|"]
    for words, value, aim, at_least in aims(results):
        bound = f"{'>=' if at_least else '<='} {aim:g}"
        if value is None:
            lines.append(f"| {words} | not measured | {bound} | |")
            continue
        reached = value >= aim if at_least else value <= aim
        lines.append(f"| {words} | {value:.3g} | {bound} | {'yes' if reached else '**no**'} |")
    return lines
