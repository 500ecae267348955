"""Claims whose evidence is in the results of other experiments: read when the page is made."""

from experiments import records
from experiments.benchmarks import report
from experiments.benchmarks import statistics as stats
from experiments.claims.found import Found, found

MUCH = 1.2


def slower_with_weights() -> Found:
    """Medians of the stored benchmark: need_weights=True relative to need_weights=False."""
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for entry in records.load(report.RESULTS / "quick.json")["cases"]:
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
