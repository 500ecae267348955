"""Checks before an import or export that the layout can hold the parameters; says why if not."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from jaxmha import MHAParams, Semantics
from jaxmha.converters.layout import fill
from jaxmha.converters.layout.arrays import NDArray, refuse_abstract
from jaxmha.converters.layout.base import Entry, Layout
from jaxmha.converters.layout.parametrized import remedies
from jaxmha.converters.layout.torch_arrays import refuse_unreadable
from jaxmha.dims import parse
from jaxmha.params import CANONICAL, check, leaves
from jaxmha.semantics import NORM_FIELDS

Named = tuple[str, str, tuple[int, ...]]  # name in messages, axes, shape


def leaf_shapes(params: MHAParams) -> list[Named]:
    """Name, axes and shape of every leaf."""
    return [
        (f"params.{name}", CANONICAL[name], tuple(array.shape))
        for name, array in leaves(params).items()
    ]


def refuse_sizes(layout: Layout, sizes: Mapping[str, int], named: Sequence[Named]) -> None:
    """Raises ValueError for a size of 0, or for sizes that break a tie of the layout.

    The message gives the reason for the tie, and the arrays that determine the sizes.
    """
    if empty := [letter for letter, size in sizes.items() if size == 0]:
        got = ", ".join(f"{name} of shape {shape}" for name, _, shape in named)
        raise ValueError(f"{', '.join(empty)} = 0: there is no attention in it; got {got}")
    for letter, (tied, reason) in layout.ties.items():
        letters = tied.split()
        if letter not in sizes or not all(a in sizes for a in letters):
            continue
        if sizes[letter] != math.prod(sizes[a] for a in letters):
            shown = " * ".join(f"{a}={sizes[a]}" for a in letters)
            first = {a: (n, s) for n, axes, s in reversed(named) for a in re.findall(r"\w+", axes)}
            sources = dict.fromkeys(first[a] for a in (letter, *letters) if a in first)
            got = " and ".join(f"{name} of shape {shape}" for name, shape in sources)
            raise ValueError(
                f"layout {layout.name} cannot hold {letter}={sizes[letter]} with {shown}: {reason}; "
                f"got {got}"
            )


def refuse_apart(layout: Layout, sizes: Mapping[str, int]) -> None:
    """Raises ValueError if all sizes that `layout.apart` names are equal: another layout holds them."""
    letters, reason = layout.apart
    if letters and len({sizes[a] for a in letters.split()}) == 1:
        shown = " = ".join(letters.split())
        raise ValueError(f"layout {layout.name} does not hold {shown}: {reason}")


def refuse_heads(layout: Layout, num_heads: int | None) -> None:
    """Raises ValueError for a head count that is missing or not a positive integer."""
    if num_heads is None and not layout.stores_num_heads:
        raise ValueError(
            f"layout {layout.name} does not store the head count: pass num_heads= "
            "(--num-heads): it is in the model's configuration, and in none of these shapes"
        )
    if num_heads is not None and (type(num_heads) is not int or num_heads < 1):
        raise ValueError(f"num_heads must be a positive integer, got {num_heads!r}")


def refuse_leading(named: Sequence[Named], split: int) -> None:
    """Raises ValueError if the last of the arrays `named` is stacked otherwise than the first.

    `split`: the number of its leading axes, which must equal those of the first array.
    """
    first, axes, shape = named[0]
    lead = shape[: max(len(shape) - len(parse(axes)), 0)]
    name, axes, shape = named[-1]
    if shape[:split] != lead:
        raise ValueError(
            f"{name}: expected leading axes {lead} as in {first}, then ({axes}), got shape {shape}"
        )


def refuse_arrays(layout: Layout, arrays: Mapping[str, Any], prefix: str) -> None:
    """Raises ValueError for an entry that is not a floating-point array, or has no values."""
    for key, array in arrays.items():
        name = layout.path(prefix, key)
        refuse_unreadable(array, name)
        refuse_abstract(array, name)
        if not hasattr(array, "shape") or "float" not in str(array.dtype):
            kind = getattr(array, "dtype", type(array).__name__)
            raise ValueError(f"{name}: expected a floating array, got {kind}")


def refuse_mixed(entry: Entry, parts: Sequence[NDArray]) -> None:
    """Raises ValueError if leaves of one packed array have several dtypes."""
    if len({part.dtype for part in parts}) > 1:
        shown = ", ".join(f"{k} {p.dtype}" for k, p in zip(entry.leaves, parts, strict=True))
        raise ValueError(f"{entry.key} packs arrays of one dtype, got {shown}: cast them first")


def several_dtypes(params: MHAParams) -> str:
    """A text with one example leaf of every dtype; empty if all leaves have the same dtype."""
    found = {
        str(getattr(array, "dtype", None) or np.asarray(array).dtype): name
        for name, array in leaves(params).items()
    }
    return ", ".join(f"{name} is {dtype}" for dtype, name in found.items()) * (len(found) > 1)


def one_dtype(params: MHAParams) -> None:
    """Raises ValueError for several dtypes, because a layer has one and would round some leaves."""
    if shown := several_dtypes(params):
        raise ValueError(f"a live layer holds arrays of one dtype: {shown}; cast them first")


_NO_OUTPUT = (
    ": heads are concatenated here, and the target has an output layer. The identity computes the "
    "same, with N and h the heads and their width: "
    "params._replace(out=jaxmha.Projection(np.eye(N * h, dtype=dtype).reshape(N, h, N * h)))"
)


def refuse_leaves(layout: Layout, present: Mapping[str, Any]) -> None:
    """Raises ValueError if leaves do not fit the layout, are missing, or their group is incomplete."""
    known = {leaf for entry in layout.entries for leaf in entry.leaves}
    fillable = fill.missing(layout, present).keys()
    if extra := [leaf for leaf in present if leaf not in known]:
        raise ValueError(
            f"layout {layout.name} cannot hold {', '.join(extra)}: it has no such parameter"
        )
    for group in dict.fromkeys(entry.group for entry in layout.entries):
        wanted = [leaf for e in layout.entries if e.group == group for leaf in e.leaves]
        missing = [leaf for leaf in wanted if leaf not in present]
        if missing and not group:
            raise ValueError(
                f"layout {layout.name} needs {', '.join(missing)}, which is not there"
                + _NO_OUTPUT * ("out.kernel" in missing)
                + fill.REMEDY * (set(missing) <= fillable)
            )
        if missing and len(missing) < len(wanted):
            given = [leaf for leaf in wanted if leaf in present]
            raise ValueError(
                f"layout {layout.name} holds {', '.join(wanted)} together or not at all; "
                f"there: {', '.join(given)}; missing: {', '.join(missing)}"
                + fill.REMEDY
                * (set(missing) <= fillable)
            )


# Fields of Semantics that the caller chooses for an evaluation, and that no layout has to hold.
_EVALUATION = {"fully_masked", "softmax_dtype", "precision"}


def refuse_semantics(
    layout: Layout, params: MHAParams, semantics: Semantics, sizes: Mapping[str, int]
) -> None:
    """Raises ValueError if the semantics differ from the layout's in a field that it cannot hold."""
    ignored = {*_EVALUATION, *layout.holds}
    if semantics.dropout_rate == 0:
        ignored |= {"dropout_broadcast"}
    if params.query_norm is None and semantics.qk_norm is None:
        ignored |= {*NORM_FIELDS}
    default = sizes["H"] ** -0.5
    for field in fields(Semantics):
        ours, theirs = getattr(semantics, field.name), getattr(layout.semantics, field.name)
        if field.name == "scale":
            ours, theirs = (default if s is None else s for s in (ours, theirs))
        # 1 / math.sqrt(H) and H**-0.5 may differ in the last bit.
        equal = ours == theirs or (
            field.name == "scale" and math.isclose(ours, theirs, rel_tol=1e-12)
        )
        if field.name not in ignored and not equal:
            remedy = (
                "; fold_scale=True (--fold-scale) multiplies the queries instead, or take the "
                f"blocks by import_params and run them with Semantics(scale={ours!r})"
            )
            raise ValueError(
                f"layout {layout.name} cannot hold semantics.{field.name}={ours!r}: its layer "
                f"always has {theirs!r}{remedy * (field.name == 'scale')}"
            )


