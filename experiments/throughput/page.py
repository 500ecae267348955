"""What was found, in words; every number from experiments/results/throughput.json."""

from statistics import median
from typing import Any

from experiments.benchmarks.report import table
from experiments.pages import fill

QUESTION = "How fast, and in how much memory, is a 2 GiB checkpoint migrated, beside `cp`, `sync` and one read?"
COMMAND = "make throughput"


def conclusion(found: dict[str, Any]) -> str:
    """One sentence."""
    return (
        f"At {found['throughput_of_copy']:.2f} of the rate of a copy, with at most "
        f"{found['peak_mib']} MiB above what the process held (the largest tensor: "
        f"{found['largest_tensor_mib']} MiB)."
    )


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown."""
    rows = [
        [way, f"{median(seconds):.2f}", f"{found['bytes'] / median(seconds) / 1e6:.0f}"]
        for way, seconds in found["seconds"].items()
    ]
    return fill(globals(), found=found, rows=rows)
