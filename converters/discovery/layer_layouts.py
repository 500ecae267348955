"""Layouts of the layers other than attention: linear, norm, embedding, patch convolution.

They are tables as in `layout`: each array has a key, axes, and one leaf. Di, Do: input and output
features; D: features of a norm; V: rows of an embedding; y, x: the window of a convolution.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from einops import rearrange

from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.layout.base import Entry
from jaxmha.converters.layout.by_hand import of_names
from jaxmha.converters.layout.registry import LAYOUTS
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
      name: the value of `Layout.convention` for attention layouts in the same files.
      kinds: kind -> arrays; `INSTEAD` gives the replacement for a missing kind.
      epsilon: value that the framework's own norms add to the variance by default.
      group: only for .weights.h5 files: kind -> the name that Keras gives the layer's group.
    """

    name: str
    kinds: Mapping[str, tuple[Entry, ...]]
    separator: str = "."
    epsilon: Mapping[str, float] = field(default_factory=dict)
    group: Mapping[str, str] = field(default_factory=dict)


# Kind -> its replacement in a convention that lacks it. GPT-2's Conv1D is a linear layer with a
# kernel of axes `Di Do`.
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
_OF_LAYOUTS = {one.name: one.convention for one in LAYOUTS}


def convention_of(layout: str) -> Convention | None:
    """The convention in whose files an attention layout occurs; None if it has none.

    >>> [c and c.name for c in map(convention_of, ("bert", "flax", "matrices"))]
    ['torch', 'flax', None]
    """
    made = of_names(layout)
    name = _OF_LAYOUTS.get(layout) if made is None else made.convention
    return next((c for c in CONVENTIONS if c.name == name), None)


def tells_norms(convention: Convention) -> bool:
    """True if files of the convention distinguish an RMSNorm from a LayerNorm without a bias.

    >>> tells_norms(KERAS), tells_norms(FLAX)
    (True, False)
    """
    keys = {convention.kinds[kind][0].key for kind in ("norm", "rmsnorm")}
    return len(keys) > 1 or bool(convention.group)


def named(name: str) -> Convention:
    """The convention of this name; an unknown name raises a ValueError that lists the known ones."""
    for convention in CONVENTIONS:
        if convention.name == name:
            return convention
    known = ", ".join(convention.name for convention in CONVENTIONS)
    raise ValueError(f"unknown convention {name!r} of other layers: known are {known}")


def unpack(entry: Entry, array: NDArray) -> NDArray:
    """The canonical leaf that an array holds, as a view.

    >>> import numpy as np
    >>> unpack(TORCH.kinds["linear"][0], np.zeros((3, 5))).shape
    (5, 3)
    """
    leaf: NDArray = rearrange(array, f"{entry.axes} -> {CANONICAL[entry.leaves[0]]}")
    return leaf


def pack(entry: Entry, leaf: NDArray) -> NDArray:
    """The array of an entry, from its canonical leaf, as a view."""
    array: NDArray = rearrange(leaf, f"{CANONICAL[entry.leaves[0]]} -> {entry.axes}")
    return array


def shape(entry: Entry, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of the array of an entry, from the size of every axis letter."""
    return tuple(sizes[group[0]] for group in parse(entry.axes))
