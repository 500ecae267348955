"""What was found, in words; every number from results.json."""

from collections import Counter
from typing import Any

from experiments.benchmarks.report import table
from experiments.benchmarks.statistics import mean
from experiments.pages import fill

QUESTION = "Do published weights survive the way through every framework and back?"
COMMAND = "make demo"


def conclusion(found: dict[str, Any]) -> str:
    """One sentence."""
    same = sum(block["identical"] for block in found["blocks"])
    files = sum(kept(file) for file in found["files"])
    answer = "Yes" if same == len(found["blocks"]) and files == len(found["files"]) else "No"
    return (
        f"{answer}, bit by bit: {same} of {len(found['blocks'])} attention blocks and all tensors of "
        f"{files} of {len(found['files'])} files come back as they were."
    )


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown."""
    blocks, names = found["blocks"], list(found["blocks"][0]["errors"])
    layouts = Counter(block["layout"] for block in blocks)
    rows = []
    for name in names:
        ratios = [block["errors"][name] / block["errors"]["torch"] for block in blocks]
        errors = [block["errors"][name] for block in blocks]
        rows.append(
            [name, f"{mean(errors):.1f}", *(f"{x:.2f}" for x in (mean(ratios), max(ratios)))]
        )
    trips = [
        [
            trip,
            str(len(files)),
            f"{sum(file['megabytes'] for file in files):.0f}",
            f"{sum(map(kept, files))} of {len(files)}",
        ]
        for trip in sorted({file["trip"] for file in found["files"]})
        if (files := [file for file in found["files"] if file["trip"] == trip])
    ]
    kinds = ", ".join(f"{count} in the layout of {layout}" for layout, count in layouts.items())
    return fill(globals(), blocks=blocks, kinds=kinds, found=found, rows=rows, trips=trips)


def kept(file: dict[str, Any]) -> bool:
    """Whether every tensor of the file came back."""
    return bool(file["attention_identical"] and file["other_tensors_identical"])
