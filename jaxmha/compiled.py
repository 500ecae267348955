"""Compiles functions of known arrays, so that their constants are no transfers to the device."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(*static: int) -> Callable[[Function], Function]:
    """Decorator: `jax.jit` where arrays are known; traced arrays call the function itself.

    Every Python number in an eager operation is a transfer, which `jax.transfer_guard` refuses.
    Arguments are by position, those numbered `static` are static.
    """

    def decorate(function: Function) -> Function:
        jitted: Any = jax.jit(function, static_argnums=static)

        @wraps(function)
        def call(*arguments: Any) -> Any:
            traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments))
            return (function if traced else jitted)(*arguments)

        return call  # type: ignore[return-value]

    return decorate
