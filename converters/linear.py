"""Imports and exports attention of linear layers: torch Linear, Keras Dense, or matrices."""

from jaxmha.converters.layout.api import make_api
from jaxmha.converters.layout.linear import ANNOTATED, DENSE, LAYOUTS, LINEAR, LLAMA, MATRICES

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

import_params, export_params = make_api(LAYOUTS)
