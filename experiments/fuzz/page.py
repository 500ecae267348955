"""What was found, in words; every number from experiments/results/fuzz.json."""

from typing import Any

from experiments.pages import Tables, fill

QUESTION = "Does any damaged file get past the readers of checkpoints untyped, or hang them?"
COMMAND = "make soak"


def conclusion(found: dict[str, Any]) -> str:
    """One sentence."""
    readers = found["readers"].values()
    findings, tried, seconds = (
        sum(reader[key] for reader in readers) for key in ("findings", "executions", "seconds")
    )
    yes = f"{findings} do" if findings else "No"
    return f"{yes}: {tried:,} inputs in {seconds / 3600:.1f} hours, {len(readers)} readers."


def tables(found: dict[str, Any]) -> Tables:
    """Of every reader."""
    rows = [("reader", "inputs", "branches reached", "findings")]
    for name, reader in found["readers"].items():
        inputs, branches, findings = (
            f"{reader[key]:,}" for key in ("executions", "coverage", "findings")
        )
        rows.append((name, inputs, branches, findings))
    return {"Readers": rows}


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown."""
    return fill(globals(), found=found)
