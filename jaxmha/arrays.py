"""Array types of the public signatures."""

from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import DTypeLike

# NDArray is no class in NumPy 2.5, and jaxtyping asks for one.
Array: TypeAlias = jax.Array | np.ndarray[Any, np.dtype[Any]]

__all__ = ["Array", "DTypeLike"]
