"""What was found, in words; every number from results.json."""

from collections import Counter
from typing import Any

from experiments.benchmarks.statistics import mean
from experiments.pages import Tables, fill

QUESTION = "Do published weights survive the way through every framework and back?"
COMMAND = "make demo"


def conclusion(found: dict[str, Any]) -> str:
    """One sentence."""
    same = sum(block["identical"] for block in found["blocks"])
    files = sum(map(kept, found["files"]))
    yes = "Yes" if same == len(found["blocks"]) and files == len(found["files"]) else "No"
    return (
        f"{yes}, bit by bit: {same} of {len(found['blocks'])} attention blocks and all tensors of "
        f"{files} of {len(found['files'])} files come back as they were."
    )


def tables(found: dict[str, Any]) -> Tables:
    """Errors by implementation, and trips of whole files."""
    blocks, errors = found["blocks"], [("implementation", "error", "relative to torch", "at most")]
    for name in blocks[0]["errors"]:
        ratios = [block["errors"][name] / block["errors"]["torch"] for block in blocks]
        of_all = mean([block["errors"][name] for block in blocks])
        errors.append((name, f"{of_all:.1f}", f"{mean(ratios):.2f}", f"{max(ratios):.2f}"))
    trips = [("trip", "files", "MB", "every tensor identical")]
    for trip in sorted({file["trip"] for file in found["files"]}):
        files = [file for file in found["files"] if file["trip"] == trip]
        megabytes = f"{sum(file['megabytes'] for file in files):.0f}"
        same = f"{sum(map(kept, files))} of {len(files)}"
        trips.append((trip, str(len(files)), megabytes, same))
    return {"Errors": errors, "Whole files": trips}


def kinds(found: dict[str, Any]) -> str:
    """How many blocks have which layout."""
    layouts = Counter(block["layout"] for block in found["blocks"])
    return ", ".join(f"{count} in the layout of {layout}" for layout, count in layouts.items())


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown."""
    return fill(globals(), found=found)


def kept(file: dict[str, Any]) -> bool:
    """Whether every tensor of the file came back."""
    return bool(file["attention_identical"] and file["other_tensors_identical"])
