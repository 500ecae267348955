"""Compares two attention sources: weights bit by bit, and outputs with a float64 reference.

A source is a checkpoint path, a flat dict of arrays, `MHAParams`, or a layer or model object.
"""

from jaxmha.converters.verify.comparison import assert_same, compare
from jaxmha.converters.verify.comparison_report import BlockReport, Report
from jaxmha.converters.verify.weights import Difference

__all__ = ["BlockReport", "Difference", "Report", "assert_same", "compare"]
