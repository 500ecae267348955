"""Reads what a live attention layer computes from its settings; its arrays may be abstract."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxmha import Semantics
from jaxmha.converters.discovery import flax_layers, torch_hooks
from jaxmha.converters.discovery.keras_layers import attention_classes
from jaxmha.converters.discovery.own_forward import refuse_own_forward, refuse_settings
from jaxmha.converters.layout.arrays import framework_of
from jaxmha.semantics import NORM_FIELDS, logit_scale

if TYPE_CHECKING:
    from jaxmha.converters.discovery.attended import Attended

COMPARED = (
    "scale",
    "logits_soft_cap",
    "add_zero_attn",
    "clip_qkv",
    "local_window_size",
    *NORM_FIELDS,
)
IN_CALL = "given in the call"  # `Behaviour.rotate` if the call of a layer may rotate the heads
# The methods by which a Keras class computes its output.
OF_KERAS = (
    "call",
    "_compute_attention",
    "_masked_softmax",
    "_compute_attention_mask",
    "_compute_causal_mask",
    "_compute_sliding_window_mask",
)


class Behaviour(NamedTuple):
    """The function of a layer apart from its weights.

    `head_dim` is the number of features of a head, which gives the default scale and the features
    that are rotated; None: unknown. `rotate` is the rotation of queries and keys inside the layer,
    None if it has none, or `IN_CALL`. `mask`: for a block in a file, the mask that its configuration
    gives, to which calls may add others; None for a live layer.
    """

    semantics: Semantics
    head_dim: int | None = None
    rotate: Any = None
    mask: "Attended | None" = None


def differing(a: Semantics, b: Semantics, scales: tuple[float, float]) -> Iterator[str]:
    """Yields the fields of `Semantics` by which two layers compute different functions.

    Dropout, roundings and the output of fully masked rows do not count. `scales`: the factor by
    which each layer multiplies its logits.
    """
    both = a.qk_norm is not None and b.qk_norm is not None
    for name in COMPARED:
        if name in NORM_FIELDS and name != "qk_norm" and not both:
            continue
        pair = scales if name == "scale" else (getattr(a, name), getattr(b, name))
        if not same_number(*pair):
            yield name


def same_number(a: object, b: object) -> bool:
    """True for equal settings, and for numbers that differ by roundings of float32."""
    both = isinstance(a, float) and isinstance(b, float)
    return a == b or (both and math.isclose(a, b, rel_tol=1e-6))  # type: ignore[arg-type]


def of(layer: object) -> Behaviour | None:
    """The behaviour of an attention layer of torch, Keras, flax, equinox or jaxmha.

    None for any other object, and for a layer that computes by code of the user's own.

    >>> import torch
    >>> of(torch.nn.MultiheadAttention(6, 2, add_zero_attn=True)).semantics.add_zero_attn
    True
    """
    try:
        return _READERS[framework_of(layer)](layer)
    except (AttributeError, KeyError, ValueError):  # another class, or code of the user's own
        return None


def _of_torch(layer: Any) -> Behaviour:
    import torch

    names = ("merge_masks", *torch_hooks.COMPUTING)
    refuse_own_forward(layer, (torch.nn.MultiheadAttention,), names, "")
    return Behaviour(torch_semantics(layer), layer.head_dim)


def torch_semantics(layer: Any, given: Semantics = Semantics()) -> Semantics:
    """Adds the settings of a `torch.nn.MultiheadAttention` to the semantics `given`."""
    added = bool(layer.add_zero_attn)
    return replace(given, dropout_rate=float(layer.dropout), add_zero_attn=added)


def _of_keras(layer: Any) -> Behaviour:
    refuse_own_forward(layer, attention_classes(), OF_KERAS, "")
    semantics = keras_semantics(layer)
    if semantics.attention_axes is not None:  # compared by distance from the last axis; None is -2
        rank = keras_rank(layer)
        axes = tuple(axis - rank if axis >= 0 else axis for axis in semantics.attention_axes)
        semantics = replace(semantics, attention_axes=None if axes == (-2,) else axes)
    return Behaviour(semantics, _keras_head_dim(layer))


def _keras_head_dim(layer: Any) -> int:
    return int(layer.head_dim if hasattr(layer, "num_key_value_heads") else layer.key_dim)


def keras_semantics(layer: Any, given: Semantics = Semantics()) -> Semantics:
    """Adds the settings of a built attention layer of Keras to the semantics `given`."""
    config, rank = layer.get_config(), keras_rank(layer)
    kind = "head" if "num_key_value_heads" in config else "key"
    factor, H = getattr(layer, f"_inverse_sqrt_{kind}_dim", None), _keras_head_dim(layer)
    window, axes = config.get("sliding_window"), getattr(layer, "attention_axes", None)
    return replace(
        given,
        scale=None if factor in (None, 1 / math.sqrt(H)) else float(factor),
        dropout_rate=float(config["dropout"]),
        local_window_size=None if window is None else (window - 1, window - 1),
        attention_axes=None if axes is None or rank == 3 else tuple(axes),
    )


def keras_rank(layer: Any) -> int:
    """The number of axes of the inputs for which an attention layer of Keras was built."""
    return len(layer._query_dense.equation.partition(",")[0])


def _of_flax(layer: Any) -> Behaviour:
    from flax import linen, nnx

    from jaxmha.flax import latent

    ours = flax_layers.jaxmha_classes()
    latents = (latent.nnx.LatentAttention, latent.linen.LatentAttention)
    own = (nnx.MultiHeadAttention, linen.MultiHeadDotProductAttention)
    refuse_own_forward(layer, (*ours, *latents, *own), ("__call__",), "")
    if isinstance(layer, latents):
        scale = logit_scale(layer.semantics, layer.head_dim + layer.rotary_dim)
        return Behaviour(replace(layer.semantics, scale=scale), layer.rotary_dim, layer.rotate)
    if isinstance(layer, ours):
        head_dim = layer.head_dim if isinstance(layer, nnx.Module) else None
        return Behaviour(flax_layers.jaxmha_semantics(layer), head_dim, layer.rotate)
    if flax_layers.semantics_of(layer.attention_fn) is None:
        functions = (nnx.dot_product_attention, linen.dot_product_attention)
        refuse_settings(layer, {"attention_fn": functions}, "", "")
    norm = Semantics(qk_norm="layer" if layer.normalize_qk else None)
    return Behaviour(flax_layers.flax_semantics(layer, norm), getattr(layer, "head_dim", None))


def _of_equinox(layer: Any) -> Behaviour:
    import equinox

    from jaxmha.equinox import MultiheadAttention

    kinds = (MultiheadAttention, equinox.nn.MultiheadAttention)
    refuse_own_forward(layer, kinds, ("__call__", "_project"), "")
    return Behaviour(getattr(layer, "semantics", Semantics()), layer.qk_size, IN_CALL)


_READERS: dict[str, Callable[[Any], Behaviour]] = {
    "torch": _of_torch,
    "keras": _of_keras,
    "flax": _of_flax,
    "equinox": _of_equinox,
}
