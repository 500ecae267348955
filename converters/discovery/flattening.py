"""Finds dense layers next to a flattened convolution, by sizes and, where it is known, by the order of layers.

torch flattens channels, height, width; Keras and Flax flatten height, width, channels. The kernel of
a dense layer has one size for both, so no shape shows that its features are to be reordered.
"""

import itertools
from collections.abc import Mapping, Sequence
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


def next_to_convolutions(
    items: Sequence[Item], norms: Mapping[int, int] | None
) -> dict[int, Order]:
    """Maps `Item.layer` of each dense layer that reads or makes a flattened image to its `Order`.

    `norms`: None if the items are in the order of the model. Otherwise sizes alone decide, and these
    are those of norms, by the number of their layer: norms of such an image are found too.
    """
    if norms is not None:
        return _by_sizes(items, norms)
    found: dict[int, Order] = {}
    for n, (one, after) in enumerate(itertools.pairwise(items)):
        before = {x.size_out for x in items[:n] if not x.convolution}
        reads = one.convolution and _are_places(after, after.size_in, one.size_out)
        # If another layer makes features of this size, they are not a flattened image.
        if reads and after.size_in not in before:
            places = after.size_in // one.size_out
            readers = _reading(items[n + 1 :], after.size_in)
            found |= {x.layer: (one.name, one.size_out, places, False) for x in readers}
        if after.convolution and _are_places(one, one.size_out, after.size_in):
            places = one.size_out // after.size_in
            later = {x.size_in for x in items[n + 2 :] if not x.convolution}
            if places >= _LEAST and one.size_out not in later:
                found[one.layer] = (after.name, after.size_in, places, True)
    return found


def _by_sizes(items: Sequence[Item], norms: Mapping[int, int]) -> dict[int, Order]:
    """As `next_to_convolutions`, for items in any order; layers with several answers are left out.

    The last convolution is one of those whose channels no convolution turns into another number, and
    the first one of those whose channels none made of another number.
    """
    images = [item for item in items if item.convolution]
    turned = {x.size_in for x in images if x.size_in != x.size_out}
    made = {x.size_out for x in images if x.size_in != x.size_out}
    last = [x for x in images if x.size_out not in turned]
    first = [x for x in images if x.size_in not in made]
    of_images = {size for x in images for size in (x.size_in, x.size_out)}
    read = {x.size_in for x in items if x not in images}
    # If convolutions read several numbers of channels that none makes, channels are joined, as in
    # DenseNet, and a norm may be one of joined channels.
    joined = len({x.size_in for x in first if x.size_in > 1}) > 1
    flat = set[int]() if joined else set(norms.values()) - of_images
    others = {x.size_out for x in items} | (set(norms.values()) - flat)
    found: dict[int, Order] = {}
    for item in items:
        alongside = [x for x in first if len(item.path) > 1 and x.path[:-1] == item.path[:-1]]
        makers = first if item.size_out in flat else alongside
        writes, reads = dict[int, Order](), dict[int, Order]()
        if item.size_out not in read:
            writes = _fitting(item, item.size_out, {x.size_in: x for x in makers}, True, _LEAST)
        if item.size_in not in others:
            least = _LEAST if item.size_in in flat else 2
            reads = _fitting(item, item.size_in, {x.size_out: x for x in last}, False, least)
        # A norm tells more than the size alone that a layer reads.
        found |= reads | writes if item.size_out in flat else writes | reads
    orders = {
        channels * places: (of, channels, places, True)
        for of, channels, places, _ in found.values()
    }
    return found | {
        n: orders[size] for n, size in norms.items() if size in orders.keys() - of_images
    }


def _fitting(
    item: Item, size: int, images: Mapping[int, Item], output: bool, least: int
) -> dict[int, Order]:
    """Returns the `Order` of a dense layer by its number; nothing unless one number of channels fits.

    `size`: its features. `images`: convolutions by their channels. `least`: the fewest places.
    """
    fits = [n for n in images if _are_places(item, size, n)]
    if len(fits) != 1 or size // fits[0] < least:
        return {}
    return {item.layer: (images[fits[0]].name, fits[0], size // fits[0], output)}


def _are_places(dense: Item, size: int, channels: int) -> bool:
    """True if `size` features of a dense layer may be an image with this number of channels."""
    return not dense.convolution and 1 < channels < size and size % channels == 0


def _reading(items: Sequence[Item], size: int) -> list[Item]:
    """The layers that read `size` features.

    The search stops before a convolution, and after a layer that makes as many features itself.
    """
    found: list[Item] = []
    for item in items:
        if item.convolution:
            break
        found += [item] * (item.size_in == size)
        if item.size_out == size:
            break
    return found
