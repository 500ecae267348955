"""One case, built as a program of one peer."""

from collections.abc import Callable
from typing import Any, NamedTuple

from numpy.typing import NDArray

from jaxmha.bench.data import Array


class UnsupportedError(Exception):
    """The peer has nothing that computes the case; the message says why."""


class Program(NamedTuple):
    """One case in one peer, with its weights and inputs in the peer's own memory.

    Attributes:
      compile: traces and compiles, where the peer does; to be called once, before the others.
      run: computes everything, as often as its argument says (once), and waits for it.
      outputs: from a cotangent to the output, in the shape of `Data.cotangent`, and the gradients
        of `Data.distinct` (None where the case is forward only).
      text: the compiled program, where there is one.
      nbytes: of its temporaries and results, where that is known.
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
