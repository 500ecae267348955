"""Functions with bound arrays, as pytrees of these arrays."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

Function: TypeAlias = Callable[..., jax.Array]


def with_arrays(function: Function, *arrays: object) -> Function:
    """Binds `arrays` to the first arguments of `function`. The result is a pytree of `arrays`,
    which may be traced."""
    partial: Any = jax.tree_util.Partial
    bound: Function = partial(function, *arrays)
    return bound
