"""Layouts of the layers other than attention: linear, norm, embedding, patch convolution.

They are tables as in `layout`: each array has a key, axes, and one leaf. Di, Do: input and output
features; D: features of a norm; V: rows of an embedding; y, x: the window of a convolution.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from einops import rearrange

from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.layout.base import Entry
from jaxmha.dims import parse

# Every leaf of these layers and its axes.
CANONICAL = {
    "linear.kernel": "Di Do",
    "linear.bias": "Do",
    "norm.scale": "D",
    "norm.bias": "D",
    "embedding.table": "V D",
    "convolution.kernel": "y x Di Do",
    "convolution.bias": "Do",
}
_BIAS = "bias"  # group of entries that may be absent


@dataclass(frozen=True, eq=False)
class Convention:
    """The layouts of other layers in one framework.

    Attributes:
      name: of the convention; `layouts` are the attention layouts found in the same files.
      kinds: kind -> arrays; `INSTEAD` gives the replacement for a missing kind.
      epsilon: value that the framework's own norms add to the variance by default.
      group: only for .weights.h5 files: kind -> the name that Keras gives the layer's group.
    """

    name: str
    layouts: str
    kinds: Mapping[str, tuple[Entry, ...]]
    separator: str = "."
    epsilon: Mapping[str, float] = field(default_factory=dict)
    group: Mapping[str, str] = field(default_factory=dict)


# GPT-2's Conv1D is a linear layer with a kernel of axes `Di Do`.
INSTEAD = {"conv1d": "linear", "rmsnorm": "norm"}


def _linear(kernel: str, axes: str, bias: str) -> tuple[Entry, ...]:
    return (
        Entry(kernel, axes, ("linear.kernel",)),
        Entry(bias, "Do", ("linear.bias",), _BIAS),
    )


def _norm(scale: str, bias: str) -> tuple[Entry, ...]:
    return Entry(scale, "D", ("norm.scale",)), Entry(bias, "D", ("norm.bias",), _BIAS)


def _rmsnorm(scale: str) -> tuple[Entry, ...]:
    return (Entry(scale, "D", ("norm.scale",)),)


def _embedding(table: str) -> tuple[Entry, ...]:
    return (Entry(table, "V D", ("embedding.table",)),)


def _convolution(kernel: str, axes: str, bias: str) -> tuple[Entry, ...]:
    return (
        Entry(kernel, axes, ("convolution.kernel",)),
        Entry(bias, "Do", ("convolution.bias",), _BIAS),
    )


TORCH = Convention(
    "torch",
    "torch torch-separate bert vit timm gpt2 gpt-neox t5 whisper linear llama annotated equinox "
    "linear-wo linear-tutorial linear-query linear-combine linear-to linear-upper linear-qkv-out "
    "linear-qkv-projection",
    {
        "linear": _linear("weight", "Do Di", "bias"),
        "conv1d": _linear("weight", "Di Do", "bias"),
        "norm": _norm("weight", "bias"),
        "rmsnorm": _rmsnorm("weight"),
        "embedding": _embedding("weight"),
        "convolution": _convolution("weight", "Do Di y x", "bias"),
    },
    epsilon={"norm": 1e-5, "rmsnorm": 2.0**-23},
)
FLAX = Convention(
    "flax",
    "flax dense dense-wo dense-tutorial dense-query dense-combine dense-to dense-upper dense-qkv "
    "dense-qkv-out dense-qkv-projection",
    {
        "linear": _linear("kernel", "Di Do", "bias"),
        "norm": _norm("scale", "bias"),
        "rmsnorm": _rmsnorm("scale"),
        "embedding": _embedding("embedding"),
        "convolution": _convolution("kernel", "y x Di Do", "bias"),
    },
    "/",
    {"norm": 1e-6, "rmsnorm": 1e-6},
)
KERAS = Convention(
    "keras",
    "keras keras-gqa",
    {
        "linear": _linear("kernel", "Di Do", "bias"),
        "norm": _norm("gamma", "beta"),
        "rmsnorm": _rmsnorm("scale"),
        "embedding": _embedding("embeddings"),
        "convolution": _convolution("kernel", "y x Di Do", "bias"),
    },
    "/",
    {"norm": 1e-3, "rmsnorm": 1e-6},
)
_FIRST, _SECOND = "vars/0", "vars/1"
KERAS_FILE = Convention(
    "keras-file",
    "keras-file keras-gqa-file dense-file dense-wo-file dense-tutorial-file dense-query-file "
    "dense-combine-file dense-to-file dense-upper-file dense-qkv-file dense-qkv-out-file "
    "dense-qkv-projection-file",
    {
        "linear": _linear(_FIRST, "Di Do", _SECOND),
        "norm": _norm(_FIRST, _SECOND),
        "rmsnorm": _rmsnorm(_FIRST),
        "embedding": _embedding(_FIRST),
        "convolution": _convolution(_FIRST, "y x Di Do", _SECOND),
    },
    "/",
    KERAS.epsilon,
    {
        "linear": "dense",
        "norm": "layer_normalization",
        "rmsnorm": "rms_normalization",
        "embedding": "embedding",
        "convolution": "conv2d",
    },
)
HAIKU = Convention(
    "haiku",
    "haiku",
    {
        "linear": _linear("w", "Di Do", "b"),
        "norm": _norm("scale", "offset"),
        "rmsnorm": _rmsnorm("scale"),
        "embedding": _embedding("embeddings"),
        "convolution": _convolution("w", "y x Di Do", "b"),
    },
    "/",
    {"norm": 1e-5, "rmsnorm": 1e-5},
)
CONVENTIONS = (TORCH, FLAX, KERAS, KERAS_FILE, HAIKU)


def beside(layout: str) -> Convention | None:
    """The convention in whose files an attention layout occurs; None if it has no framework.

    >>> beside("bert").name, beside("flax").name, beside("matrices")
    ('torch', 'flax', None)
    """
    return next((c for c in CONVENTIONS if layout in c.layouts.split()), None)


def tells_norms(convention: Convention) -> bool:
    """True if files of the convention distinguish an RMSNorm from a LayerNorm without a bias.

    >>> tells_norms(KERAS), tells_norms(FLAX)
    (True, False)
    """
    keys = {convention.kinds[kind][0].key for kind in ("norm", "rmsnorm")}
    return len(keys) > 1 or bool(convention.group)


def named(name: str) -> Convention:
    """The convention of this name. Raises ValueError that lists the known names."""
    for convention in CONVENTIONS:
        if convention.name == name:
            return convention
    known = ", ".join(convention.name for convention in CONVENTIONS)
    raise ValueError(f"unknown convention {name!r} of neighbours: known are {known}")


def unpack(entry: Entry, array: NDArray) -> NDArray:
    """The leaf in an array, as a view.

    >>> import numpy as np
    >>> unpack(TORCH.kinds["linear"][0], np.zeros((3, 5))).shape
    (5, 3)
    """
    leaf: NDArray = rearrange(array, f"{entry.axes} -> {CANONICAL[entry.leaves[0]]}")
    return leaf


def pack(entry: Entry, leaf: NDArray) -> NDArray:
    """The inverse of `unpack`."""
    array: NDArray = rearrange(leaf, f"{CANONICAL[entry.leaves[0]]} -> {entry.axes}")
    return array


def shape(entry: Entry, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an array, from the size of every letter."""
    return tuple(sizes[group[0]] for group in parse(entry.axes))
