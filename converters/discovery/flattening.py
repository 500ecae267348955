"""Finds dense layers next to a flattened convolution, by sizes and by the order of layers.

torch flattens channels, height, width; Keras and Flax flatten height, width, channels. The kernel of
a dense layer has one size for both, so no shape shows that its features are to be reordered.
"""

from collections.abc import Sequence
from typing import NamedTuple

_LEAST = 4  # the fewest places (pixels) of an image that a dense layer is likely to make: 2 x 2
# Name of the convolution, its channels, the number of places in its image, and True if the dense layer
# makes that image, False if it reads it.
Order = tuple[str, int, int, bool]


class Item(NamedTuple):
    """A layer in the order of its tree; `size_in` and `size_out`: -1 if unknown or absent."""

    name: str
    path: tuple[str, ...]
    layer: int
    size_in: int
    size_out: int
    convolution: bool


def next_to_convolutions(items: Sequence[Item], ordered: bool, norms: set[int]) -> dict[int, Order]:
    """Maps `Item.layer` of each dense layer that reads or makes a flattened image to its `Order`.

    `ordered`: the items are in the order of the model; otherwise the last may precede the first.
    `norms`: sizes of norms.
    """
    found: dict[int, Order] = {}
    read = {item.size_in for item in items if not item.convolution}
    for n, (one, after) in enumerate(zip(items, [*items[1:], items[0]], strict=True)):
        if ordered and n + 1 == len(items):
            break
        if one.convolution and _are_places(after, after.size_in, one.size_out):
            # If another layer makes features of this size, they are not a flattened image.
            if ordered:
                made = {x.size_out for x in items[:n] if not x.convolution}
            else:
                made = {x.size_out for x in items} | norms
            if after.size_in not in made:
                places = after.size_in // one.size_out
                readers = _reading(items, n + 1, after.size_in)
                found |= {x.layer: (one.name, one.size_out, places, False) for x in readers}
        if after.convolution and _are_places(one, one.size_out, after.size_in):
            places = one.size_out // after.size_in
            together = ordered or (len(one.path) > 1 and one.path[:-1] == after.path[:-1])
            later = {x.size_in for x in items[n + 2 :] if not x.convolution} if ordered else read
            if together and places >= _LEAST and one.size_out not in later:
                found[one.layer] = (after.name, after.size_in, places, True)
    return found


def _are_places(dense: Item, size: int, channels: int) -> bool:
    """True if `size` features of a dense layer may be an image with this number of channels."""
    return not dense.convolution and 1 < channels < size and size % channels == 0


def _reading(items: Sequence[Item], start: int, size: int) -> list[Item]:
    """The layers from `start` on that read `size` features.

    It stops before a convolution, and after a layer that makes as many features itself.
    """
    found: list[Item] = []
    for item in (*items[start:], *items[:start]):
        if item.convolution:
            break
        found += [item] * (item.size_in == size)
        if item.size_out == size:
            break
    return found
