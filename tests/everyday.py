"""What every run takes of a long list of parameters; the rest is slow."""

from collections.abc import Iterable
from typing import Any

import pytest


def everyday(values: Iterable[Any], *names: str) -> list[Any]:
    """Parameters by name (a string is its own); those that are not among `names` are slow."""
    named = [(value if isinstance(value, str) else value.name, value) for value in values]
    assert set(names) <= {name for name, _ in named}
    return [
        pytest.param(value, id=name, marks=() if name in names else pytest.mark.slow)
        for name, value in named
    ]
