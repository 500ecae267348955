"""What was found, in words; every number from experiments/results/fuzz.json."""

from typing import Any

from experiments.benchmarks.report import table
from experiments.pages import fill

QUESTION = "Does any damaged file get past the readers of checkpoints untyped, or hang them?"
COMMAND = "make soak"


def conclusion(found: dict[str, Any]) -> str:
    """One sentence."""
    readers = found["readers"].values()
    findings = sum(reader["findings"] for reader in readers)
    tried = sum(reader["executions"] for reader in readers)
    hours = sum(reader["seconds"] for reader in readers) / 3600
    answer = "No" if not findings else f"{findings} do"
    return f"{answer}: {tried:,} inputs in {hours:.1f} hours, {len(readers)} readers."


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown."""
    rows = [
        [name, *(f"{reader[key]:,}" for key in ("executions", "coverage", "findings"))]
        for name, reader in found["readers"].items()
    ]
    return fill(globals(), rows=rows)
