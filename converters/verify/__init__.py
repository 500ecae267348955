"""Compares two sources: weights bit by bit, and outputs against float64.

A source is a path, a flat dict of arrays, parameters, or a live layer or model.
"""

from jaxmha.converters.verify.comparison import (
    BlockReport,
    Report,
    assert_same,
    compare,
)
from jaxmha.converters.verify.weights import Difference

__all__ = ["BlockReport", "Difference", "Report", "assert_same", "compare"]
