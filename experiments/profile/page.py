"""What the stored profile says, and what was tried against it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from experiments.benchmarks import cases
from experiments.benchmarks.cases import Case
from experiments.benchmarks.peers import OURS
from experiments.benchmarks.statistics import mean
from experiments.profile import environment
from experiments.profile.parts import WHOLE
from experiments.profile.tried import TRIED
from experiments.profile.work import PARTS
from experiments.tables import markdown

QUESTION = "Where does the time of a layer go on a CPU, and what keeps it from torch's?"
COMMAND = "python -m experiments.profile --write"
LONG = 512


class Aim(NamedTuple):
    """Of the benchmark: a ratio of some cases to another's whole layers, or to their work."""

    of: str
    other: str
    ratio: float
    chosen: Callable[[Case], bool]


AIMS = (
    Aim("forward, T >= 512", "torch", 0.9, lambda c: c.direction == "forward" and c.T >= LONG),
    Aim("causal or padded", "torch", 0.7, lambda c: c.kind in ("causal", "padded")),
    Aim(
        "with gradient, T >= 512", "torch", 0.9, lambda c: c.direction == "backward" and c.T >= LONG
    ),
    Aim("with gradient, one head", "torch", 0.7, lambda c: c.direction == "backward" and c.N == 1),
    Aim("T < 2048", "flax", 1 / 1.2, lambda c: c.T < 2048),
    Aim("T >= 2048", "flax", 1 / 3, lambda c: c.T >= 2048),
    Aim("T >= 4096", "flax", 1 / 4, lambda c: c.T >= 4096),
    Aim("T >= 2048", "work", 1 / 0.85, lambda c: c.T >= 2048),
)


def conclusion(found: dict[str, Any]) -> str:
    """What would be left if only the parts were, beside torch and Flax."""
    forward, backward, flax = (_ratios(found, AIMS[i]) for i in (0, 2, 5))
    return (
        "XLA's products and softmax, alone or in jaxmha's whole layer, whichever is faster, take "
        f"{mean(forward):.2f} of torch's fastest whole layers forward and {mean(backward):.2f} "
        f"forward and backward (means of these cases of T >= {LONG}), and {min(flax):.2f} to "
        f"{max(flax):.2f} of Flax's from T = 2048. Beside torch's at the same sizes, {_gap(found)}"
    )


def text(found: dict[str, Any]) -> str:
    """Tables of limits, parts, kernels, memory and settings, and what was tried."""
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
            "## What the parts leave of the aims\n",
            (
                "Least: products and softmax of XLA alone, or the whole layer where that is faster, since "
                "it works on several at once or has them in one kernel. It is what these kernels take, "
                "not what no other could. `torch`: the fastest of its ways through the layer; `flax`: the "
                "faster of linen and nnx. Work: all operations that are needed at the rate of XLA's plain "
                "square product. Ratios to torch differ from those of the benchmark, where processes "
                "take turns at every round, as much as the machine changes within minutes.\n"
            ),
            markdown(aims(found)),
            "",
            markdown(limits(found)),
            "",
            "## Parts\n",
            (
                f"{_rest(found)} Milliseconds; rest: masks, biases, layout, and what overlaps (then it "
                "is below 0).\n"
            ),
            markdown(parts(found)),
            "",
            "## Kernels of jaxmha\n",
            _kernels(found["kernels"]),
            "## Calls\n",
            _dispatch(found["dispatch"]),
            "## Memory of one head\n",
            _memory(found["memory"]),
            "## Flags of XLA, and settings of the allocator\n",
            _environment(found["environment"]),
            "## What was tried\n",
            markdown([("what", "result"), *TRIED]),
        ]
    )


