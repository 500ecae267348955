"""What was found, in words; every number from experiments/results/throughput.json."""

from statistics import median
from typing import Any

from experiments.pages import Tables, fill

QUESTION = "How fast, and in how much memory, is a 2 GiB checkpoint migrated, next to `cp`, `sync` and one read?"
COMMAND = "make throughput"


def conclusion(found: dict[str, Any]) -> str:
    """One sentence."""
    return (
        f"At {found['throughput_of_copy']:.2f} of the rate of a copy, with at most "
        f"{found['peak_mib']} MiB above what the process held (the largest tensor: "
        f"{found['largest_tensor_mib']} MiB)."
    )


def tables(found: dict[str, Any]) -> Tables:
    """Seconds and rates."""
    rows = [("way", "median s", "MB/s")]
    for way, seconds in found["seconds"].items():
        middle = median(seconds)
        rows.append((way, f"{middle:.2f}", f"{found['bytes'] / middle / 1e6:.0f}"))
    return {"Ways": rows}


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown."""
    return fill(globals(), found=found)
