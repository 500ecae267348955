"""Imports and exports equinox.nn.MultiheadAttention; keys are its attribute paths.

The layer is called as (query, key, value) without a batch axis. True in its masks means attend.
"""

from jaxmha.converters.layout.api import make_api
from jaxmha.converters.layout.equinox import EQUINOX, LAYOUTS
from jaxmha.converters.matching.load_into import make_load_into

__all__ = [
    "EQUINOX",
    "LAYOUTS",
    "export_params",
    "import_params",
    "load_into",
]

import_params, export_params = make_api(LAYOUTS)
load_into = make_load_into(
    "into_tree",
    "an equinox module, or any tree of arrays or `jax.ShapeDtypeStruct`",
    "Returns a module of the same structure, with the arrays of the source.",
)
