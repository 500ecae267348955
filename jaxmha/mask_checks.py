"""Checks of the arguments of `Mask`."""

from operator import index

import jax
import numpy as np

from jaxmha.arrays import require_arrays
from jaxmha.integers import require_integers


def require_lengths(**arguments: object) -> None:
    """Raises TypeError for an argument that is neither None nor an array of integers."""
    for name, lengths in arguments.items():
        if getattr(lengths, "dtype", None) == np.bool_:
            role = "query" if name.startswith("query") else "key_value"
            raise TypeError(
                f"{name} must be an integer array of lengths, got bool: give valid positions (True) "
                f"by Mask.padding({role}=...)"
            )
    require_integers("an integer array", optional=True, **arguments)


def require_booleans(**arguments: object) -> None:
    """Raises TypeError for an argument that is neither None nor a Boolean array."""
    require_arrays(optional=True, **arguments)
    for name, value in arguments.items():
        dtype = getattr(value, "dtype", np.bool_)
        if dtype != np.bool_:
            raise TypeError(
                f"{name} must be a Boolean array (True = valid), got {dtype}: pass x != 0"
            )


def require_axes(expected: str, **arguments: object) -> None:
    """Raises ValueError for an array without axes; None passes."""
    for name, value in arguments.items():
        if getattr(value, "ndim", 1) == 0:
            raise ValueError(f"{name} must have axes {expected}, got one number")


def side(side: int | None, window: tuple[object, object], name: str = "window sides") -> int | None:
    """Returns one side of a window as an integer of at least 0, or None: no bound.

    Raises TypeError for other types and ValueError below 0. `name`: the argument, for messages.
    """
    if side is None:
        return None
    shown = f"({window[0]}, {window[1]})"
    if isinstance(side, jax.core.Tracer):
        raise TypeError(
            f"{name} shape the program and cannot be traced, got {shown}: make them static "
            "(static_argnames of jax.jit); a traced right side alone is Mask.causal(offset)"
        )
    try:
        if isinstance(side, bool | np.bool_):
            raise TypeError
        found = index(side)
    except TypeError:  # raised also for an array that is not a single integer
        raise TypeError(f"{name} must be integers or None, got {shown}") from None
    if found < 0:
        raise ValueError(f"{name} must be >= 0 or None, got {shown}")
    return found
