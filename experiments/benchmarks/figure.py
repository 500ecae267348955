"""Every peer's time relative to the fastest, one row per case."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.benchmarks import statistics as stats
from jaxmha.bench.peers import OURS

MARKERS = "o^v<sDPX*"


def draw(results: dict[str, Any], path: Path) -> None:
    """One colour and marker per peer; further left is faster."""
    entries = results["cases"][::-1]
    figure, axes = plt.subplots(figsize=(10, 1.6 + 0.27 * len(entries)), layout="constrained")
    for number, peer in enumerate(results["peers"]):
        points = []
        for row, entry in enumerate(entries):
            best = stats.fastest(entry, results["peers"])
            time, least = stats.time_of(entry, peer), stats.time_of(entry, best or peer)
            if time is not None and least is not None:
                points.append((time / least, row))
        ours = peer == OURS
        axes.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            s=70 if ours else 26,
            marker=MARKERS[number % len(MARKERS)],
            color="black" if ours else f"C{number}",
            zorder=3 if ours else 2,
            alpha=0.85,
            label=peer,
        )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}x")
    axes.set_yticks(range(len(entries)), [entry["name"] for entry in entries], fontsize=7)
    axes.set_ylim(-0.7, len(entries) - 0.3)
    axes.set_xlabel("median time relative to the fastest shown (log scale)")
    axes.grid(axis="both", alpha=0.25)
    figure.suptitle(
        f"Attention in float32 on {results['machine']['processor']}, {results['threads']} threads "
        f"(jax {results['versions']['jax']}, torch {results['versions'].get('torch', 'absent')})",
        fontsize=10,
    )
    figure.legend(ncols=5, fontsize=8, loc="outside lower center")
    figure.savefig(path, dpi=110)
    plt.close(figure)
