"""What the experiment found, in words; every number is from the result file."""

from typing import Any

from experiments.pages import Tables, fill
from experiments.pictures.figure import KINDS, best

QUESTION = "What do the heads of a real encoder attend to?"
COMMAND = "python -m experiments.pictures .weights --write"


def share(found: dict[str, Any], field: str) -> float:
    """Of the best head."""
    layer, head = best(found, field)
    return float(found["heads"][layer][head][field])


def conclusion(found: dict[str, Any]) -> str:
    """One or two sentences."""
    (p, q), (n, m) = best(found, "previous"), best(found, "next")
    heads = [head for layer in found["heads"] for head in layer]
    special = sum(head["named"] > 0.5 for head in heads)
    return (
        f"Some do one thing: head {q} of layer {p} gives {share(found, 'previous'):.0%} to the "
        f"previous token, head {m} of layer {n} {share(found, 'next'):.0%} to the next; "
        f"{special} of {len(heads)} give more than half to [CLS] and [SEP]."
    )


def tables(found: dict[str, Any]) -> Tables:
    """The most pronounced heads, and all of them."""
    extremes = [("what", "layer.head", "share", "all keys alike")]
    for field, name in KINDS.items():
        layer, head = best(found, field)
        alike = f"{found['uniform'][field]:.1%}"
        extremes.append((name, f"{layer}.{head}", f"{share(found, field):.1%}", alike))
    columns = {"itself": "itself", "previous": "previous", "next": "next", "same": "same token"}
    columns |= {"[CLS]": "[CLS]", "[SEP]": "[SEP]"}

    def cells(row: dict[str, Any]) -> list[str]:
        return [f"{row['entropy']:.2f}", *(f"{row[name]:.1%}" for name in columns)]

    rows = [["layer.head", "entropy (nats)", *columns.values()]]
    for i, of in enumerate(found["heads"]):
        rows += [[f"{i}.{j}", *cells(head)] for j, head in enumerate(of)]
    return {
        "Extremes": extremes,
        "All heads": [*rows, ["all keys alike", *cells(found["uniform"])]],
    }


def text(found: dict[str, Any]) -> str:
    """The page."""
    by_layer, cls, sep = (
        [sum(head[field] for head in layer) / len(layer) for layer in found["heads"]]
        for field in ("named", "[CLS]", "[SEP]")
    )
    highest, lowest = (by_layer.index(pick(by_layer)) for pick in (max, min))
    values: dict[str, Any] = {
        "by_layer": by_layer,
        "cls": cls,
        "sep": sep,
        "highest": highest,
        "lowest": lowest,
    }
    return fill(globals(), found=found, **values)
