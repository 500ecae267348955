"""Imports and exports haiku.MultiHeadAttention; keys are its module paths joined with `/`.

The layer is called as (query, key, value). True in its masks means attend.
"""

from jaxmha.converters.layout.api import make_api
from jaxmha.converters.layout.haiku import HAIKU, LAYOUTS

__all__ = [
    "HAIKU",
    "LAYOUTS",
    "export_params",
    "import_params",
]

import_params, export_params = make_api(LAYOUTS)
