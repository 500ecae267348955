"""Refuses conversions that change weights but would leave the state of an optimizer as it was.

If a weight is multiplied by f, its gradient is divided by f: so is the first moment of Adam, and the
second moment by f squared. A second moment that is rounded to 0 divides by 0. A change of layout
only permutes, and is right for moments too: optax names them as the weights, so that they are
converted like these. PyTorch numbers them, so that they stay as they were, which a note says.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxmha.checkpoint import optimizer_state
from jaxmha.checkpoint.casting import FLOATS
from jaxmha.checkpoint.errors import printable
from jaxmha.converters.discovery.attention_blocks import Block


class Source(Protocol):
    """A source: facts on its tensors, and names of its entries that are not tensors."""

    info: Mapping[str, Any]
    others: tuple[str, ...]


def refuse_scaling(file: Source) -> None:
    """Raises ValueError if a source whose query is multiplied has the state of an optimizer."""
    found = optimizer_state.find(file.info, file.others)
    _refuse(found, "folding the scale into the query", "--fold-scale")


def refuse_rounding(file: Source, dtype: str | None) -> None:
    """Raises ValueError if a cast to `dtype` rounds the state of an optimizer."""
    if dtype is None:
        return
    found = optimizer_state.find(file.info, file.others)
    own = {name: np.dtype(file.info[name].dtype) for name in found}
    wanted = np.dtype(dtype)
    rounded = [n for n, x in own.items() if x in FLOATS and not np.can_cast(x, wanted, "safe")]
    _refuse(rounded, f"rounding to {dtype}", f"--dtype {dtype}")


def _refuse(found: Sequence[str], change: str, option: str) -> None:
    if found:
        raise ValueError(
            f"the source has the state of an optimizer ({len(found)} tensors, {found[0]!r} the "
            f"first), which {change} would make wrong for the weights: save the weights alone (in "
            "PyTorch torch.save(model.state_dict(), path), in JAX the tree of parameters, in Keras "
            "the model after keras.models.load_model(path, compile=False), or a model that is not "
            f"compiled) and convert that file, or leave out {option}"
        )


def left_behind(file: Source, copied: Sequence[str]) -> Iterator[str]:
    """Yields a note if moments are copied whose weights may be converted.

    `copied`: names of the tensors that the plan copies. A moment of optax whose weight is copied as
    well still fits it.
    """
    states = set(optimizer_state.find(file.info, file.others))
    weights = optimizer_state.keys(name for name in copied if name not in states)
    old = [
        name
        for name in copied
        if name in states and file.info[name].shape and optimizer_state.key(name) not in weights
    ]
    if old:
        yield printable(
            f"the state of an optimizer is carried over as it was ({len(old)} tensors, {old[0]!r} "
            "the first): where weights are converted, it has the names, order and axes of those of "
            "the source, and fits only them; start the optimizer anew"
        )


def weights_of(file: Source, apart: Mapping[str, Sequence[str]]) -> dict[str, Sequence[str]]:
    """Leaves out prefixes whose tensors all belong to the state of an optimizer, as FSDP names it.

    `left_behind` has a note on them. `apart`: the tensors at each prefix.
    """
    states = set(optimizer_state.find(file.info, file.others)) if apart else set[str]()
    return {prefix: names for prefix, names in apart.items() if not states.issuperset(names)}


def without_parts(file: Source, found: list[Block]) -> list[Block]:
    """Leaves out blocks in the state of an optimizer that lack arrays, such as those of Muon.

    Muon keeps the moments of matrices apart from those of biases. Such blocks cannot be converted.
    """
    if all(block.whole for block in found):
        return found
    states = set(optimizer_state.find(file.info, file.others))
    return [b for b in found if b.whole or states.isdisjoint(b.keys.values())]
