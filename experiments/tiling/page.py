"""What the stored times of ways to tile say."""

from typing import Any

from experiments.benchmarks.statistics import mean
from experiments.pages import Rows, Tables, fill

QUESTION = "How should the scores of attention be tiled on a CPU?"
COMMAND = "python -m experiments.tiling --write"


def conclusion(found: dict[str, Any]) -> str:
    """How much few large pieces are worth, where some of the scores need not be computed."""
    by_name = {entry["what"]: entry for entry in found["questions"]}
    padded = _ratio(by_name["bands of padded keys"], "blocks")
    causal = _ratio(by_name["rows and keys of a block, where some are left out"], "256, 2 MiB")
    return (
        f"Into few large pieces: bands of padded keys take on average {padded:.2f} of the time of "
        f"blocks that leave out more, and causal gradients {causal:.2f} of their time with blocks of "
        "half the rows and keys"
    )


def rows(entry: dict[str, Any]) -> Rows:
    """Milliseconds of every way to tile, by case."""
    ways = list(entry["cases"][0]["ways"])
    found = [["case", *(f"**{way}**" if way == entry["chosen"] else way for way in ways)]]
    for case in entry["cases"]:
        times = [1e3 * case["ways"][way]["median"] for way in ways]
        cells = (f"**{x:.1f}**" if x == min(times) else f"{x:.1f}" for x in times)
        found.append([f"B={case['B']}, T={case['T']}", *cells])
    return found


def tables(found: dict[str, Any]) -> Tables:
    """One per question."""
    return {entry["what"]: rows(entry) for entry in found["questions"]}


def text(found: dict[str, Any]) -> str:
    """One table per question, and what else was tried."""
    return fill(globals(), found=found)


def _ratio(entry: dict[str, Any], to: str) -> float:
    ways = [case["ways"] for case in entry["cases"]]
    return mean([way[entry["chosen"]]["median"] / way[to]["median"] for way in ways])
