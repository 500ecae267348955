"""What was found, in words; every number from results/quick.json."""

from typing import Any

from experiments.benchmarks import report
from experiments.benchmarks import statistics as stats
from experiments.benchmarks.peers import ON_JAX

QUESTION = "How fast is attention on this CPU, beside every peer?"
COMMAND = "make bench"


def conclusion(found: dict[str, Any]) -> str:
    """Two sentences."""
    entries = [
        e for e in found["cases"] if e["case"]["scope"] == "layer" and e["case"]["T"] >= 2048
    ]
    on_jax = [1 / r for e in entries if (r := stats.relative(e, ON_JAX))]
    torch = [1 / r for e in entries if (r := stats.relative(e, stats.TORCH))]
    return (
        f"In these cases a layer of T >= 2048 is {min(on_jax):.1f} to {max(on_jax):.1f} times as fast as the fastest "
        f"other on JAX, and {min(torch):.2f} to {max(torch):.2f} times as fast as the fastest "
        "way through torch; all shapes (results/full.md) spread wider, to both sides."
    )


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown; `results/quick.md` has every table."""
    return f"""![{report.ALT}](results/quick.png)

## Against the aims

{report.summary(found)}

Bold: what is aimed at is not reached.

## Every case

{report.TIME.partition(chr(10))[2].strip()}

{report.times(found)}

## How it was done

{report.about(found).partition(chr(10) * 2)[2]}
"""
