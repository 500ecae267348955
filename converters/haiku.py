"""Imports and exports haiku.MultiHeadAttention; keys are its module paths joined with `/`.

The layer is called as (query, key, value). True in its masks means attend.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxmha import MHAParams, Semantics
from jaxmha.converters.layout.api import make_api
from jaxmha.converters.layout.arrays import AnyArray, NDArray
from jaxmha.converters.layout.haiku import HAIKU, LAYOUTS
from jaxmha.extras import needed
from jaxmha.params import check

__all__ = [
    "HAIKU",
    "LAYOUTS",
    "Module",
    "export_params",
    "from_module",
    "import_params",
    "to_module",
]

import_params, export_params = make_api(LAYOUTS, traced=True)


Variables = Mapping[str, Mapping[str, AnyArray]]


class Module(NamedTuple):
    """The arguments of `haiku.MultiHeadAttention`, and its parameters as haiku nests them."""

    settings: dict[str, Any]
    variables: dict[str, dict[str, NDArray]]


def from_module(
    variables: Variables, *, num_heads: int, path: str | None = None
) -> tuple[MHAParams, Semantics]:
    """Parameters and semantics of a `haiku.MultiHeadAttention`.

    A module of haiku exists only while its function is transformed, so this takes the parameters.

    Args:
      variables: parameters, as `init` of a transformed function returns them: module -> name ->
        array. Traced arrays stay traced.
      num_heads: of the module; shapes do not determine it.
      path: of the module, such as `"encoder/~/multi_head_attention"`; None: the only one.

    Raises:
      ValueError: no `path`, and `variables` has no module or several; an array is missing or
        does not fit.

    >>> import numpy as np
    >>> arrays = {f"attn/{n}": {"w": np.zeros((6, 6))} for n in ("query", "key", "value", "linear")}
    >>> from_module(arrays, num_heads=2)[0].out.kernel.shape
    (2, 3, 6)
    """
    if path is None:
        found = [name.removesuffix("query").rstrip("/") for name in variables if _is_query(name)]
        if len(found) != 1:
            shown = ", ".join(found) or "none"
            raise ValueError(f"path: expected one module with a query, got {shown}: name one")
        (path,) = found
    start = f"{path}/" if path else ""
    flat = {
        f"{name.removeprefix(start)}/{key}": array
        for name, arrays in variables.items()
        if name.startswith(start)
        for key, array in arrays.items()
    }
    return import_params(flat, num_heads=num_heads)


def _is_query(name: str) -> bool:
    return name.rpartition("/")[2] == "query"


def to_module(
    params: MHAParams,
    semantics: Semantics = Semantics(),
    *,
    path: str = "multi_head_attention",
) -> Module:
    """The arguments of a `haiku.MultiHeadAttention` and its parameters, under this path.

    Build the layer from the arguments in a transformed function, and pass the parameters to `apply`.

    Raises:
      ValueError: the layer cannot hold the parameters or the behaviour; the message says why.
    """
    with needed("haiku"):
        import haiku
    sizes = check(params)
    nested: dict[str, dict[str, NDArray]] = {}
    for key, array in export_params(params, semantics).items():
        layer, _, name = key.rpartition("/")
        nested.setdefault(f"{path}/{layer}" if path else layer, {})[name] = array
    settings = {
        "num_heads": sizes["N"],
        "key_size": sizes["H"],
        "value_size": sizes["h"],
        "model_size": sizes["Do"],
        "with_bias": params.query.bias is not None,
        "w_init": haiku.initializers.VarianceScaling(),
    }
    return Module(settings, nested)