# Key of a learned array next to the projections that changes the output -> remedy to report.
_ADDED = {
    "relative_attention_bias.weight": "take the key out, look the bias of every distance up in it "
    "and give it to multi_head_attention(bias=) of every layer (a whole file is converted with the "
    "array carried over under its own name)",
    **dict.fromkeys(
        (
            "self.relative_position_bias_table",
            "relative_position_bias_table",
            "rel_pos.relative_position_bias_table",
            "attention_biases",
            "rel_pos_h",
            "rel_pos_w",
            "bias_u",
            "bias_v",
            "relative_k_proj.weight",
            "distance_embedding.weight",
            "pos_bias_u",
            "pos_bias_v",
            "linear_pos.weight",
        ),
        "take the key out, and give multi_head_attention(bias=) the term that positions_of(folder) "
        "of jaxmha.converters returns for this block (a whole file is converted with the array "
        "carried over under its own name)",
    ),
}


def refuse_added(layout: Layout, arrays: Mapping[str, Any], prefix: str) -> None:
    """Raises ValueError for an array that changes the function and that no layout holds."""
    for key, remedy in _ADDED.items():
        if key in arrays and key in layout.other_keys:
            raise ValueError(
                f"{layout.path(prefix, key)} adds to the logits, and MHAParams has no place for "
                f"it: {remedy}"
            )


def refuse_keys(layout: Layout, arrays: Mapping[str, Any], prefix: str) -> None:
    """Raises ValueError for keys that are unknown, missing, or incomplete in their group."""
    keys = [entry.key for entry in layout.entries]
    where = f" under prefix {prefix!r}" if prefix else ""
    if unknown := [key for key in arrays if key not in keys]:
        raise ValueError(
            f"unknown key {', '.join(map(repr, unknown))}{where}: layout {layout.name} has "
            f"{', '.join(keys)}{remedies([key for key in keys if key not in arrays], arrays)}"
        )
    for group in dict.fromkeys(entry.group for entry in layout.entries):
        wanted = [entry.key for entry in layout.entries if entry.group == group]
        missing = [key for key in wanted if key not in arrays]
        if missing and (not group or len(missing) < len(wanted)):
            together = f", which comes with {', '.join(wanted)}" if group else ""
            raise ValueError(
                f"missing key {', '.join(map(repr, missing))}{where}: layout {layout.name} needs "
                f"it{together}"
            )


def refuse_export(layout: Layout, params: MHAParams, semantics: Semantics) -> None:
    """Raises ValueError if the layout cannot hold parameters or behaviour; reads only shapes."""
    sizes = check(params, leading=len(np.shape(params.query.kernel)) - 3)
    refuse_sizes(layout, sizes, leaf_shapes(params))
    refuse_apart(layout, sizes)
    refuse_leaves(layout, leaves(params))
    refuse_semantics(layout, params, semantics, sizes)
