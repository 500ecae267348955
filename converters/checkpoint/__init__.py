"""`jaxmha.checkpoint`, under the name that converters had for it."""

from jaxmha.checkpoint import *
from jaxmha.checkpoint import __all__ as __all__
