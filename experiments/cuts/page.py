"""What the stored times of ways to cut say."""

from typing import Any

from experiments.benchmarks.statistics import mean
from experiments.cuts.tried import TRIED
from experiments.tables import markdown

QUESTION = "How should the scores of attention be cut into blocks on a CPU?"
COMMAND = "python -m experiments.cuts --write"


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


def text(found: dict[str, Any]) -> str:
    """One table per question."""
    parts = [
        f"{conclusion(found)}.\n",
        (
            "XLA makes one kernel of a softmax between two products, and spreads every kernel over all "
            "cores; starting one and waiting for the last core costs tens of microseconds. So what "
            "counts is not only how many scores are computed, but in how many kernels. "
            f"{found['N']} heads of size {found['H']}, float32, medians of {found['rounds']} "
            "interleaved rounds. Bold columns: what the library does; bold numbers: the fastest.\n"
        ),
    ]
    for entry in found["questions"]:
        ways = list(entry["cases"][0]["ways"])
        heads = [f"**{way}**" if way == entry["chosen"] else way for way in ways]
        kind = f"{entry['kind']} attention{' and its gradient' if entry['gradient'] else ''}"
        parts.append(
            f"## {entry['what'][0].upper()}{entry['what'][1:]}\n\nMilliseconds of {kind}:\n"
        )
        parts.append(f"| case | {' | '.join(heads)} |\n|---|{'---|' * len(ways)}")
        for case in entry["cases"]:
            times = {way: 1e3 * case["ways"][way]["median"] for way in ways}
            cells = (
                f"**{x:.1f}**" if x == min(times.values()) else f"{x:.1f}" for x in times.values()
            )
            parts.append(f"| B={case['B']}, T={case['T']} | {' | '.join(cells)} |")
        parts.append(
            "\nCompilation at the largest T: "
            + ", ".join(f"{w} {entry['cases'][-1]['ways'][w]['compile']:.1f} s" for w in ways)
            + ".\n"
        )
    parts.append(f"## Also tried\n\n{markdown([('change', 'result'), *TRIED])}\n")
    return "\n".join(parts)


def _ratio(entry: dict[str, Any], to: str) -> float:
    ways = [case["ways"] for case in entry["cases"]]
    return mean([way[entry["chosen"]]["median"] / way[to]["median"] for way in ways])
