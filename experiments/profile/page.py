"""What the stored profile says, and what was tried against it."""

from typing import Any

from experiments.benchmarks import cases
from experiments.benchmarks.statistics import mean
from experiments.profile.flags import relative
from experiments.profile.parts import WHOLE
from experiments.profile.tried import TRIED
from experiments.profile.work import PARTS
from experiments.tables import markdown

QUESTION = "Where does the time of a layer go on a CPU, and what keeps it from torch's?"
COMMAND = "python -m experiments.profile --write"
LONG = 512


def conclusion(found: dict[str, Any]) -> str:
    """What would be left if only the parts were, beside torch and Flax."""
    least = {d: mean(_ratios(found, "torch", d)) for d in ("forward", "backward")}
    flax = [x for direction in least for x in _ratios(found, "flax", direction, 2048)]
    return (
        "XLA's products and softmax alone, with nothing between them, take "
        f"{least['forward']:.2f} of torch's fastest whole layers forward and {least['backward']:.2f} "
        f"forward and backward (means of these cases of T >= {LONG}), and {min(flax):.2f} to "
        f"{max(flax):.2f} of Flax's from T = 2048: XLA's products are slower than torch's at the sizes "
        "of attention, and its softmax takes more than twice as long"
    )


def text(found: dict[str, Any]) -> str:
    """Tables of limits, parts, kernels, memory and flags, and what was tried."""
    rates = ", ".join(f"{rate:.0f} in {backend}" for backend, rate in found["sgemm"].items())
    return "\n".join(
        [
            f"{conclusion(found)}.\n",
            (
                "Every part runs alone, as often as the layer has it, on blocks of the sizes that the "
                "library takes, one after another in the same place; those of the gradient with its own "
                "operands. What a part takes alone is what it could take in the layer where nothing else "
                "disturbed it; where parts alone take longer than the whole, the whole works on several "
                f"at once. Medians of {found['rounds']} processes of either framework by turns. One plain "
                f"product (1024 x 1024 x 1024), GFLOP/s: {rates}.\n"
            ),
            "## Limits\n",
            (
                "Parts: products and softmax of XLA alone. `torch`: the fastest of its ways through the "
                "layer; `flax`: the faster of linen and nnx. Work: all operations that are needed at the "
                "rate of XLA's plain product.\n"
            ),
            markdown(limits(found)),
            "",
            "## Parts\n",
            "Milliseconds. Rest: masks, biases, layout, and what overlaps (then it is below 0).\n",
            markdown(parts(found)),
            "",
            _gap(found),
            "## Kernels of jaxmha\n",
            _kernels(found["kernels"]),
            "## Calls\n",
            _dispatch(found["dispatch"]),
            "## Memory of one head\n",
            _memory(found["memory"]),
            "## Process-wide flags of XLA\n",
            _flags(found["flags"]),
            "## What was tried\n",
            markdown([("what", "result"), *TRIED]),
        ]
    )


