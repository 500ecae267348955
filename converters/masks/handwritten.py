"""Masks as hand-written layers apply them: filled with -1e9, or added times -1e9.

Sources: "The Annotated Transformer" (`masked_fill(mask == 0, -1e9)`), and the common PyTorch and
TensorFlow layers (`masked_fill(~mask.bool(), -1e9)`, and `logits + mask * -1e9`). All of them
insert one axis at position 1. A (B, T, S) mask therefore works as expected, and a (B, S) mask is
read as (N, S): row b applies to head b if B = N, and the layer fails otherwise.
"""

from typing import Any, Literal

import numpy as np

from jaxmha import Mask
from jaxmha.converters.layout.arrays import AnyArray, to_numpy
from jaxmha.converters.masks.compose import array_of, checked, only_mask, without_query_lengths
from jaxmha.converters.masks.spec import MaskArg, Masks, read, write
from jaxmha.static_checks import one_of

Style = Literal["filled", "added"]

# The layer inserts an axis of size 1 at position 1, so that it reads two axes as (N, 1, S) and
# three as (B, 1, T, S).
_AXES = ("#N #S", "#B #T #S")
FILLED = MaskArg("mask", _AXES, other="nonzero", empty=(("", "mean"),))
ADDED = MaskArg(
    "mask",
    _AXES,
    keep=False,
    other="nonzero",
    empty=(("float32", "mean"), ("float64", "as if unmasked")),
)
ARGUMENTS = (FILLED, ADDED)
CONSTANT = -1e9


def import_masks(*, mask: AnyArray, style: Style, num_heads: int | None = None) -> Masks:
    """Imports the mask of a hand-written layer.

    Args:
      mask: `(B, T, S)`, where any axis may have size 1, or `(N, S)`.
      style: `"filled"`: the layer sets logits to -1e9 where the mask is False or 0. `"added"`: it
        adds the mask times -1e9 to the logits, so that 1 blocks.
      num_heads: N, checked against the shape if given.

    Returns:
      `filled` gives a mask; a fully masked row is exactly the mean of the values, as with
      `fully_masked="mean"`. `added` also gives a mask if it holds only 0 and 1 and leaves every row
      a key. Otherwise it gives a bias, because logits after adding -1e9 depend on their size and
      dtype: float32 loses everything below 32, so the row is the mean; float64 keeps nearly
      everything, so the row attends as if unmasked.

    Raises:
      ValueError: the shape is not allowed.

    >>> import_masks(mask=np.array([[[1, 0]]]), style="filled")[0].array.tolist()
    [[[[True, False]]]]
    >>> import_masks(mask=np.array([[[1, 0]]]), style="added")[0].array.tolist()
    [[[[False, True]]]]
    """
    one_of("style", style, ("filled", "added"))
    array = to_numpy(mask)
    sizes = {} if num_heads is None else {"N": num_heads}
    if style == "filled":
        return read(FILLED, array, sizes)
    plain = np.all((array == 0) | (array == 1)) and (array == 0).any(-1).all()
    if plain:
        return read(ADDED, array, sizes)
    dtype = array.dtype if array.dtype.kind == "f" else np.dtype(np.float32)
    added = array.astype(dtype) * np.asarray(CONSTANT, dtype)
    return read(ADDED._replace(other="added"), added, sizes)


def export_masks(
    mask: Mask | AnyArray | None,
    bias: AnyArray | None = None,
    *,
    style: Style,
    query_length: int,
    key_length: int,
) -> dict[str, Any]:
    """Exports a mask as the argument `mask` of a hand-written layer.

    The array is Boolean (True = attend) for style `filled`, and float32 (1 blocks) for `added`.

    Args:
      mask: a `Mask`, a Boolean array broadcastable to BNTS (True = attend), or None.
      bias: holds only 0 and -inf.
      style: as in `import_masks`.
      query_length: T.
      key_length: S.

    Raises:
      ValueError: a shape does not fit; queries beyond their length; additive values; a mask per
        head that varies over batch or queries; for `added`, a fully masked row.

    >>> from jaxmha import Mask
    >>> mask = Mask.padding(key_value=np.array([[True, False]]))
    >>> export_masks(mask, style="added", query_length=2, key_length=2)["mask"].tolist()
    [[[0.0, 1.0]]]
    """
    one_of("style", style, ("filled", "added"))
    argument = FILLED if style == "filled" else ADDED
    instead = "add the bias to the logits in the layer itself"
    sizes = {"T": query_length, "S": key_length}
    mask = without_query_lengths(checked(mask, sizes), query_length, "a mask of -1e9")
    mask = only_mask(mask, bias, "a mask of -1e9", instead, sizes)
    array = array_of(mask, query_length, key_length)
    if array is None:
        return {}
    if (
        style == "added"
        and not np.broadcast_to(array, (*array.shape[:3], key_length)).any(-1).all()
    ):
        raise ValueError(
            "mask leaves a row with nothing to attend: after logits + mask * -1e9 its output depends "
            "on the dtype; give the row a key, or use a layer that fills"
        )
    rows = argument if array.shape[1] > 1 else argument._replace(axes=_AXES[1:])
    written = write(rows, array, {})
    return {"mask": written if style == "filled" else written.astype(np.float32)}
