"""Biases of zeros, for layouts that require biases which a layer lacks.

Whisper's keys have no bias, and Qwen2's output has none; Flax has all four biases or none. A bias of
zeros changes nothing that the layer computes.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxmha import MHAParams
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.layout.base import Entry, Layout
from jaxmha.params import CANONICAL, field_of, from_leaves, leaves

ZEROS = "zeros"
FILLS = (ZEROS,)
REMEDY = "; a bias of zeros changes nothing: fill_bias='zeros' (--fill-bias zeros) fills it in"


def check(fill_bias: str | None) -> None:
    """Raises ValueError for a value of `fill_bias` that is neither None nor one of `FILLS`."""
    if fill_bias is not None and fill_bias not in FILLS:
        raise ValueError(f"fill_bias must be None or {' or '.join(FILLS)}, got {fill_bias!r}")


def missing(layout: Layout, present: Mapping[str, Any]) -> dict[str, NDArray]:
    """Zeros, as views of one number, for the biases that the layout requires and `present` lacks.

    `present`: leaf -> array or placeholder. A bias without its kernel is not filled, and neither is
    an extra position: its zeros would take part in the softmax.

    >>> from jaxmha.converters.layout.flax import LINEN
    >>> kernels = {f"{name}.kernel": np.ones((6, 2, 3)) for name in ("query", "key", "value")}
    >>> {name: x.shape for name, x in missing(LINEN, {**kernels, "key.bias": np.ones((2, 3))}).items()}
    {'query.bias': (2, 3), 'value.bias': (2, 3)}
    """
    found: dict[str, NDArray] = {}
    for group in dict.fromkeys(entry.group for entry in layout.entries):
        entries = [entry for entry in layout.entries if entry.group == group]
        if group and not any(leaf in present for entry in entries for leaf in entry.leaves):
            continue
        for entry in entries:
            absent = [leaf for leaf in entry.leaves if leaf not in present]
            found |= {x: _zeros(entry, x, present) for x in absent if _kernel_of(x, present)}
    return found


def filled(
    params: MHAParams, layout: Layout, fill_bias: str | None
) -> tuple[MHAParams, Mapping[str, NDArray]]:
    """Parameters with every bias that the layout requires, and the biases that were added.

    `fill_bias`: None adds nothing. Raises ValueError for a value other than None and `FILLS`.
    """
    check(fill_bias)
    present = leaves(params)
    added = missing(layout, present) if fill_bias else {}
    return (from_leaves({**present, **added}) if added else params), added


def unheld(layout: Layout, present: Mapping[str, Any]) -> list[str]:
    """Projection biases that the layout cannot hold; the caller may drop those that are all zero.

    >>> from jaxmha.converters.layout.huggingface import WHISPER
    >>> unheld(WHISPER, {"query.bias": 0, "key.bias": 0})
    ['key.bias']
    """
    held = {leaf for entry in layout.entries for leaf in entry.leaves}
    biases = ("query.bias", "key.bias", "value.bias", "out.bias")
    return [leaf for leaf in biases if leaf in present and leaf not in held]


def dropped_note(layout: Layout, dropped: Collection[str]) -> str:
    """A sentence that says which biases of zeros were dropped."""
    return (
        f"{', '.join(dropped)} dropped: every number is zero, which changes nothing, and layout "
        f"{layout.name} has no place for it"
    )


def note(layout: Layout, added: Mapping[str, Any]) -> str:
    """A sentence that says which biases were filled in; "" if none was."""
    return (
        f"{', '.join(added)} filled with zeros: layout {layout.name} requires what the source lacks, "
        "and zeros change nothing"
    ) * bool(added)


def _kernel_of(bias: str, present: Mapping[str, Any]) -> str:
    """The kernel of a bias; "" if it is absent. `gate_heads.bias` may belong to `gate.kernel`."""
    name = bias.replace(".bias", ".kernel")
    forms = (name, field_of(name)) if name != bias else ()
    return next((form for form in forms if form in present), "")


def _zeros(entry: Entry, bias: str, present: Mapping[str, Any]) -> NDArray:
    """Zeros of the shape of a bias, in the dtype of the arrays that are packed with it."""
    kernel = _kernel_of(bias, present)
    shape, letters = np.shape(present[kernel]), CANONICAL[kernel].split()
    lead = shape[: len(shape) - len(letters)]
    sizes = dict(zip(letters, shape[len(lead) :], strict=True))
    packed = [present[leaf] for leaf in entry.leaves if leaf in present]
    dtype = (packed or [present[kernel]])[0].dtype
    wanted = (*lead, *(sizes[letter] for letter in CANONICAL[bias].split()))
    return np.broadcast_to(np.zeros((), dtype), wanted)
