"""Array types of the public signatures."""

from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import DTypeLike

# Not NDArray: from NumPy 2.5 on that is an alias that jaxtyping cannot look into.
Array: TypeAlias = jax.Array | np.ndarray[tuple[Any, ...], np.dtype[Any]]

__all__ = ["Array", "DTypeLike"]
