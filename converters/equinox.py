"""equinox.nn.MultiheadAttention, in and out; keys are its attribute paths.

Called as (query, key, value) without a batch axis. In its masks True means attend.
"""

from jaxmha.converters.layout.api import verbs
from jaxmha.converters.layout.equinox import EQUINOX, LAYOUTS

__all__ = [
    "EQUINOX",
    "LAYOUTS",
    "export_params",
    "import_params",
]

import_params, export_params = verbs(LAYOUTS)
