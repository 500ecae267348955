"""The page of this experiment; every number comes from its result file."""

from typing import Any

import numpy as np

from experiments.heads import derivation
from experiments.tables import Rows, markdown
from experiments.train import beside

QUESTION = "Are eight heads of 64 the same as one head of 512?"
COMMAND = "python -m experiments.heads --write"


def conclusion(found: dict[str, Any]) -> str:
    """The answer."""
    of_eight, script = _layers(found, 8), _script(found)
    equal, seeds = script[0]["equal"], script[0]["seeds"]
    return (
        f"No: with the same weights, outputs differ by {_percent(of_eight['output'])} and "
        f"gradients by {', '.join(_percent(g) for g in of_eight['gradients'])} (Wq, Wk, Wv), "
        f"and after {found['training']['steps']} steps of training "
        f"{beside.extremes(found['training']['runs'])}. The script that prints True does so for {equal} of {seeds} seeds, because its positive "
        "weights saturate the softmax; with centred weights for "
        f"{sum(kind['equal'] for kind in script[1:])} of "
        f"{sum(kind['seeds'] for kind in script[1:])}."
    )


def tables(found: dict[str, Any]) -> dict[str, Rows]:
    """By title."""
    return {
        "The script, for four kinds of matrices": _script_rows(found),
        "The same matrices, cut into heads": _layer_rows(found),
        "When they are equal": _case_rows(found),
        "Training": beside.rows("heads", found["training"]["runs"]),
    }


def text(found: dict[str, Any]) -> str:
    """Markdown."""
    shown = {title: markdown(rows) for title, rows in tables(found).items()}
    of_eight, script, first = _layers(found, 8), _script(found), _script(found)[0]
    settings, training = found["settings"], found["training"]
    E, T = settings["E"], settings["T"]
    sums = max(r["sum_of_logits"] for seed in found["layers"] for r in seed)
    error = max(r["float32_error"] for seed in found["layers"] for r in seed)
    equal = [case for case in found["cases"] if case["equal"]]
    near = [case for case in found["cases"] if not case["equal"]]
    return f"""{conclusion(found)}

The question was put with a script: three random matrices of {E} by {E}, no output layer, once cut
into 8 heads of {E // 8} and once used as one head of {E}. It printed True.

## Why it printed True

![Eight heads against one over {first["seeds"]} seeds: one dot per seed. Only matrices without a \
negative entry ever print True.](script.svg)

The matrices of the script are uniform on [0, 1), and so are its inputs. All products of queries and
keys are then large and positive (logits to {first["largest_logit"]:.0e}), and the softmax saturates:
in {first["one_hot"]} of {first["seeds"]} seeds every weight of every head rounds to 0 or 1. The key
with the largest entries is the first choice of nearly every query and head. Where all heads choose
the key that one head chooses, every output is a copy of the same value, and the tensors are equal
bit by bit: {first["equal"]} of {first["seeds"]} seeds. Otherwise some head chooses another key, and
the outputs differ by up to {_percent(first["worst"])}. Whether all heads choose that key
predicts what the script prints for {first["explained"]} of {first["seeds"]} seeds.
It is an accident of the weights and not a property of the mechanism. A softmax as hard as this also
learns nothing about queries: the slopes of one head are exactly 0 in {first["dead"]} of
{first["seeds"]} seeds.

{shown["The script, for four kinds of matrices"]}

*same key*: share of (query, head) whose largest logit is where that of one head is; *least top
weight*: the smallest that the largest weight of any row is; *slopes of Wq*: their norm relative to
that of the slopes of Wv, for the sum of the outputs of one head. Inputs are uniform on [0, 1) in all
rows, as in the script; below they are of unit variance, and the same matrices differ by more.

## Why they are not the same

![Blocks on the diagonal: with h heads, h softmaxes take {E}/h terms each.](blocks.svg)

The logit of one head is a sum of {E} products of a component of the query and the same component of
the key. Heads cut this sum into blocks that share no component, and each block has a scale and a
softmax of its own. The sums of the blocks still add up to the sum of one head (to {sums:.0e},
float64): what differs is that the softmax is taken of each part, not of the whole.

![Products q·k of eight heads add up to that of one head. Their weights are eight different \
pictures, and the mean of them is not the picture of one head.](sums.svg)

{shown["The same matrices, cut into heads"]}

Medians over {len(found["layers"])} draws of Xavier-uniform matrices and inputs of unit variance,
{T} positions; differences are relative to the norm of one head's. Ranks are smallest and largest
over batch rows and heads. The table is computed in float64; `jaxmha.multi_head_attention` in float32
is within {error:.0e} of it for every number of heads.

![Singular values: logits of a head end at its width; the softmax brings the rank back.](ranks.svg)

A head of width H has logits of rank H at most. The softmax is not linear, and lifts the rank of the
weights to all {T} positions: a narrow head is limited in the logits that it can have, not in the
rank of what it does with them.

## What changes in the gradients

![Difference of outputs and of gradients from one head's, one dot per draw.](gradients.svg)

With the same weights and the same slope of the output, gradients with 8 heads differ by
{_percent(of_eight["gradients"][0])} for Wq, {_percent(of_eight["gradients"][1])} for Wk and \
{_percent(of_eight["gradients"][2])} for Wv, outputs by {_percent(of_eight["output"])}. \
{_as_much(found)} So the difference is not only in how heads
are optimised: it is there before the first step.

{derivation.text(E, 8)}
## When they are the same

Outputs are equal for all values exactly where every head has the weights of the one head. Five
ways to make that so, each beside one step away from it (8 heads, float64):

{shown["When they are equal"]}

Where weights are equal, outputs are within {max(c["output"] for c in equal):.0e}; one step away
they differ by {_percent(min(c["output"] for c in near))} or more.

## What it does to training

![Training loss with {", ".join(list(training["runs"])[1:])} beside one head (mean and range over \
{training["seeds"]} seeds), and accuracy at the end.](training.svg)

{beside.furthest(training["runs"])}

{shown["Training"]}

{beside.about(training)} The number of parameters is the same, and each seed starts from the same weights and sees the same
batches whatever the number of heads. This says what heads do to this small model, not to others.

## How it was done

Matrices are carried into `jaxmha` by its layout of three bare matrices, with `num_heads` as the only
difference; exact values come from the float64 implementation that the converters are checked
against. The script was repaired where it does not parse (three brackets, the comparison itself), and
where `view` after `transpose` raises; it runs in torch, once with 8 heads and once with one, for
each of {len(script)} kinds of matrices and {first["seeds"]} seeds.
"""


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def _as_much(found: dict[str, Any]) -> str:
    """Which gradients differ at least as much as outputs do, by the medians of every cut."""
    cuts = [_layers(found, h) for h in found["settings"]["heads"] if h > 1]
    said: dict[str, list[str]] = {}
    for i, name in enumerate(("Wq", "Wk", "Wv")):
        most = [cut["gradients"][i] >= cut["output"] for cut in cuts]
        words = "at least as much" if all(most) else "more or less" if any(most) else "less"
        said.setdefault(words, []).append(name)
    parts = [f"{words} for {' and '.join(names)}" for words, names in said.items()]
    return f"Beside outputs, gradients differ {', '.join(parts)}, whatever the number of heads."


