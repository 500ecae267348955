"""Functions with bound arrays, as pytrees of these arrays."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import jax

from jaxmha.implementations.mods import Limit

Function: TypeAlias = Callable[..., jax.Array]


def with_arrays(function: Function, *arrays: object) -> Function:
    """Binds `arrays` to the first arguments of `function`. The result is a pytree of `arrays`,
    which may be traced."""
    partial: Any = jax.tree_util.Partial
    bound: Function = partial(function, *arrays)
    return bound


def limited(limits: Callable[..., Iterable[Limit]]) -> Callable[[Function], Function]:
    """Attaches `limits` to a function: it takes the bound arrays, and returns the sizes that each
    axis of a call may have."""

    def decorate(function: Function) -> Function:
        function.limits = limits  # type: ignore[attr-defined]
        return function

    return decorate
