"""Imports and exports attention of linear layers: torch Linear, Keras Dense, or matrices."""

from jaxmha.converters.discovery import places
from jaxmha.converters.layout.api import make_api
from jaxmha.converters.layout.linear import (
    ANNOTATED,
    DENSE,
    LAYOUTS,
    LINEAR,
    LLAMA,
    MATRICES,
    STARCODER_HEADS,
)

__all__ = [
    "ANNOTATED",
    "DENSE",
    "LAYOUTS",
    "LINEAR",
    "LLAMA",
    "MATRICES",
    "export_params",
    "import_params",
]

# Other packings have the same keys, and only a prefix, which may be absent, tells them apart: these
# layouts are used only if the caller names them.
_NAMED = [layout for layout in LAYOUTS if layout.name in places.NAMED]
_BY_KEYS = [layout for layout in LAYOUTS if layout not in _NAMED]
import_params, export_params = make_api(_BY_KEYS, [*_NAMED, STARCODER_HEADS])
