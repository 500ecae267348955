"""One case, built as a program of one peer."""

from collections.abc import Callable
from typing import Any, NamedTuple

from numpy.typing import NDArray

from jaxmha.bench.data import Array


class UnsupportedError(Exception):
    """The peer cannot compute the case; the message says why."""


class Program(NamedTuple):
    """One case in one peer, with its weights and inputs in the peer's own memory.

    Attributes:
      compile: traces and compiles, where the peer does; to be called once, before the others.
      run: computes everything as many times as its argument says (default 1), and waits.
      outputs: maps a cotangent to the output, in the shape of `Data.cotangent`, and the gradients
        of `Data.distinct` (None if the case is forward only).
      text: returns the text of the compiled program; None: the peer compiles none.
      nbytes: returns the bytes of temporaries and results; None: unknown.
    """

    compile: Callable[[], None]
    run: Callable[..., None]
    outputs: Callable[[Array], tuple[NDArray[Any], list[NDArray[Any]] | None]]
    text: Callable[[], str] | None = None
    nbytes: Callable[[], int] | None = None


def repeat(call: Callable[[], Any], calls: int) -> None:
    """Calls and waits: on a CPU for each, since calls would overlap; elsewhere for the last."""
    import jax

    each = jax.default_backend() == "cpu"
    found = None
    for _ in range(calls):
        found = call()
        if each:
            jax.block_until_ready(found)  # type: ignore[no-untyped-call]
    jax.block_until_ready(found)  # type: ignore[no-untyped-call]
