"""Converts arrays of a framework to canonical leaves and back, by the tables of a `Layout`.

Import applies one einops pattern, from the axes of an entry to the canonical axes. Export applies
the reverse pattern, so the round trip is exact by construction.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from einops import rearrange

from jaxmha import MHAParams, Semantics
from jaxmha.converters.layout import uneven
from jaxmha.converters.layout.arrays import NDArray, is_traced, to_numpy
from jaxmha.converters.layout.base import Entry, Layout, choose
from jaxmha.converters.layout.validation import (
    Named,
    refuse_added,
    refuse_arrays,
    refuse_export,
    refuse_heads,
    refuse_keys,
    refuse_leading,
    refuse_mixed,
    refuse_sizes,
)
from jaxmha.dims import bind, parse
from jaxmha.params import CANONICAL, NORM_SCALES, from_leaves, leaves
from jaxmha.semantics import with_norms


def import_params(
    layouts: Sequence[Layout],
    state: Mapping[str, Any],
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    prefix: str = "",
    take: Callable[[Any], Any] = to_numpy,
    put: Callable[[Any], Any] | None = None,
) -> tuple[MHAParams, Semantics]:
    """Imports the keys under `prefix` by the named layout, or by the first that fits.

    `take` converts each source array. `put` (default: `take`) converts each leaf, which is a view
    of the converted array where NumPy can make one.

    Raises:
      ValueError: an unknown layout; an unknown or missing key; a shape that does not fit, with the
        expected axes; a head count that is missing although required, or contradicts a shape.
    """
    chosen = choose(layouts, state.keys(), layout, prefix)
    keys = {name: chosen.key(prefix, name) for name in state}
    arrays = {key: state[name] for name, key in keys.items() if key is not None}
    refuse_added(chosen, arrays, prefix)
    arrays = {key: array for key, array in arrays.items() if key not in chosen.other_keys}
    refuse_keys(chosen, arrays, prefix)
    refuse_arrays(chosen, arrays, prefix)
    sizes = bind_shapes(chosen, {k: tuple(x.shape) for k, x in arrays.items()}, num_heads, prefix)
    found: dict[str, Any] = {}
    for entry in chosen.entries:
        if entry.key in arrays:
            parts = unpack(chosen, entry, take(arrays[entry.key]), sizes)
            found |= {leaf: (put or take)(part) for leaf, part in parts.items()}
    return from_leaves(found), behaviour(chosen, found)


def behaviour(layout: Layout, found: Mapping[str, Any]) -> Semantics:
    """The semantics of the layout, without its norms if the leaves `found` have no norm scales."""
    return with_norms(layout.semantics, bool(NORM_SCALES & found.keys()))


def export_params(
    layout: Layout,
    params: MHAParams,
    semantics: Semantics = Semantics(),
    *,
    prefix: str = "",
    take: Callable[[Any], NDArray] = to_numpy,
) -> dict[str, NDArray]:
    """Exports every leaf under the keys of the layout; `take` converts each leaf to NumPy.

    Raises:
      ValueError: the layout cannot hold a parameter or behaviour; the message says which and why.
    """
    arrays = {name: take(array) for name, array in leaves(params).items()}
    refuse_export(layout, params, semantics)
    held = [entry for entry in layout.entries if entry.leaves[0] in arrays]
    for entry in held:
        refuse_mixed(entry, [arrays[leaf] for leaf in entry.leaves])
    return {
        layout.path(prefix, entry.key): take(pack(layout, entry, arrays.__getitem__))
        for entry in held
    }


def bind_shapes(
    layout: Layout,
    shapes: Mapping[str, tuple[int, ...]],
    num_heads: int | None = None,
    prefix: str = "",
) -> dict[str, int]:
    """The size of every axis letter, from the shapes by key; leading axes must be equal for all keys.

    Raises:
      ValueError: a shape does not fit, or `num_heads` is required and None.
    """
    refuse_heads(layout, num_heads)
    sizes = {} if num_heads is None else {"N": num_heads}
    named: list[Named] = []
    for entry in layout.entries:
        if (shape := shapes.get(entry.key)) is None:
            continue
        split = max(len(shape) - len(parse(entry.axes)), 0)
        named.append((layout.path(prefix, entry.key), entry.axes, shape))
        refuse_leading(named, split)
        bound = sizes | (packed := {uneven.pack_axis(entry): len(entry.leaves)})
        bind(named[-1][0], shape[split:], entry.axes, bound)
        sizes |= {letter: n for letter, n in bound.items() if letter not in packed}
    refuse_sizes(layout, sizes := uneven.completed(sizes), named)
    return sizes


def unpack(
    layout: Layout, entry: Entry, array: NDArray, sizes: Mapping[str, int]
) -> dict[str, NDArray]:
    """Splits one array of the layout into its leaves, as views where NumPy can make them."""
    if uneven.letter(entry):
        return uneven.unpack(entry, array, sizes)
    axes, target = layout.tied(entry.axes), layout.tied(CANONICAL[entry.leaves[0]])
    pack = uneven.pack_axis(entry)
    known = {**sizes, pack: len(entry.leaves)}
    parts = rearrange(array, f"... {axes} -> {pack} ... {target}", **uneven.shared(axes, known))
    found = dict(zip(entry.leaves, parts, strict=True))
    return uneven.grouped(found, sizes["K"]) if layout.cyclic else found


def pack(layout: Layout, entry: Entry, leaf: Callable[[str], NDArray]) -> NDArray:
    """One array of the layout from its leaves, requested one by one through `leaf`.

    A single leaf gives a view where NumPy can make one.
    """
    if uneven.letter(entry):
        return uneven.pack(entry, leaf)
    axes, source = layout.tied(entry.axes), layout.tied(CANONICAL[entry.leaves[0]])
    first = leaf(entry.leaves[0])
    if layout.cyclic:
        first = uneven.in_cycle(entry.leaves[0], first, leaf("key.kernel").shape[-2])
    if len(entry.leaves) == 1:
        alone: NDArray = rearrange(first[None], f"1 ... {source} -> ... {axes}")
        return alone
    if any(is_traced(leaf(name)) for name in entry.leaves):
        return uneven.pack_traced(entry, leaf, axes, source)
    letters = parse(source)
    lead = first.shape[: first.ndim - len(letters)]
    sizes = {a: n for (a,), n in zip(letters, first.shape[len(lead) :], strict=True)}
    sizes[along := uneven.pack_axis(entry)] = len(entry.leaves)
    shape = [math.prod(int(a) if a.isdigit() else sizes[a] for a in g) for g in parse(axes)]
    packed = np.empty((*lead, *shape), first.dtype)
    slots = rearrange(packed, f"... {axes} -> {along} ... {source}", **uneven.shared(axes, sizes))
    assert np.may_share_memory(slots, packed) or not packed.size
    slots[0] = first
    del first
    for slot, name in zip(slots[1:], entry.leaves[1:], strict=True):
        slot[...] = leaf(name)
    return packed
