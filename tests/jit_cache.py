"""Chooses the compiled programs that a test may use: all of this process, or only its own.

`jax.clear_caches` would also take the programs of all later tests, which then compile once more.
"""

import itertools
from typing import Any

import jax

# Its public value is that of one thread.
_CONTEXT: Any = jax.make_user_context()._obj  # type: ignore[no-untyped-call]
_NUMBERS = itertools.count()
_shared = "collection"


def share(kind: str) -> None:
    """From here on tests share the programs of this kind."""
    global _shared
    _shared = kind
    _CONTEXT.set_global(kind)


def restore() -> None:
    """Ends `forget`."""
    _CONTEXT.set_global(_shared)


def forget() -> None:
    """Every call is traced again, to the end of the test."""
    _CONTEXT.set_global(next(_NUMBERS))
