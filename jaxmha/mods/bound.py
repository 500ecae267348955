"""Functions with their arrays as one pytree."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

Function: TypeAlias = Callable[..., jax.Array]


def with_arrays(function: Function, *arrays: object) -> Function:
    """`function` with its first arguments bound: a pytree of these, which may be traced."""
    partial: Any = jax.tree_util.Partial
    bound: Function = partial(function, *arrays)
    return bound
