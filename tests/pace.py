"""Limits of process seconds, the same on slow and busy machines."""

import time

_NOMINAL = 0.1
"""Process seconds of the reference on the machine whose seconds the limits are."""


def _reference() -> float:
    start = time.process_time()
    table: dict[str, tuple[int, str]] = {}
    for i in range(150_000):
        name = str(i)
        table[name] = (i, name)
    return time.process_time() - start


def within(seconds: float, limit: float) -> bool:
    """Says if work that took ``seconds`` keeps ``limit``, which a slower machine stretches.

    The reference runs only for work beyond the limit: fast machines pay nothing.
    """
    return seconds < limit or seconds < limit * _reference() / _NOMINAL
