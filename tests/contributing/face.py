"""Imports and exports the attention layer of a toy library."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from jaxmha import MHAParams, Semantics
from jaxmha.converters.discovery.live_model import LiveModel
from jaxmha.converters.layout.api import make_api
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.layout.toy import LAYOUTS
from jaxmha.converters.masks import toy as _masks
from jaxmha.extras import needed

if TYPE_CHECKING:
    import toy

import_params, export_params = make_api(LAYOUTS)
import_masks, export_masks = _masks.import_masks, _masks.export_masks


def from_module(module: "toy.Attention", variables: None = None) -> tuple[MHAParams, Semantics]:
    """Parameters and behaviour of a live layer."""
    return import_params(module.weights, num_heads=module.num_heads)


def to_module(params: MHAParams, semantics: Semantics = Semantics()) -> "toy.Attention":
    """A live layer with these weights."""
    with needed("toy"):
        import toy

    return toy.Attention(np.shape(params.query.kernel)[-2], export_params(params, semantics))


def attention_layers(model: "toy.Attention") -> Iterator[tuple[str, "toy.Attention"]]:
    """The layer itself: the library has no models."""
    yield "", model


def tensors_of(model: "toy.Attention") -> LiveModel:
    """The weights by the names by which the library saves them."""
    return LiveModel(model.weights, {"": model})


def forward(
    module: "toy.Attention",
    query: NDArray,
    key: NDArray,
    value: NDArray,
    mask: NDArray | None = None,
) -> NDArray:
    """Runs the live layer; `mask` is canonical: `(B, 1, T or 1, S)`, True = attend."""
    if mask is None or mask.shape[2] == 1:
        return module(query, key, value, None if mask is None else ~mask[:, 0, 0])
    rows = [
        module(query[:, [t]], key, value, ~np.broadcast_to(mask[:, 0, t], key.shape[:2]))
        for t in range(query.shape[1])
    ]
    return np.concatenate(rows, axis=1)