def limits(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row per case: the whole and its parts, relative to what they are held against."""
    head = "case", "jaxmha / torch", "parts / torch", "jaxmha / flax", "parts / flax"
    rows: list[tuple[str, ...]] = [(*head, "jaxmha / work", "parts / work", "softmax / work")]
    for name, both in found["parts"].items():
        ours, theirs, work = both["xla"], both["torch"], _work(found, name)
        alone = sum(ours[part] for part in PARTS)
        others = theirs["torch"], ours["flax"]
        ratios = [x / other for other in others for x in (ours["jaxmha"], alone)]
        ratios += [x / work for x in (ours["jaxmha"], alone, ours["softmax"])]
        rows.append((f"`{name}`", *(f"{ratio:.2f}" for ratio in ratios)))
    return rows


def parts(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Two lines per case."""
    rows: list[tuple[str, ...]] = [("case", "in", "whole", *PARTS, "rest")]
    for name, both in found["parts"].items():
        for backend, wholes in WHOLE.items():
            whole = next(iter(wholes))
            cells = (f"{x:.3g}" for x in split(both[backend], whole).values())
            rows.append((f"`{name}`", whole, *cells))
    return rows


def split(measured: dict[str, float], whole: str) -> dict[str, float]:
    """The whole, its parts, and the rest.

    >>> one = {"x": 9.0, "projections": 1.0, "scores": 2.0, "weighted sums": 2.0, "softmax": 3.0}
    >>> split(one, "x")["rest"]
    1.0
    """
    times = {part: measured[part] for part in PARTS}
    return {"whole": measured[whole], **times, "rest": measured[whole] - sum(times.values())}


def _work(found: dict[str, Any], name: str) -> float:
    """Milliseconds of a case's operations at the rate of XLA's plain product."""
    rate: float = found["sgemm"]["xla"]
    return cases.named(name).flop / rate * 1e-6


def _ratios(found: dict[str, Any], other: str, direction: str, T: int = LONG) -> list[float]:
    """Parts in XLA relative to another's whole layer, of all long cases."""
    backend = "torch" if other == "torch" else "xla"
    return [
        sum(both["xla"][part] for part in PARTS) / both[backend][other]
        for name, both in found["parts"].items()
        if cases.named(name).direction == direction and T <= cases.named(name).T
    ]


def _gap(found: dict[str, Any]) -> str:
    """How the parts of XLA compare with those of torch."""
    ratios = {
        part: mean([both["xla"][part] / both["torch"][part] for both in found["parts"].values()])
        for part in PARTS
    }
    shown = ", ".join(f"{part} {ratio:.2f}" for part, ratio in ratios.items())
    return f"XLA's time over torch's for the same part, mean of all cases: {shown}.\n"


def _memory(grown: dict[str, dict[str, float]]) -> str:
    head = (
        "Growth of the process's peak in MiB over its value before the first call, a fresh process "
        "for every number. What the smallest case takes is compiling, for the most part.\n"
    )
    rows = [("case", *next(iter(grown.values())))]
    for name, by_peer in grown.items():
        rows.append((f"`{name}`", *(f"{mib:.0f}" for mib in by_peer.values())))
    return f"{head}\n{markdown(rows)}\n"


def _kernels(traced: list[dict[str, Any]]) -> str:
    kinds = list(dict.fromkeys(kind for entry in traced for kind in entry["kernels"]))
    lines = [
        (
            "XLA's own trace, milliseconds of a call. A kernel is of the first kind that is in it, so that one "
            "with products may hold a softmax too; kernels that run side by side add up to more than the "
            "call.\n"
        ),
        f"| case | call | {' | '.join(kinds)} |",
        f"|---|---|{'---|' * len(kinds)}",
    ]
    for entry in traced:
        cells = (f"{entry['kernels'].get(kind, 0.0):.1f}" for kind in kinds)
        lines.append(f"| `{entry['case']}` | {entry['ms']:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _dispatch(measured: dict[str, dict[str, float]]) -> str:
    ways = list(next(iter(measured.values())))
    lines = [
        "Microseconds of a whole call on the smallest arrays.\n",
        f"| function | {' | '.join(ways)} |",
        f"|---|{'---|' * len(ways)}",
    ]
    for name, by_way in measured.items():
        lines.append(f"| `{name}` | {' | '.join(f'{by_way[way]:.0f}' for way in ways)} |")
    return "\n".join(lines) + "\n"


def _flags(measured: dict[str, Any]) -> str:
    results, settings = measured["results"], measured["settings"]
    cases = list(results["none"])
    lines = [
        "Time of jaxmha relative to none / error relative to none. The library sets none of them.\n",
        f"| flags | {' | '.join(f'`{case}`' for case in cases)} |",
        f"|---|{'---|' * len(cases)}",
    ]
    for name, cells in relative(results).items():
        flag = f" (`{settings[name]}`)" if settings[name] else ""
        lines.append(f"| {name}{flag} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