def aims(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row per aim: how near the parts come to it."""
    head = "layers", "relative to", "aim", "least, mean", "smallest", "largest", "cases"
    rows: list[tuple[str, ...]] = [head]
    for aim in AIMS:
        ratios = _ratios(found, aim)
        numbers = (f"{x:.2f}" for x in (aim.ratio, mean(ratios), min(ratios), max(ratios)))
        rows.append((aim.of, aim.other, *numbers, str(len(ratios))))
    return rows


def limits(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row per case: the whole and its parts, relative to what they are held against."""
    head = "case", "jaxmha / torch", "parts / torch", "jaxmha / flax", "parts / flax"
    rows: list[tuple[str, ...]] = [(*head, "jaxmha / work", "parts / work", "softmax / work")]
    for name, both in found["parts"].items():
        ours, theirs, work = both["xla"], both["torch"], _work(found, name)
        layers = ours[OURS], _alone(ours)
        ratios = [x / other for other in (theirs["torch"], ours["flax"]) for x in layers]
        ratios += [x / work for x in (*layers, ours["softmax"])]
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
    return {"whole": measured[whole], **times, "rest": measured[whole] - _alone(measured)}


def _work(found: dict[str, Any], name: str) -> float:
    """Milliseconds of a case's operations at the rate of XLA's plain product."""
    rate: float = found["sgemm"]["xla"]
    return cases.named(name).flop / rate * 1e-6


def _ratios(found: dict[str, Any], aim: Aim) -> list[float]:
    """Parts in XLA, or the whole where it takes less, relative to what the aim is relative to."""
    ratios = []
    for name, both in found["parts"].items():
        if aim.chosen(cases.named(name)):
            wholes = {"work": _work(found, name), **both["torch"], **both["xla"]}
            ratios.append(min(_alone(both["xla"]), both["xla"][OURS]) / wholes[aim.other])
    return ratios


def _alone(measured: dict[str, float]) -> float:
    return sum(measured[part] for part in PARTS)


def _rest(found: dict[str, Any]) -> str:
    """How far whole layers are from their parts."""
    ratios = {n: both["xla"][OURS] / _alone(both["xla"]) for n, both in found["parts"].items()}
    most = max(ratios, key=ratios.__getitem__)
    return (
        f"jaxmha's whole layers take {mean(list(ratios.values())):.2f} of the time of their parts, on "
        f"average, and {ratios[most]:.2f} at most (`{most}`)."
    )


def _gap(found: dict[str, Any]) -> str:
    """How the parts of XLA compare with those of torch."""
    ratios = {
        part: mean([both["xla"][part] / both["torch"][part] for both in found["parts"].values()])
        for part in PARTS
    }
    shown = ", ".join(f"{part} take {ratio:.2f}" for part, ratio in ratios.items())
    return f"{shown} of the time, on average"


def _memory(grown: dict[str, dict[str, float]]) -> str:
    head = (
        "Growth of the process's peak in MiB over its value before the first call, a fresh process "
        "for every number, in which a small program of the same framework has run. What the smallest "
        "case takes is compiling, for the most part.\n"
    )
    rows = [("case", *next(iter(grown.values())))]
    for name, by_peer in grown.items():
        rows.append((f"`{name}`", *(f"{mib:.0f}" for mib in by_peer.values())))
    return f"{head}\n{markdown(rows)}\n"


def _kernels(traced: list[dict[str, Any]]) -> str:
    head = (
        "XLA's own trace, milliseconds of a call. A kernel is of the first kind that is in it, so that one "
        "with products may hold a softmax too; kernels that run side by side add up to more than the "
        "call, which takes longer than without a trace.\n"
    )
    kinds = list(dict.fromkeys(kind for entry in traced for kind in entry["kernels"]))
    rows = [("case", "call", *kinds)]
    for entry in traced:
        times = entry["ms"], *(entry["kernels"].get(kind, 0.0) for kind in kinds)
        rows.append((f"`{entry['case']}`", *(f"{x:.1f}" for x in times)))
    return f"{head}\n{markdown(rows)}\n"


def _dispatch(measured: dict[str, dict[str, float]]) -> str:
    rows = [("function", *next(iter(measured.values())))]
    for name, by_way in measured.items():
        rows.append((f"`{name}`", *(f"{x:.0f}" for x in by_way.values())))
    return f"Microseconds of a whole call on the smallest arrays.\n\n{markdown(rows)}\n"


def _environment(measured: dict[str, Any]) -> str:
    head = (
        "Time / error of jaxmha, relative to none of them; of every setting the fastest of some "
        "processes in turns. They belong to the process: the library sets none.\n"
    )
    return f"{head}\n{markdown(environment.table(measured))}\n"
