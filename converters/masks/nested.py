"""Imports and exports nested (ragged) tensors of torch: sequences of unequal lengths.

`torch.nn.MultiheadAttention` and `scaled_dot_product_attention` take them instead of masks: every
row attends its own keys. This module pads them with lengths, or packs them with segments.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from einops import rearrange

from jaxmha import Mask
from jaxmha.converters.layout.arrays import AnyArray, NDArray, to_numpy, to_torch
from jaxmha.extras import needed
from jaxmha.static_checks import one_of

if TYPE_CHECKING:
    import torch

# A nested tensor, or one array for each row.
Rows: TypeAlias = AnyArray | Sequence[AnyArray]
Axes: TypeAlias = Literal["B T D", "B T N H", "B N T H"]
# Axes of a nested tensor -> axes of one of its rows, and of this row with the length first.
ROWS = {"B T D": ("T D", "T D"), "B T N H": ("T N H", "T N H"), "B N T H": ("N T H", "T N H")}


def import_nested(
    query: Rows,
    key: Rows | None = None,
    value: Rows | None = None,
    *,
    axes: Axes = "B T D",
    packed: bool = False,
) -> tuple[NDArray, NDArray, NDArray, Mask]:
    """Converts nested tensors to dense arrays and the equivalent mask.

    For causal attention within each sequence add `Mask.causal()`; with `packed=True` it requires
    equal lengths of query and key. For nested tensors, torch's own layer ignores `is_causal` and
    refuses masks.

    Args:
      query, key, value: nested tensors of either layout (strided, jagged), or sequences of
        arrays; key defaults to query, value to key.
      axes: `B T D` as `nn.MultiheadAttention` takes them, `B N T H` as SDPA does.
      packed: True packs all sequences into one row, and the mask has segments; False pads each
        sequence with zeros, and the mask has lengths.

    Returns:
      query, key, value as `(B, T, ...)` or packed `(1, T, ...)`, the head axis after the length;
      and the mask. Entries beyond a length are 0.

    Raises:
      ValueError: there are no rows; a row has other axes or sizes than the first; query, key and
        value differ in their number of rows; or key and value differ in their lengths.

    >>> query, key, value, mask = import_nested([np.ones((2, 4)), np.ones((3, 4))])
    >>> query.shape, mask.query_lengths.tolist()
    ((2, 3, 4), [2, 3])
    >>> query, key, value, mask = import_nested([np.ones((2, 4)), np.ones((3, 4))], packed=True)
    >>> query.shape, mask.query_segments.tolist()
    ((1, 5, 4), [[0, 0, 1, 1, 1]])
    """
    one_of("axes", axes, tuple(ROWS))
    queries = _rows("query", query, axes)
    keys = queries if key is None else _rows("key", key, axes)
    values = keys if value is None else _rows("value", value, axes)
    lengths = [np.array([len(row) for row in rows], np.int32) for rows in (queries, keys, values)]
    if len(queries) != len(keys) or not np.array_equal(lengths[1], lengths[2]):
        raise ValueError(
            f"expected as many rows of query, key and value, and key and value of the same "
            f"lengths, got lengths {', '.join(str(n.tolist()) for n in lengths)}"
        )
    if packed:
        ids = [np.repeat(np.arange(len(n), dtype=np.int32), n)[None] for n in lengths]
        mask = Mask.segments(query_ids=ids[0], key_value_ids=ids[1])
        arrays = [np.concatenate(rows)[None] for rows in (queries, keys, values)]
    else:
        mask = Mask.lengths(query=lengths[0], key_value=lengths[1])
        arrays = [_padded(rows) for rows in (queries, keys, values)]
    return arrays[0], arrays[1], arrays[2], mask


def export_nested(
    array: AnyArray, lengths: Sequence[int], *, axes: Axes = "B T D", jagged: bool = False
) -> "torch.Tensor":
    """Converts an array `(B, T, ...)`, or packed `(1, sum of lengths, ...)`, to a nested tensor.

    Args:
      array: the head axis after the length, as `import_nested` returns it.
      lengths: the length of each row.
      axes: axes of the tensor.
      jagged: True returns layout torch.jagged, False torch.strided.

    Raises:
      ValueError: there are no lengths; the array has neither one row per length nor one for all.

    >>> import warnings
    >>> with warnings.catch_warnings(action="ignore"):  # torch calls them a prototype
    ...     export_nested(np.ones((2, 3, 4)), [2, 3], jagged=True).is_nested
    True
    """
    with needed("torch"):
        import torch

    one_of("axes", axes, tuple(ROWS))
    array, lengths = to_numpy(array), [int(n) for n in lengths]
    if not lengths or min(lengths) < 0:
        raise ValueError(f"lengths must be one or more integers >= 0, got {lengths}")
    if array.ndim != len(axes.split()):
        ours = axes.replace("N T", "T N")
        raise ValueError(f"array: expected axes ({ours}), got shape {array.shape}")
    if array.shape[0] == len(lengths) and max(lengths) <= array.shape[1]:
        rows = [row[:n] for row, n in zip(array, lengths, strict=True)]
    elif array.shape[:2] == (1, sum(lengths)):
        rows = np.split(array[0], np.cumsum(lengths)[:-1])
    else:
        raise ValueError(
            f"expected axes (B, T, ...) with B={len(lengths)}, T >= {max(lengths)}, or "
            f"packed (1, {sum(lengths)}, ...), got shape {array.shape}"
        )
    theirs, ours = ROWS[axes]
    if jagged:  # torch needs the ragged axis first; it is transposed below
        tensor = torch.nested.nested_tensor([to_torch(row) for row in rows], layout=torch.jagged)
        return tensor if theirs == ours else tensor.transpose(1, 2)
    turned = [to_torch(rearrange(row, f"{ours} -> {theirs}")) for row in rows]
    return torch.nested.nested_tensor(turned)


def _rows(name: str, tensor: Rows, axes: Axes) -> list[NDArray]:
    """The sequences as arrays with the length first; includes sequences of length 0."""
    theirs, ours = ROWS[axes]
    several: Any = tensor
    rows = [to_numpy(row) for row in (several.unbind() if hasattr(tensor, "unbind") else several)]
    if not rows:
        raise ValueError(f"{name} has no rows: expected axes ({axes}) with B >= 1")
    length = theirs.split().index("T")
    for b, row in enumerate(rows):
        same = row.ndim == len(theirs.split()) and all(
            n == first or axis == length
            for axis, (n, first) in enumerate(zip(row.shape, rows[0].shape, strict=False))
        )
        if not same:
            raise ValueError(
                f"{name}: expected rows of axes ({theirs}) that differ in T alone, got shape "
                f"{row.shape} in row {b}{f' and {rows[0].shape} in row 0' if b else ''}: pass "
                "the axes of the tensor as axes="
            )
    return [to_numpy(rearrange(row, f"{theirs} -> {ours}")) for row in rows]


def _padded(rows: list[NDArray]) -> NDArray:
    longest = max(len(row) for row in rows)
    return np.stack(
        [np.pad(row, ((0, longest - len(row)), *((0, 0),) * (row.ndim - 1))) for row in rows]
    )
