"""What a check returns."""

from collections.abc import Mapping
from typing import Any, NamedTuple

SAME = 1e-5  # relative difference up to which float32 answers are the same


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
            name: getattr(value, "item", lambda value=value: value)()
            for name, value in numbers.items()
        },
    )
