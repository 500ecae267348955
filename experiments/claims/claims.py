"""Every claim of the three documents, and what a check of one returns."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

DOCUMENTS = {
    "frameworks": "Why do PyTorch's and TensorFlow's layers give different results?",
    "one_head": "Are eight heads of 64 one head of 512?",
    "blog": "A walk through multi-head attention for those who implement it",
}
MODULES = {  # with the checks of each
    "frameworks": ("frameworks",),
    "one_head": ("one_head",),
    "blog": ("similarity", "blog", "modules"),
}
SAME = 1e-5  # relative difference up to which float32 outputs are the same


class Claim(NamedTuple):
    """Attributes:
    text: what the document says, in our words.
    check: function of one of the document's modules, which returns a `Found`.
    evidence: a sentence, filled with the check's numbers.
    """

    text: str
    check: str
    evidence: str


CLAIMS = {
    document: tuple(Claim(**claim) for claim in claims)
    for document, claims in tomllib.loads(
        Path(__file__).with_name("claims.toml").read_text(encoding="utf-8")
    ).items()
}


class Found(NamedTuple):
    """Attributes:
    holds: condition -> whether the claim holds under it; None: this check cannot show it.
    numbers: for the sentence of evidence.
    """

    holds: dict[str, bool | None]
    numbers: dict[str, Any]


def verdict(holds: dict[str, bool | None]) -> str:
    """In words. A claim that something can be is not refuted where it is not seen.

    >>> verdict({"always": True}), verdict({"long": True, "short": False}), verdict({"here": False})
    ('true', 'true with a condition', 'false')
    >>> verdict({"here": None})
    'not shown'
    """
    if None in holds.values():
        return "true with a condition" if True in holds.values() else "not shown"
    if all(holds.values()):
        return "true"
    return "true with a condition" if any(holds.values()) else "false"


def found(holds: Mapping[str, bool | None], **numbers: Any) -> Found:
    """With Python's own numbers, as JSON has them."""
    return Found(
        {name: None if value is None else bool(value) for name, value in holds.items()},
        {
            name: value.item() if hasattr(value, "item") else value
            for name, value in numbers.items()
        },
    )
