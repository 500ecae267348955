"""What was found on a GPU, in words; every number from results/gpu.json."""

from typing import Any

from experiments.benchmarks import gpu_report

QUESTION = "How fast, and how right, is attention on a GPU, beside every peer?"
COMMAND = "python -m experiments.benchmarks.gpu --write"


def conclusion(found: dict[str, Any]) -> str:
    """One sentence."""
    aims = gpu_report.aims(found)
    held = sum(
        value is not None and (value >= aim if at_least else value <= aim)
        for _, value, aim, at_least in aims
    )
    return (
        f"{gpu_report.conformance(found['conformance'])}; {held} of {len(aims)} aims are reached."
    )


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown."""
    return gpu_report.page(found).partition("\n")[2]
