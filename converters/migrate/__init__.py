"""Converts checkpoint files from one layout to another: inspect, plan, convert, write."""

from jaxmha.converters.migrate.conversion import Conversion
from jaxmha.converters.migrate.inspection import FileInfo, inspect
from jaxmha.converters.migrate.pipeline import convert, convert_state, plan
from jaxmha.converters.migrate.plans import DTYPES, Plan, Step

Move = Step  # former name of `Step`, for existing imports

__all__ = [
    "DTYPES",
    "Conversion",
    "FileInfo",
    "Move",
    "Plan",
    "Step",
    "convert",
    "convert_state",
    "inspect",
    "plan",
]
