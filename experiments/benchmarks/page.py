"""What was found, in words; every number from results/full.json."""

from typing import Any

from experiments.benchmarks import report
from experiments.benchmarks import statistics as stats
from experiments.benchmarks.peers import ON_JAX

QUESTION = "How fast is attention on this CPU, beside every peer?"
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
    name = found["selection"]
    return f"""![{report.ALT_SOME}](results/{report.SOME})

## Against the aims

{report.summary(found)}

Over: cases above the aim of the worst. Bold: what is aimed at is not reached.
[How scores are cut into blocks](../cuts/), and [which settings of the environment help](../environment/).
[Compilation, memory and errors](results/{name}.md); `make bench` measures the {len(report.some(found)["cases"])} cases of the
figure in five minutes, into results/quick.md.

## Every case

{report.TIME.partition(chr(10))[2].strip()}

{report.times(found)}

## How it was done

{report.about(found).partition(chr(10) * 2)[2]}
"""
