"""What a check returns."""

from typing import Any, NamedTuple

SAME = 1e-5  # relative difference up to which float32 answers are the same


class Found(NamedTuple):
    """Attributes:
    holds: condition -> whether the claim holds under it.
    numbers: for the sentence of evidence.
    """

    holds: dict[str, bool]
    numbers: dict[str, Any]


def verdict(holds: dict[str, bool]) -> str:
    """In words.

    >>> verdict({"always": True}), verdict({"long": True, "short": False}), verdict({"here": False})
    ('true', 'true with a condition', 'false')
    """
    if all(holds.values()):
        return "true"
    return "true with a condition" if any(holds.values()) else "false"


def found(holds: dict[str, bool], **numbers: Any) -> Found:
    """With Python's own numbers, as JSON has them."""
    return Found(
        {condition: bool(value) for condition, value in holds.items()},
        {
            name: getattr(value, "item", lambda value=value: value)()
            for name, value in numbers.items()
        },
    )
