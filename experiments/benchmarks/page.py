"""What was found, in words; every number from results/full.json."""

from typing import Any

from experiments.benchmarks import report
from experiments.benchmarks import statistics as stats
from experiments.benchmarks.peers import ON_JAX
from experiments.pages import fill

QUESTION = "How fast is attention on this CPU, next to every peer?"
COMMAND = "make bench-full"


def conclusion(found: dict[str, Any]) -> str:
    """One sentence: means and extremes."""
    entries = [
        e for e in found["cases"] if e["case"]["scope"] == "layer" and e["case"]["T"] >= 2048
    ]
    ratios = {
        peers: [r for e in entries if (r := stats.relative(e, peers))]
        for peers in (ON_JAX, stats.TORCH)
    }
    on_jax, torch = (
        f"{stats.mean(r):.2f} ({min(r):.2f} to {max(r):.2f}; {len(r)} shapes)"
        for r in ratios.values()
    )
    return (
        f"A layer of T >= 2048 takes {on_jax} of the time of the fastest other on JAX, and {torch} of that "
        "of the fastest way through torch: means and extremes, forward or forward and backward."
    )


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown; the page of the results has every table."""
    return fill(vars(report), results=found)
