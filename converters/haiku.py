"""haiku.MultiHeadAttention, in and out; keys are its module paths joined with `/`.

Called as (query, key, value). In its masks True means attend.
"""

from jaxmha.converters.layout.api import verbs
from jaxmha.converters.layout.haiku import HAIKU, LAYOUTS

__all__ = [
    "HAIKU",
    "LAYOUTS",
    "export_params",
    "import_params",
]

import_params, export_params = verbs(LAYOUTS)
