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
    """

    compile: Callable[[], None]
    run: Callable[..., None]
    outputs: Callable[[Array], tuple[NDArray[Any], list[NDArray[Any]] | None]]
    text: Callable[[], str] | None = None
