"""Array types of the public signatures."""

from typing import Any, TypeAlias

import jax
from numpy.typing import DTypeLike, NDArray

Array: TypeAlias = jax.Array | NDArray[Any]

__all__ = ["Array", "DTypeLike"]
