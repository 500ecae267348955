"""Reads what the class of a live layer shows of its arrays: their axes, and the order of packed parts."""

from collections.abc import Mapping
from typing import Any

from jaxmha.converters.layout.arrays import packages_of

# Class of a layer -> axes of its main array: o output, i input (convolutions also have window
# axes), v rows and d features of a table. "no" marks a layer that other frameworks store otherwise
# and that is never matched.
_FORMS = {
    "torch": {
        "Linear": "oi", "NonDynamicallyQuantizableLinear": "oi", "MultiheadAttention": "oi",
        "Embedding": "vd", "EmbeddingBag": "vd",
        "Conv1d": "oi", "Conv2d": "oi", "Conv3d": "oi",
        "ConvTranspose1d": "no", "ConvTranspose2d": "no", "ConvTranspose3d": "no", "Bilinear": "no",
    },
    "flax": {
        "Linear": "io", "LinearGeneral": "io", "Embed": "vd", "Conv": "io", "ConvTranspose": "no",
    },
    "equinox": {
        "Linear": "oi", "Embedding": "vd", "Conv": "oi", "Conv1d": "oi", "Conv2d": "oi",
        "Conv3d": "oi", "ConvTranspose": "no", "ConvTranspose1d": "no", "ConvTranspose2d": "no",
    },
}  # fmt: skip


def form_of(layer: Any, package: str) -> str:
    """Returns the axis order for the class of a layer or its first known base class, or ""."""
    for base in type(layer).__mro__:
        if base.__module__.split(".")[0] == package and base.__name__ in _FORMS[package]:
            return _FORMS[package][base.__name__]
    of_gpt2 = "transformers" in packages_of(layer) and type(layer).__name__ == "Conv1D"
    return "io" if of_gpt2 else ""  # GPT-2's layer has its weight as (in, out)


def name_of(layer: object) -> str:
    """Returns the class of a layer; "" for None and for a container of arrays, which has no axes.

    A transposed convolution of Flax also shows here if it exchanges the last axes of its kernel.
    """
    known = layer is not None and not isinstance(layer, Mapping | list | tuple)
    turned = " transpose_kernel" * bool(getattr(layer, "transpose_kernel", False))
    return f"{type(layer).__module__}.{type(layer).__qualname__}{turned}" if known else ""


def alternates(layer: Any) -> bool | None:
    """True or False where experts of transformers state how gate and up are packed, else None."""
    stated = getattr(layer, "is_concatenated", None) if hasattr(layer, "has_gate") else None
    return not stated if isinstance(stated, bool) else None
