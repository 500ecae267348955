"""Masks of a toy library: True in `hidden` blocks a key."""

from typing import Any

from jaxmha import Mask
from jaxmha.converters.layout.arrays import AnyArray
from jaxmha.converters.masks.compose import array_of, checked, padding_of, read_all
from jaxmha.converters.masks.spec import MaskArg, Masks

ARGUMENTS = (
    MaskArg("hidden", ("#B S",), keep=False, field="key_value_padding", empty=(("", "nan"),)),
)


def import_masks(*, hidden: AnyArray | None = None) -> Masks:
    """Imports the only mask argument."""
    return read_all(ARGUMENTS, {"hidden": hidden}, {})


def export_masks(mask: Mask | AnyArray | None, *, key_length: int) -> dict[str, Any]:
    """Exports padding of keys; raises ValueError for other masks."""
    own = checked(mask, {"S": key_length})
    if array_of(own, 1, key_length, ("key_value_padding", "key_value_lengths")) is not None:
        raise ValueError("the toy library has masks of keys alone")
    valid = padding_of(own, "key_value", key_length)
    return {} if valid is None else {"hidden": ~valid}
