"""Arrays of a framework to canonical leaves and back, by the tables of `layout`.

Import is one einops arrow from the axes of an entry to the canonical ones, export the same arrow
turned round, so that a round trip is exact by construction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from einops import rearrange

from jaxmha import MHAParams, Semantics
from jaxmha.axes import bind, parse
from jaxmha.converters.arrays import NDArray, to_numpy
from jaxmha.converters.layout import Entry, Layout
from jaxmha.converters.refusals import (
    refuse_added,
    refuse_keys,
    refuse_leaves,
    refuse_semantics,
    refuse_sizes,
)
from jaxmha.params import CANONICAL, check, from_leaves, leaves


def import_params(
    layouts: Sequence[Layout],
    state: Mapping[str, Any],
    *,
    layout: str | None = None,
    num_heads: int | None = None,
    prefix: str = "",
) -> tuple[MHAParams, Semantics]:
    """Reads the keys under `prefix` by the layout that fits (or the one named).

    Raises:
      ValueError: an unknown layout; a key that is unknown or missing; a shape that does not fit,
        with the axes expected; a head count that is needed, or contradicts a shape.
    """
    chosen = choose(layouts, [_strip(k, prefix, layouts) for k in state], layout, prefix)
    arrays = {
        key: state[name] for name in state if (key := _strip(name, prefix, layouts)) is not None
    }
    refuse_added(chosen, arrays, prefix)
    arrays = {key: array for key, array in arrays.items() if key not in chosen.beside}
    refuse_keys(chosen, arrays, prefix)
    sizes = _bind_all(chosen, arrays, prefix, num_heads)
    found: dict[str, Any] = {}
    for entry in chosen.entries:
        if entry.key in arrays:
            found |= _unpack(chosen, entry, to_numpy(arrays[entry.key]), sizes)
    semantics = chosen.semantics
    if "query_norm" not in found:
        semantics = replace(semantics, qk_norm=None)
    return from_leaves(found), semantics


def export_params(
    layout: Layout, params: MHAParams, semantics: Semantics = Semantics(), *, prefix: str = ""
) -> dict[str, NDArray]:
    """Writes every leaf under the layout's keys.

    Raises:
      ValueError: the layout cannot hold the parameters or the behaviour; says which and why.
    """
    arrays = {name: to_numpy(array) for name, array in leaves(params).items()}
    leading = arrays["query.kernel"].ndim - 3
    sizes = check(params, leading)
    refuse_sizes(layout, sizes, exporting=True)
    refuse_leaves(layout, arrays)
    refuse_semantics(layout, params, semantics, sizes)
    return {
        layout.path(prefix, entry.key): _pack(layout, entry, arrays)
        for entry in layout.entries
        if entry.leaves[0] in arrays
    }


def choose(
    layouts: Sequence[Layout], keys: Sequence[str | None], name: str | None, prefix: str
) -> Layout:
    """The layout named, or the only one whose required keys are all there."""
    names = [layout.name for layout in layouts]
    if name is not None:
        if name not in names:
            raise ValueError(f"unknown layout {name!r}: known are {', '.join(names)}")
        return layouts[names.index(name)]
    missing = {
        layout.name: [e.key for e in layout.entries if not e.group and e.key not in keys]
        for layout in layouts
    }
    for layout in layouts:
        if not missing[layout.name]:
            return layout
    where = f" under prefix {prefix!r}" if prefix else ""
    lacks = "; ".join(f"{n} lacks {', '.join(keys)}" for n, keys in missing.items())
    raise ValueError(f"no known layout has all its keys{where}: {lacks}")


def _strip(name: str, prefix: str, layouts: Sequence[Layout]) -> str | None:
    if not prefix:
        return name
    start = prefix + layouts[0].separator
    return name.removeprefix(start) if name.startswith(start) else None


def _bind_all(
    layout: Layout, arrays: Mapping[str, Any], prefix: str, num_heads: int | None
) -> dict[str, int]:
    if num_heads is None and not layout.stores_num_heads:
        raise ValueError(
            f"layout {layout.name} does not store the head count: pass num_heads= or "
            "--num-heads (it is in the model's configuration, and in none of these shapes)"
        )
    if num_heads is not None and (type(num_heads) is not int or num_heads < 1):
        raise ValueError(f"num_heads must be a positive integer, got {num_heads!r}")
    sizes = {} if num_heads is None else {"N": num_heads}
    lead: tuple[str, tuple[int, ...]] | None = None
    for entry in layout.entries:
        if entry.key not in arrays:
            continue
        name = layout.path(prefix, entry.key)
        array = arrays[entry.key]
        if not hasattr(array, "shape") or "float" not in str(array.dtype):
            kind = getattr(array, "dtype", type(array).__name__)
            raise ValueError(f"{name}: expected a floating array, got {kind}")
        shape = tuple(array.shape)
        split = max(len(shape) - len(parse(entry.axes)), 0)
        lead = lead or (name, shape[:split])
        if shape[:split] != lead[1]:
            raise ValueError(
                f"{name}: expected leading axes {lead[1]} as in {lead[0]}, then ({entry.axes}), "
                f"got shape {shape}"
            )
        packed = {"qkv": len(entry.leaves), "kv": len(entry.leaves)}
        bound = sizes | packed
        bind(name, shape[split:], entry.axes, bound)
        sizes |= {k: v for k, v in bound.items() if k not in packed}
    refuse_sizes(layout, sizes)
    return sizes


def _unpack(
    layout: Layout, entry: Entry, array: NDArray, sizes: Mapping[str, int]
) -> dict[str, NDArray]:
    axes, target = layout.tied(entry.axes), layout.tied(CANONICAL[entry.leaves[0]])
    pack = _pack_axis(entry)
    known = {**sizes, pack: len(entry.leaves)}
    # What einops cannot infer: letters that share an array axis with others.
    shared = {a: known[a] for group in parse(axes) if len(group) > 1 for a in group}
    parts = rearrange(array, f"... {axes} -> {pack} ... {target}", **shared)
    return {leaf: to_numpy(part) for leaf, part in zip(entry.leaves, parts, strict=True)}


def _pack(layout: Layout, entry: Entry, arrays: Mapping[str, NDArray]) -> NDArray:
    parts = [arrays[leaf] for leaf in entry.leaves]
    if len({part.dtype for part in parts}) > 1:
        shown = ", ".join(f"{k} {p.dtype}" for k, p in zip(entry.leaves, parts, strict=True))
        raise ValueError(f"{entry.key} packs arrays of one dtype, got {shown}: cast them first")
    axes, source = layout.tied(entry.axes), layout.tied(CANONICAL[entry.leaves[0]])
    stacked = np.stack(parts)
    return to_numpy(rearrange(stacked, f"{_pack_axis(entry)} ... {source} -> ... {axes}"))


def _pack_axis(entry: Entry) -> str:
    """The axis that leaves are packed along; `1` where the array is a single leaf."""
    return next((a for group in parse(entry.axes) for a in group if a in ("qkv", "kv")), "1")
