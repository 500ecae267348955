"""What cannot be compiled runs operation by operation, and is noted."""

from collections.abc import Callable
from typing import Any

from experiments.numerics.inputs import UNCOMPILED


def compiled(
    name: str, dtype: str, jitted: Callable[..., Any], plain: Callable[..., Any], *given: Any
) -> Any:
    """Runs a jitted program of JAX, or where it is refused its plain form."""
    if dtype in UNCOMPILED.get(name, ()):
        return plain(*given)
    try:
        return jitted(*given)
    except ValueError as error:
        if "is not supported by dot_general" not in str(error):
            raise
        UNCOMPILED.setdefault(name, set()).add(dtype)
        return plain(*given)
