"""What the stored profile says, and what was tried against it."""

from typing import Any

from experiments.benchmarks.statistics import mean
from experiments.profile.flags import relative
from experiments.profile.parts import COUNTS, WHOLE, split

QUESTION = "Where does the time of a layer go on a CPU, and what keeps it from torch's?"
COMMAND = "python -m experiments.profile --write"
PRODUCTS = ("projections", "scores", "weighted sums")
# What was measured once, and is in the library or not.
TRIED = (
    ("smaller and larger blocks, more and fewer bands", "see cuts: few large kernels win"),
    (
        "heads of T = 512 worked on together",
        "4 take 0.9 to 1 of the time of 2, with the gradient 0.87 to 0.94",
    ),
    (
        "bands of causal rows of a few heads, which XLA works on side by side",
        "0.77 of the time of blocks at T = 2048; the same bands one after another none less",
    ),
    (
        "masked logits chosen (`where`) instead of -inf added that is made of the mask",
        "0.9 of the time of such bands, 0.98 of that of blocks",
    ),
    (
        "heads side by side instead of one after another",
        (
            "0.8 to 0.95 of the time forward while all scores take up to 16 MiB; 1.5 to 1.7 at "
            "T = 2048, where temporaries leave the caches; little with the gradient, which takes "
            "twice as long to compile"
        ),
    ),
    (
        "masks as arrays: rows with the narrowest of a few widths of keys, in one softmax",
        "45 to 54 ms against 45 of blocks at T = 2048: not taken",
    ),
    (
        "tiles of 256 x 256, for which XLA makes one kernel of products and softmax",
        (
            "1.2 ns a score against 1.45 to 1.6 of larger ones; but tiles have to be joined by "
            "their maxima and sums, and with a second answer XLA makes no such kernel"
        ),
    ),
    (
        "bands in the gradient",
        "10 % faster at T = 2048, and 3.4 s instead of 1.5 s to compile: not taken",
    ),
    (
        "sums of products of two arrays as `(x * y).sum(-1)`",
        (
            "XLA makes a loop of it that takes 10 times as long as a product and 5 times the memory: "
            "products instead"
        ),
    ),
    (
        "slopes in the place of what they are slopes of",
        (
            "temporaries at T = 2048 fall from 44 to 28 MiB, which the allocator keeps: 12,900 page faults "
            "a call became none"
        ),
    ),
    (
        "at least 1024 rows forward and 512 in the gradient, up to 16 MiB, without bias and dropout",
        "0.95 of the time at T = 4096 and 0.85 at 8192, forward and backward 0.95 and 0.7",
    ),
    (
        "blocks of 8 MiB in the gradient with a bias or dropout",
        "1.1 to 1.2 times as long: what is made of the scores no longer fits the caches; not taken",
    ),
    (
        "queries transposed in the gradient, so that every product is of row-major matrices",
        "with the line above forward and backward take 0.77 to 0.83 of the time at T >= 1024",
    ),
    (
        "blocks of 64 rows and keys within windows of up to 256 keys",
        "0.4 to 0.75 of the time of blocks of 256",
    ),
    (
        "a softmax that subtracts no maximum, where logits are known to be small",
        "0.92 to 1.0 of the time of products and softmax at T = 1024 to 4096: not worth a second program",
    ),
    (
        "one product for query, key and value, and heads first from there on",
        "cannot save more than the rest in the table of parts, where both are so",
    ),
    (
        "settings of the allocator (MALLOC_*)",
        "3 to 8 % where large temporaries come and go; they belong to the process, not to a library",
    ),
)


def conclusion(found: dict[str, Any]) -> str:
    """Shares of the parts, and what would be left if only they were."""
    rows = _rows(found, "forward", 2048)
    ours, theirs = (rows[backend] for backend in WHOLE)
    share = sum(ours[part] for part in PRODUCTS) / ours["whole"]
    least = (ours["whole"] - ours["rest"]) / theirs["whole"]
    return (
        f"At T = 2048 products take {share:.0%} of a layer forward and the softmax "
        f"{ours['softmax'] / ours['whole']:.0%}; torch takes {theirs['whole'] / ours['whole']:.2f} times as "
        f"long. XLA's products and softmax alone, with nothing between them, would take {least:.2f} "
        "of torch's whole layer"
    )


def text(found: dict[str, Any]) -> str:
    """Tables of parts, kernels and flags, and what was tried."""
    rates = ", ".join(f"{rate:.0f} in {backend}" for backend, rate in found["sgemm"].items())
    parts = [
        f"{conclusion(found)}.\n",
        (
            "Every part runs alone, as often as the layer has it, on blocks of the sizes that the "
            "library takes, one after another in the same place. What a part takes alone is what it could "
            "take in the layer where nothing else disturbed it; where parts alone take longer than the "
            f"whole, the whole makes one kernel of several. Milliseconds, medians of {found['rounds']} "
            f"processes of either framework by turns. One plain product (1024 x 1024 x 1024), "
            f"GFLOP/s: {rates}.\n"
        ),
        "## Parts\n",
        f"| case | in | whole | {' | '.join(COUNTS['forward'])} | rest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, by_backend in found["parts"].items():
        for backend, name in WHOLE.items():
            cells = (f"{x:.1f}" for x in split(case, by_backend[backend]).values())
            parts.append(f"| `{case}` | {name} | {' | '.join(cells)} |")
    parts += ["", _gap(found), "## Kernels of jaxmha\n", _kernels(found["kernels"])]
    parts += ["## Calls\n", _dispatch(found["dispatch"])]
    parts += ["## Process-wide flags of XLA\n", _flags(found["flags"]), "## What was tried\n"]
    parts += ["| what | result |", "|---|---|", *(f"| {what} | {how} |" for what, how in TRIED)]
    return "\n".join(parts)


def _rows(found: dict[str, Any], direction: str, T: int) -> dict[str, dict[str, float]]:
    (case,) = (name for name in found["parts"] if f"-{direction}-" in name and f"-T{T}-" in name)
    return {backend: split(case, x) for backend, x in found["parts"][case].items()}


def _gap(found: dict[str, Any]) -> str:
    """How the parts of XLA compare with those of torch."""
    ratios = {
        part: mean(
            [
                by_backend["xla"][part] / by_backend["torch"][part]
                for by_backend in found["parts"].values()
            ]
        )
        for part in ("whole", *COUNTS["forward"])
    }
    shown = ", ".join(f"{part} {ratio:.2f}" for part, ratio in ratios.items())
    return f"XLA's time over torch's, mean of all cases: {shown}.\n"


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
