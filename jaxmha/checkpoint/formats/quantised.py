"""The description of a weight that is stored quantised, in several tensors."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxmha.checkpoint.tensor import TensorInfo

AGAIN = "download it again"
PIECE = 1 << 20  # most elements to dequantise at once


class Quantised(NamedTuple):
    """A quantised weight.

    Attributes:
        kind: name of the scheme, for the report.
        info: shape and dtype of the dequantised weight.
        parts: names of the tensors that the file stores for it.
        make: takes the arrays of `parts`, and returns the dequantised weight.
    """

    kind: str
    info: TensorInfo
    parts: tuple[str, ...]
    make: Callable[..., np.ndarray]
