"""Claims whose evidence is in the results of other experiments: read when the page is made."""

from pathlib import Path
from typing import Any

from experiments import records
from experiments.benchmarks import report
from experiments.benchmarks import statistics as stats
from experiments.claims.found import Found, found
from experiments.dataflow import choices
from experiments.initialisation import page as initialisation
from experiments.pictures import page as pictures

EXPERIMENTS = Path(__file__).parents[1]
MUCH = 1.2


def slower_with_weights() -> Found:
    """Medians of the stored benchmark: need_weights=True relative to need_weights=False."""
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for entry in records.load(report.RESULTS / f"{report.most()}.json")["cases"]:
        case = stats.case_of(entry)
        slow, fast = (stats.time_of(entry, f"torch-{path}") for path in ("weights", "sdpa"))
        if case.scope == "layer" and slow and fast:
            ratios[case.T >= 2048].append(slow / fast)
    short, long = ratios[False], ratios[True]
    return found(
        {"batches of T < 2048": min(short) > MUCH, "T >= 2048": min(long) > MUCH},
        short=min(short),
        shortest=max(short),
        long=min(long),
        longest=max(long),
    )


def far_more_efficient() -> Found:
    """Flax Linen's layer, which takes the steps of the reference one by one, and the fastest."""
    ratios: dict[str, list[float]] = {"T < 2048": [], "T >= 2048": []}
    for entry in records.load(report.RESULTS / f"{report.most()}.json")["cases"]:
        case = stats.case_of(entry)
        times = [seconds for peer in entry["peers"] if (seconds := stats.time_of(entry, peer))]
        plain = stats.time_of(entry, "flax-linen")
        if case.scope == "layer" and case.direction == "forward" and plain:
            ratios["T >= 2048" if case.T >= 2048 else "T < 2048"].append(plain / min(times))
    short, long = ratios.values()
    return found(
        {when: min(values) > MUCH for when, values in ratios.items()},
        short=min(short),
        shortest=max(short),
        long=min(long),
        longest=max(long),
    )


def fast_path() -> Found:
    """Time off the fast path relative to on it: whether three of four rounds are above 1."""
    stored = _stored("dataflow")
    holds, numbers = {}, {}
    for weights, choice in zip(("no_weights", "weights"), choices.CHOICES[5:7], strict=True):
        for length, shape in zip(("short", "long"), choices.SHAPES, strict=True):
            ratio = choices.ratio(stored, "torch", shape.name, choice)
            assert ratio is not None
            holds[f"{shape.name}, {weights.replace('_', ' ')}"] = ratio.low > 1
            numbers[f"{weights}_{length}"] = ratio.middle
    return found(holds, **numbers)


def other_features() -> Found:
    """Whether every kind of a real encoder's heads has a head of its own, far above chance."""
    stored = _stored("pictures")
    heads = {field: pictures.best(stored, field) for field in pictures.KINDS}
    shares = {field: stored["heads"][layer][head][field] for field, (layer, head) in heads.items()}
    others = [list(heads.values()).count(place) == 1 for place in heads.values()]
    special = [head["named"] > 0.5 for layer in stored["heads"] for head in layer]
    holds = {
        name: alone and shares[field] > 2 * stored["uniform"][field]
        for (field, name), alone in zip(pictures.KINDS.items(), others, strict=True)
    }
    return found(holds, **shares, special=sum(special), count=len(special))


def convergence() -> Found:
    """Accuracies of the same model after starts of several frameworks: a gap within the spread of
    seeds shows no impact here, and does not show that there can be none."""
    gap, spread = initialisation.gap_and_spread(_stored("initialisation"))
    return found({"starts, in one small model": gap > spread or None}, gap=gap, spread=spread)


def stable_training() -> Found:
    """Whether all runs of all starts end below where they began."""
    runs = _stored("initialisation")["training"]["runs"].values()
    ends = [(losses[0], losses[-1]) for run in runs for losses in run["loss"]]
    fell = [last < first for first, last in ends]
    return found({"starts of frameworks": all(fell)}, fell=sum(fell), count=len(fell))


def _stored(experiment: str) -> dict[str, Any]:
    return records.load(EXPERIMENTS / experiment / "results.json")
