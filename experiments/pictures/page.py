"""What the experiment found, in words; every number is from the result file."""

from typing import Any

from experiments.pages import fill

QUESTION = "What do the heads of a real encoder attend to?"
COMMAND = "python -m experiments.pictures .weights --write"
# What a head may do, by the field of its statistics.
KINDS = {
    "previous": "previous token",
    "next": "next token",
    "same": "same token",
    "named": "[CLS], [SEP]",
}


def best(found: dict[str, Any], field: str) -> tuple[int, int]:
    """Layer and head with the largest share."""
    heads = [
        (head[field], i, j)
        for i, layer in enumerate(found["heads"])
        for j, head in enumerate(layer)
    ]
    _, layer, head = max(heads)
    return layer, head


def _share(found: dict[str, Any], field: str) -> float:
    layer, head = best(found, field)
    return float(found["heads"][layer][head][field])


def conclusion(found: dict[str, Any]) -> str:
    """One or two sentences."""
    (p, q), (n, m) = best(found, "previous"), best(found, "next")
    heads = [head for layer in found["heads"] for head in layer]
    special = sum(head["named"] > 0.5 for head in heads)
    return (
        f"Some do one thing: head {q} of layer {p} gives {_share(found, 'previous'):.0%} to the "
        f"previous token, head {m} of layer {n} {_share(found, 'next'):.0%} to the next; "
        f"{special} of {len(heads)} give more than half to [CLS] and [SEP]."
    )


def table(found: dict[str, Any]) -> str:
    columns = ("entropy", "itself", "previous", "next", "same", "[CLS]", "[SEP]")
    lines = [
        "| layer.head | entropy (nats) | itself | previous | next | same token | [CLS] | [SEP] |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def cells(row: dict[str, Any]) -> str:
        shown = [f"{row['entropy']:.2f}", *(f"{row[name]:.1%}" for name in columns[1:])]
        return " | ".join(shown)

    lines += [
        f"| {i}.{j} | {cells(head)} |"
        for i, layer in enumerate(found["heads"])
        for j, head in enumerate(layer)
    ]
    return "\n".join([*lines, f"| all keys alike | {cells(found['uniform'])} |"])


def extremes(found: dict[str, Any]) -> str:
    lines = ["| what | layer.head | share | all keys alike |", "|---|---|---|---|"]
    for field, name in KINDS.items():
        layer, head = best(found, field)
        share, alike = _share(found, field), found["uniform"][field]
        lines.append(f"| {name} | {layer}.{head} | {share:.1%} | {alike:.1%} |")
    return "\n".join(lines)


def text(found: dict[str, Any]) -> str:
    """The page."""
    L, N = len(found["heads"]), len(found["heads"][0])
    by_layer, cls, sep = (
        [sum(head[field] for head in layer) / N for layer in found["heads"]]
        for field in ("named", "[CLS]", "[SEP]")
    )
    highest = max(range(L), key=by_layer.__getitem__)
    return fill(
        globals(),
        found=found,
        highest=highest,
        by_layer=by_layer,
        range=range,
        L=L,
        cls=cls,
        sep=sep,
        N=N,
    )