def _script(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every kind of matrices: counts and extremes over its seeds."""
    kinds = []
    for kind, seeds in found["script"].items():
        other = [s["difference"] for s in seeds if not s["equal"]] or [0.0]
        kinds.append(
            {
                "kind": kind,
                "seeds": len(seeds),
                "equal": sum(s["equal"] for s in seeds),
                "explained": sum(s["equal"] == (s["same_key"] == 1) for s in seeds),
                "one_hot": sum(s["least_top_weight"] == 1 for s in seeds),
                "dead": sum(s["query_gradient"] == 0 for s in seeds),
                "median": float(np.median(other)),
                "worst": max(other),
                "largest_logit": max(s["largest_logit"] for s in seeds),
                "same_key": float(np.mean([s["same_key"] for s in seeds])),
                "least_top_weight": min(s["least_top_weight"] for s in seeds),
                "query_gradient": float(np.median([s["query_gradient"] for s in seeds])),
            }
        )
    return kinds


def _script_rows(found: dict[str, Any]) -> Rows:
    head = (
        "matrices", "True", "difference, where not: median (largest)", "largest logit", "same key",
        "least top weight", "slopes of Wq (median)",
    )  # fmt: skip
    rows = [
        (
            kind["kind"],
            f"{kind['equal']} of {kind['seeds']}",
            f"{_percent(kind['median'])} ({_percent(kind['worst'])})",
            f"{kind['largest_logit']:.2g}",
            _percent(kind["same_key"]),
            f"{kind['least_top_weight']:.2g}",
            f"{kind['query_gradient']:.1g}",
        )
        for kind in _script(found)
    ]
    return [head, *rows]


def _layers(found: dict[str, Any], h: int) -> dict[str, Any]:
    """Medians over draws; ranks: smallest and largest."""
    records = [r for seed in found["layers"] for r in seed if r["heads"] == h]
    medians = {
        name: float(np.median([r[name] for r in records])) for name in ("output", "same_key")
    }
    ranks = {
        name: (min(r[name][0] for r in records), max(r[name][1] for r in records))
        for name in ("logits_rank", "weights_rank")
    }
    slopes = np.median([r["gradients"] for r in records], axis=0).tolist()
    return {**medians, **ranks, "gradients": slopes, "logits": records[0]["logits"]}


def _layer_rows(found: dict[str, Any]) -> Rows:
    head = (
        "heads", "logits", "output", "slopes of Wq, Wk, Wv", "same key", "rank of logits",
        "rank of weights",
    )  # fmt: skip
    rows = []
    for h in found["settings"]["heads"]:
        of = _layers(found, h)
        ranks = [
            str(a) if a == b else f"{a} to {b}" for a, b in (of["logits_rank"], of["weights_rank"])
        ]
        rows.append(
            (
                f"{h} of {found['settings']['E'] // h}",
                " × ".join(str(size) for size in of["logits"]),
                _percent(of["output"]),
                ", ".join(_percent(g) for g in of["gradients"]),
                _percent(of["same_key"]),
                *ranks,
            )
        )
    return [head, *rows]


def _case_rows(found: dict[str, Any]) -> Rows:
    rows = [
        (
            case["name"],
            "equal" if case["equal"] else "not equal",
            f"{case['output']:.1e}" if case["output"] else "0",
            f"{case['weights']:.1e}" if case["weights"] else "0",
        )
        for case in found["cases"]
    ]
    return [("case", "outputs", "relative difference", "largest difference of weights"), *rows]
