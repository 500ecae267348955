"""Alias of `jaxmha.checkpoint`, kept for existing imports."""

from jaxmha.checkpoint import *
from jaxmha.checkpoint import __all__ as __all__
