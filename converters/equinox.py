"""Imports and exports equinox.nn.MultiheadAttention; keys are its attribute paths.

The layer is called as (query, key, value) without a batch axis. True in its masks means attend.
"""

from typing import Any, Literal

from jaxmha.converters.layout.api import make_api
from jaxmha.converters.layout.equinox import EQUINOX, LAYOUTS
from jaxmha.converters.matching import Plan

__all__ = [
    "EQUINOX",
    "LAYOUTS",
    "export_params",
    "import_params",
    "load_into",
]

import_params, export_params = make_api(LAYOUTS)


def load_into(
    model: Any,
    source: Any,
    plan: Plan | None = None,
    *,
    dtype: str | None = None,
    unused: Literal["refuse", "keep"] = "refuse",
    missing: Literal["refuse", "keep"] = "refuse",
) -> Any:
    """Returns a module of the same structure, with the arrays of the source.

    Args:
      model: an equinox module, or any tree of arrays or `jax.ShapeDtypeStruct`.
      source: a file, a folder of `save_pretrained`, a dict of arrays, or a model.
      plan: the plan from `jaxmha.converters.matching.match`; None creates it.
      dtype: the dtype of every floating array; None keeps the model's, which must hold all values.
      unused: "keep" leaves out source arrays that the plan does not use.
      missing: "keep" leaves arrays of the model as they are if the plan has nothing for them.

    Raises:
      ValueError: the plan has an open question, arrays are unused or missing, or a shape or dtype
        does not fit.
    """
    from jaxmha.converters.matching import loading

    values = loading.filled(model, source, plan, dtype=dtype, unused=unused, missing=missing)
    return loading.into_tree(model, values)
