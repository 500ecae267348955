"""Imports and exports equinox.nn.MultiheadAttention; keys are its attribute paths.

The layer is called as (query, key, value) without a batch axis. True in its masks means attend.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmha import MHAParams, Semantics
from jaxmha.converters.discovery.live_model import equinox as tensors_of
from jaxmha.converters.discovery.own_forward import refuse_own_forward
from jaxmha.converters.layout.api import make_api
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.layout.equinox import EQUINOX, LAYOUTS
from jaxmha.converters.layout.validation import one_dtype
from jaxmha.converters.masks.equinox import export_masks, import_masks
from jaxmha.converters.matching.load_into import make_load_into
from jaxmha.extras import needed
from jaxmha.params import check

if TYPE_CHECKING:
    import equinox

__all__ = [
    "EQUINOX",
    "LAYOUTS",
    "attention_layers",
    "export_masks",
    "export_params",
    "from_module",
    "import_masks",
    "import_params",
    "load_into",
    "tensors_of",
    "to_module",
]

import_params, export_params = make_api(LAYOUTS, traced=True)
load_into = make_load_into(
    "into_tree",
    "an equinox module, or any tree of arrays or `jax.ShapeDtypeStruct`",
    "Returns a module of the same structure, with the arrays of the source.",
)


_PROJECTIONS = ("query", "key", "value", "output")
_INSTEAD = "import_params of a dict of its arrays, with num_heads"


def from_module(
    module: "equinox.nn.MultiheadAttention", variables: None = None
) -> tuple[MHAParams, Semantics]:
    """Parameters and semantics of a `MultiheadAttention` of `equinox.nn` or `jaxmha.equinox`.

    Under jit, grad or vmap the parameters are traced; otherwise they are copies.

    Raises:
      TypeError: the module is of another class.
      ValueError: its class overrides `__call__` or `_project`, or a sublayer is not equinox's own.

    >>> import equinox, jax
    >>> module = equinox.nn.MultiheadAttention(2, 6, dropout_p=0.1, key=jax.random.key(0))
    >>> params, semantics = from_module(module)
    >>> params.out.kernel.shape, semantics.dropout_rate
    ((2, 3, 6), 0.1)
    """
    with needed("equinox"):
        import equinox
    if not isinstance(module, equinox.nn.MultiheadAttention):
        raise TypeError(
            f"expected an equinox.nn.MultiheadAttention, got {type(module).__name__}: for a dict of "
            "arrays call import_params"
        )
    from jaxmha.equinox import MultiheadAttention

    kinds = (MultiheadAttention, equinox.nn.MultiheadAttention)
    refuse_own_forward(module, kinds, ("__call__", "_project"), _INSTEAD)
    for name in _PROJECTIONS:
        path = f"{name}_proj"
        linear = (equinox.nn.Linear,)
        refuse_own_forward(getattr(module, path), linear, ("__call__",), _INSTEAD, path)
    refuse_own_forward(module.dropout, (equinox.nn.Dropout,), ("__call__",), _INSTEAD, "dropout")
    return weights_of(module)


def weights_of(module: "equinox.nn.MultiheadAttention") -> tuple[MHAParams, Semantics]:
    """Parameters and semantics of a layer, even if it overrides `__call__`.

    Raises:
      ValueError: a projection is not an `equinox.nn.Linear`.
    """
    with needed("equinox"):
        import equinox
    from jaxmha import equinox as ours

    state = {}
    for name in _PROJECTIONS:
        path = f"{name}_proj"
        layer = getattr(module, path)
        refuse_own_forward(layer, (equinox.nn.Linear,), (), _INSTEAD, path)
        state[f"{path}.weight"] = layer.weight
        if layer.bias is not None:
            state[f"{path}.bias"] = layer.bias
    if isinstance(module, ours.MultiheadAttention):
        return ours.weights_of(module)
    params, semantics = import_params(state, num_heads=module.num_heads)
    return params, replace(semantics, dropout_rate=float(module.dropout.p))


def to_module(
    params: MHAParams,
    semantics: Semantics = Semantics(),
    *,
    kind: None = None,
    like: "equinox.nn.MultiheadAttention | None" = None,
) -> "equinox.nn.MultiheadAttention":
    """An `equinox.nn.MultiheadAttention` with these weights.

    `like`: a layer of this class whose dropout mode is copied; without it, dropout is off.

    Raises:
      ValueError: the layer cannot hold the parameters or the behaviour; the message says why.
    """
    with needed("equinox"):
        import equinox
    import jax

    from jaxmha.equinox import with_arrays

    sizes = check(params)
    one_dtype(params)
    state = export_params(params, semantics)

    def build() -> Any:
        return equinox.nn.MultiheadAttention(
            sizes["N"],
            sizes["Dq"],
            sizes["Dk"],
            sizes["Dv"],
            sizes["Do"],
            sizes["H"],
            sizes["h"],
            **{f"use_{name}_bias": f"{name}_proj.bias" in state for name in _PROJECTIONS},
            dropout_p=semantics.dropout_rate,
            inference=like is None or like.dropout.inference,
            key=jax.random.key(0),
        )

    module: equinox.nn.MultiheadAttention = equinox.filter_eval_shape(build)
    return with_arrays(module, state)


def attention_layers(
    model: "equinox.Module",
) -> "Iterator[tuple[str, equinox.nn.MultiheadAttention]]":
    """Path and layer of every `MultiheadAttention` in a model, of equinox or jaxmha."""
    with needed("equinox"):
        import equinox

    for path, layer in tensors_of(model).layers.items():
        if isinstance(layer, equinox.nn.MultiheadAttention):
            yield path, layer


def forward(
    module: "equinox.nn.MultiheadAttention",
    query: NDArray,
    key: NDArray,
    value: NDArray,
    mask: NDArray | None = None,
) -> NDArray:
    """Runs the layer on `(B, T, Dq)`, `(B, S, Dk)`, `(B, S, Dv)`, without dropout.

    `mask` is canonical: Boolean `(B, N or 1, T or 1, S)`, True = attend.
    """
    import jax

    def of_row(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return module(query, key, value, mask=mask, inference=True)

    if mask is not None:  # equinox broadcasts no axis
        (B, T), S = query.shape[:2], key.shape[1]
        mask = np.broadcast_to(mask, (B, module.num_heads, T, S))
    return to_numpy(jax.vmap(of_row)(query, key, value, mask))
