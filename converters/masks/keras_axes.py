"""Masks of `keras.layers.MultiHeadAttention` with `attention_axes`, for inputs of more than three axes.

Keras inserts the axes that a mask lacks before the head axis: the first axis of a mask is the batch,
and its last axes are the attended axes of queries and of keys. It takes the positions of its causal
mask and of its sliding window from axis 1 of the inputs, whichever axes are attended.
"""

from collections.abc import Mapping

import numpy as np

from jaxmha import Mask
from jaxmha.converters.layout.arrays import AnyArray, NDArray, to_numpy


def import_along(
    axes: tuple[int, ...], rank: int, given: Mapping[str, AnyArray | None], structure: Mask
) -> Mask:
    """The mask `*B N *T *S` of inputs with `rank` axes, of which the layer attends over `axes`.

    Raises ValueError if Keras fails on an argument, or reads it along other axes.
    """
    over = tuple(axis + rank if axis < 0 else axis for axis in axes)
    if not structure.empty and over != (1,):
        raise ValueError(
            "keras takes the positions of use_causal_mask and sliding_window from axis 1 of the "
            f"inputs, and this layer attends over axes {over}: pass them within attention_mask"
        )
    arrays = {name: to_numpy(x) for name, x in given.items() if x is not None}
    positions = [name for name in arrays if name != "attention_mask"]
    least, most = 2 * len(over), rank + len(over)
    whole = arrays.get("attention_mask")
    if positions and (len(over) > 1 or (whole is not None and whole.ndim > 3)):
        raise ValueError(
            f"{positions[0]}: keras reads it along other axes where several axes are attended, or next "
            "to an attention_mask of more than three axes: pass it within attention_mask"
        )
    mask = structure
    for name, x in arrays.items():
        if name in positions:
            x = x[:, :, None] if name == "query_mask" else x[:, None]
        if not least <= x.ndim <= most:
            raise ValueError(
                f"{name}: expected {least} to {most} axes (*B, N, *T, *S) for inputs of {rank} axes, "
                f"of which the layer attends over {over}, got shape {x.shape}"
            )
        mask = mask & Mask.dense(_widened(x != 0, most, least))
    return mask


def _widened(x: NDArray, most: int, last: int) -> NDArray:
    """Inserts axes of size 1 before the `last` axes of a mask, so that it has `most` axes."""
    first = x.ndim - last
    return np.reshape(x, (*x.shape[:first], *(1,) * (most - x.ndim), *x.shape[first:]))
