"""What a layout cannot hold, and why: every check of an import or export before it is done."""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from jaxmha import MHAParams, Semantics
from jaxmha.converters.layout import Layout
from jaxmha.params import leaves


def refuse_sizes(layout: Layout, sizes: Mapping[str, int], exporting: bool = False) -> None:
    """Raises ValueError for sizes that the layout ties together, and says why it does."""
    for letter, (tied, reason) in layout.ties.items():
        if letter not in sizes or not all(a in sizes for a in tied.split()):
            continue
        product = int(np.prod([sizes[a] for a in tied.split()]))
        if sizes[letter] != product:
            shown = " * ".join(f"{a}={sizes[a]}" for a in tied.split())
            raise ValueError(
                f"layout {layout.name} cannot hold {letter}={sizes[letter]} with {shown}: {reason}"
            )
    letters, reason = layout.apart
    if exporting and letters and len({sizes[a] for a in letters.split()}) == 1:
        shown = " = ".join(letters.split())
        raise ValueError(f"layout {layout.name} does not hold {shown}: {reason}")


def one_dtype(params: MHAParams) -> None:
    """Raises ValueError for leaves of several dtypes, which one live layer would round."""
    found = {str(np.asarray(array).dtype): name for name, array in leaves(params).items()}
    if len(found) > 1:
        shown = ", ".join(f"{name} is {dtype}" for dtype, name in found.items())
        raise ValueError(f"a live layer holds arrays of one dtype: {shown}; cast them first")


def refuse_leaves(layout: Layout, present: Mapping[str, Any]) -> None:
    """Raises ValueError for leaves that the layout has no place for, lacks, or needs together."""
    known = {leaf for entry in layout.entries for leaf in entry.leaves}
    if extra := [leaf for leaf in present if leaf not in known]:
        raise ValueError(
            f"layout {layout.name} cannot hold {', '.join(extra)}: it has no such parameter"
        )
    for group in dict.fromkeys(entry.group for entry in layout.entries):
        wanted = [leaf for e in layout.entries if e.group == group for leaf in e.leaves]
        missing = [leaf for leaf in wanted if leaf not in present]
        if missing and not group:
            raise ValueError(f"layout {layout.name} needs {', '.join(missing)}, which is not there")
        if missing and len(missing) < len(wanted):
            there = [leaf for leaf in wanted if leaf in present]
            raise ValueError(
                f"layout {layout.name} holds {', '.join(wanted)} together or not at all; "
                f"there: {', '.join(there)}; missing: {', '.join(missing)} (a bias of zeros "
                "changes nothing)"
            )


# Fields that say how to evaluate, not which function it is.
_EVALUATION = {"fully_masked", "softmax_dtype", "precision"}


def refuse_semantics(
    layout: Layout, params: MHAParams, semantics: Semantics, sizes: Mapping[str, int]
) -> None:
    """Raises ValueError for behaviour that the layer has no setting for."""
    ignored = {*_EVALUATION, *layout.holds}
    if semantics.dropout_rate == 0:
        ignored |= {"dropout_broadcast"}
    if params.query_norm is None and semantics.qk_norm is None:
        ignored |= {"qk_norm", "qk_norm_epsilon"}
    default = sizes["H"] ** -0.5
    for field in fields(Semantics):
        ours, theirs = getattr(semantics, field.name), getattr(layout.semantics, field.name)
        if field.name == "scale":
            ours, theirs = (default if s is None else s for s in (ours, theirs))
        # 1 / math.sqrt(H) and H**-0.5 may differ in their last bit.
        equal = ours == theirs or (
            field.name == "scale" and math.isclose(ours, theirs, rel_tol=1e-12)
        )
        if field.name not in ignored and not equal:
            raise ValueError(
                f"layout {layout.name} cannot hold semantics.{field.name}={ours!r}: its layer "
                f"always has {theirs!r}"
            )


# Learned arrays beside attention that change its function, and what to do with them.
_ADDED = {
    "relative_attention_bias.weight": "take the key out, look the bias of every distance up in it "
    "and give it to multi_head_attention(bias=) of every layer (a whole file is converted with the "
    "array carried over under its own name)",
}


def refuse_added(layout: Layout, arrays: Mapping[str, Any], prefix: str) -> None:
    """Raises ValueError for arrays beside attention without which it is another function."""
    for key, remedy in _ADDED.items():
        if key in arrays and key in layout.beside:
            raise ValueError(
                f"{layout.path(prefix, key)} adds to the logits, and MHAParams has no place for "
                f"it: {remedy}"
            )


def refuse_keys(layout: Layout, arrays: Mapping[str, Any], prefix: str) -> None:
    """Raises ValueError for keys that are unknown, missing, or need others."""
    keys = [entry.key for entry in layout.entries]
    where = f" under prefix {prefix!r}" if prefix else ""
    if unknown := [key for key in arrays if key not in keys]:
        raise ValueError(
            f"unknown key {', '.join(map(repr, unknown))}{where}: layout {layout.name} has "
            f"{', '.join(keys)}"
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
