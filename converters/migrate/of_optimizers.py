"""Refuses conversions that change weights but would leave the state of an optimizer as it was.

If a weight is multiplied by f, its gradient is divided by f: so is the first moment of Adam, and the
second moment by f squared. A second moment that is rounded to 0 divides by 0. A change of layout
only permutes, and is right for moments too.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxmha.checkpoint import optimizer_state
from jaxmha.checkpoint.casting import FLOATS


def refuse_scaling(info: Mapping[str, Any]) -> None:
    """Raises ValueError if a source whose query is multiplied has the state of an optimizer."""
    _refuse(optimizer_state.find(info), "folding the scale into the query", "--fold-scale")


def refuse_rounding(info: Mapping[str, Any], dtype: str | None) -> None:
    """Raises ValueError if a cast to `dtype` rounds the state of an optimizer."""
    if dtype is None:
        return
    own = {name: np.dtype(info[name].dtype) for name in optimizer_state.find(info)}
    wanted = np.dtype(dtype)
    rounded = [n for n, x in own.items() if x in FLOATS and not np.can_cast(x, wanted, "safe")]
    _refuse(rounded, f"rounding to {dtype}", f"--dtype {dtype}")


def _refuse(found: Sequence[str], change: str, option: str) -> None:
    if found:
        raise ValueError(
            f"the source has the state of an optimizer ({len(found)} tensors, {found[0]!r} the "
            f"first), which {change} would make wrong for the weights: save the weights alone (in "
            "PyTorch torch.save(model.state_dict(), path), in JAX the tree of parameters) and "
            f"convert that file, or leave out {option}"
        )
