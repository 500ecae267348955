"""Claims whose evidence is in the results of other experiments: read when the page is made."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments import records
from experiments.benchmarks import report
from experiments.benchmarks import statistics as stats
from experiments.claims.claims import Found, found
from experiments.dataflow import choices
from experiments.heads import page as heads
from experiments.initialisation import page as initialisation
from experiments.pictures import figure as pictures

EXPERIMENTS = Path(__file__).parents[1]
MUCH = 1.2


def _stored(experiment: str) -> dict[str, Any]:
    return records.load(EXPERIMENTS / experiment / "results.json")


def _by_length(ratio: Callable[[stats.Entry], float | None], short: str) -> Found:
    """Extremes of a ratio over the layers of the stored benchmark: short ones, and from 2048 on."""
    ratios: dict[str, list[float]] = {short: [], "T >= 2048": []}
    for entry in records.load(report.RESULTS / f"{report.most()}.json")["cases"]:
        case = stats.case_of(entry)
        if case.scope == "layer" and (found_ratio := ratio(entry)):
            ratios["T >= 2048" if case.T >= 2048 else short].append(found_ratio)
    below, above = ratios.values()
    return found(
        {when: min(values) > MUCH for when, values in ratios.items()},
        short=min(below),
        shortest=max(below),
        long=min(above),
        longest=max(above),
    )


def slower_with_weights() -> Found:
    """Medians of the stored benchmark: need_weights=True relative to need_weights=False."""

    def ratio(entry: stats.Entry) -> float | None:
        slow, fast = (stats.time_of(entry, f"torch-{path}") for path in ("weights", "sdpa"))
        return slow / fast if slow and fast else None

    return _by_length(ratio, "batches of T < 2048")


def far_more_efficient() -> Found:
    """Flax Linen's layer, which takes the steps of the reference one by one, and the fastest."""

    def ratio(entry: stats.Entry) -> float | None:
        times = [seconds for peer in entry["peers"] if (seconds := stats.time_of(entry, peer))]
        plain = stats.time_of(entry, "flax-linen")
        forward = stats.case_of(entry).direction == "forward"
        return plain / min(times) if plain and forward else None

    return _by_length(ratio, "T < 2048")


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
    """Tests that each kind of head has a best head of its own, far above uniform attention."""
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


def as_printed() -> Found:
    """How the first two examples end with their own masks; the third runs both."""
    first, second = _stored("attribution")["errors"].values()
    holds = {"example 1": first == "runs", "example 2": second == "runs"}
    names = {"first": first.partition(":")[0], "second": second.partition(":")[0]}
    return found({**holds, "example 3": all(holds.values())}, **names)


def convergence() -> Found:
    """Accuracies of the same model after starts of several frameworks: a gap within the spread of
    seeds shows no impact here, and does not show that there can be none."""
    gap, deviation = initialisation.gap_and_deviation(_stored("initialisation"))
    return found(
        {"starts, in one small model": gap > deviation or None}, gap=gap, deviation=deviation
    )


def stable_training() -> Found:
    """Tests that the loss of every training run, of every initialisation, ends below its start."""
    runs = _stored("initialisation")["training"]["runs"].values()
    ends = [(losses[0], losses[-1]) for run in runs for losses in run["loss"]]
    fell = [last < first for first, last in ends]
    return found({"starts of frameworks": all(fell)}, fell=sum(fell), count=len(fell))


def prints_true() -> Found:
    """Seeds for which the script prints True: of its own matrices, and of those with signs."""
    own, *signed = _stored("heads")["script"].values()
    equal, others = sum(s["equal"] for s in own), [s["equal"] for kind in signed for s in kind]
    holds = {
        "some seeds": equal > 0,
        "all seeds": equal == len(own),
        "matrices with negative entries": any(others),
    }
    largest = max(s["largest_logit"] for s in own)
    return found(
        holds, equal=equal, seeds=len(own), signed=sum(others), of=len(others), largest=largest
    )


def same_tensor() -> Found:
    """The least difference of any seed for drawn matrices; and where softmaxes agree for a reason."""
    stored = _stored("heads")
    xavier, normal = (
        min(s["difference"] for s in stored["script"][kind])
        for kind in ("Xavier-uniform", "normal")
    )
    same = {case["name"]: case["output"] < 1e-9 for case in stored["cases"] if case["equal"]}
    holds = {"Xavier": xavier < 1e-9, "normal": normal < 1e-9}
    return found(holds | same, xavier=xavier, normal=normal)


def _of_eight() -> dict[str, Any]:
    """Medians of eight heads against one."""
    return heads.of_layers(_stored("heads"), 8)


def only_optimisation() -> Found:
    """Before any step is taken."""
    away = _of_eight()["output"]
    return found({"outputs are the same": away < 1e-9}, output=away)


def other_gradients() -> Found:
    """Relative differences of eight heads from one."""
    q, k, v = _of_eight()["gradients"]
    return found({"Xavier": min(q, k, v) > 1e-3}, q=q, k=k, v=v)


def certainly_different() -> Found:
    """In general, and where softmaxes agree for a reason."""
    same = {case["name"]: case["output"] for case in _stored("heads")["cases"] if case["equal"]}
    away = _of_eight()["output"]
    holds = {"Xavier": away > 1e-9} | {name: x > 1e-9 for name, x in same.items()}
    return found(holds, apart=away, most=max(same.values()), cases=", ".join(same))


def subset_of_components() -> Found:
    """Sums of products of the heads add up to those of one head; their softmaxes do not."""
    stored = _stored("heads")
    away = max(of["sum_of_logits"] for seed in stored["layers"] for of in seed)
    E = stored["settings"]["E"]
    return found({"8 heads": away < 1e-12}, apart=away, terms=E // 8, all=E)


def shapes_of_weights() -> Found:
    """Tests whether the logits of eight heads and of one differ in shape."""
    eight, one = (heads.of_layers(_stored("heads"), h)["logits"] for h in (8, 1))
    return found({"8 heads and 1": eight != one}, eight=str(eight), one=str(one))
