"""Layouts of hand-written attention classes: linear layers under the usual attribute names."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxmha import Semantics
from jaxmha.converters.layout.base import Entry, Layout

_MERGED = "its heads are one axis of the kernels, split evenly"
TIES = {"K": ("N", _MERGED), "h": ("H", _MERGED)}
# Attribute names that hand-written classes give their four layers, other than `q_proj` etc.
NAMES: dict[str, tuple[str, str, str, str]] = {
    "wo": ("wq", "wk", "wv", "wo"),
    "tutorial": ("wq", "wk", "wv", "dense"),
    "query": ("query", "key", "value", "dense"),
    "combine": ("query_dense", "key_dense", "value_dense", "combine_heads"),
    "to": ("to_q", "to_k", "to_v", "to_out"),
    "upper": ("W_q", "W_k", "W_v", "W_o"),
}
# Attribute names of published torch classes.
PUBLISHED: dict[str, tuple[str, ...]] = {
    "dense": ("q_proj", "k_proj", "v_proj", "dense"),  # Phi
    "lin": ("q_lin", "k_lin", "v_lin", "out_lin"),  # DistilBERT, XLM
    "projection": ("q_proj", "k_proj", "v_proj", "projection_layer"),  # InternVL
    "proj": ("q_proj", "k_proj", "v_proj", "proj"),
    "packed-out": ("Wqkv", "out_proj"),  # MPT
    "packed": ("Wqkv", "Wo"),  # ModernBERT
    "packed-proj": ("qkv_proj", "proj"),
    "query-proj": ("query", "key", "value", "proj"),  # PVT v2, V-JEPA 2
    "projected": ("query_proj", "key_proj", "value_proj", "out_proj"),  # ProphetNet
    "project": ("project_q", "project_k", "project_v", "attention_out"),  # CPM-Ant
    "net": ("query_net", "key_net", "value_net", "out_projection"),  # Cohere ASR
    "to-out-proj": ("to_q", "to_k", "to_v", "out_proj"),  # Cosmos 3
    "ctrl": ("Wq", "Wk", "Wv", "dense"),
    "q-wo": ("q_proj", "k_proj", "v_proj", "Wo"),  # ModernBERT decoder
    "moshi": ("q_proj.linear", "k_proj.linear", "v_proj.linear", "o_proj.linear"),
    "conformer": ("linear_q", "linear_k", "linear_v", "linear_out"),  # wav2vec 2 conformer
    "wq-proj": ("wq", "wk", "wv", "proj"),  # Sapiens 2
    "q-proj": ("q", "k", "v", "proj"),  # Qwen2.5-Omni
    "bark": ("att_proj", "out_proj"),
    "w-qkv": ("w_qkv", "out_proj"),  # Nemotron
    "wqkv-wo": ("wqkv", "wo"),  # Kimi
    "in-proj": ("in_proj", "o_proj"),  # Phonon
}
# Style -> separator, key of a kernel, key of a bias, True if kernels are (out, in), the convention
# of other layers, and the class.
_STYLES = {
    "linear": (".", "weight", "bias", True, "torch", "torch.nn.Linear"),
    "conv1d": (".", "weight", "bias", True, "torch", "torch.nn.Conv1d of one position"),
    "conv": (".", "weight", "bias", True, "torch", "torch.nn.Conv2d of one position"),
    "dense": ("/", "kernel", "bias", False, "flax", "Keras or Flax Dense"),
    "dense-file": (
        "/",
        "vars/0",
        "vars/1",
        False,
        "keras-file",
        "Keras Dense, keys as in a .weights.h5 file,",
    ),
}
# Start of a layout name -> axes of size 1 at the end of a kernel.
KERNELS = {"linear:": "", "conv1d:": " 1", "conv:": " 1 1"}
_GROUPED = {"h": ("H", "the head count splits queries alone, so values are as wide as queries")}
_PACKED = {
    "K": ("N", "query, key and value are packed with one head count"),
    "h": ("H", "query, key and value are packed with one head width"),
    "Dk": ("Dq", "one input is projected to query, key and value"),
    "Dv": ("Dq", "one input is projected to query, key and value"),
}


_QUERY_KEY = {"K": _PACKED["K"], "h": _PACKED["h"], "Dk": _PACKED["Dk"]}
_KEY_VALUE = {"h": _PACKED["h"], "Dv": ("Dk", "one input is projected to key and value")}
NAMED = "names"  # suffix of layouts whose layer names are read from a file
_OF_ALL = "(heads)"  # end of a layout name: one norm covers all heads
_NUMBERS = {2: "two", 3: "three", 4: "four"}
# Suffix of a layout name -> keys of its relative positions, which add terms to the logits. A
# conversion copies these arrays unchanged.
_TERMS = {
    "conformer": (
        "distance_embedding.weight", "pos_bias_u", "pos_bias_v", "linear_pos.weight",
        "rel_pos_emb.weight",
    ),
}  # fmt: skip


def _by_hand(style: str, names: tuple[str, ...], suffix: str) -> Layout:
    """A layout of linear layers with these names.

    Four names are query, key, value and output. Of three names, the second packs key and value, or
    the first query and key (`_packs_queries`); of two, the first packs query, key and value.
    """
    separator, kernel, bias, turned, convention, about = _STYLES[style]
    if len(names) == 3:
        both = _packs_queries(names)
        rows: list[tuple[str, str, str, tuple[str, ...]]] = [
            (names[0], "Dq", "qk N H", ("query", "key")) if both
            else (names[0], "Dq", "N H", ("query",)),
            (names[1], "Dv", "N h", ("value",)) if both
            else (names[1], "Dk", "kv K H", ("key", "value")),
            (names[2], "N H", "Do", ("out",)),
        ]  # fmt: skip
    elif len(names) == 2:
        packed, out = names
        rows = [
            (packed, "Dq", "qkv N H", ("query", "key", "value")),
            (out, "N h", "Do", ("out",)),
        ]
    else:
        rows = [
            (names[0], "Dq", "N H", ("query",)),
            (names[1], "Dk", "N H" if suffix in ("", "combine") else "K H", ("key",)),
            (names[2], "Dv", "N h" if suffix in ("", "combine") else "K h", ("value",)),
            (names[3], "N h", "Do", ("out",)),
        ]
    around = next((x for start, x in KERNELS.items() if style == start.removesuffix(":")), "")
    entries: list[Entry] = []
    for name, ins, outs, roles in rows:
        kernel_axes = [
            f"({x})" if " " in x else x for x in ((outs, ins) if turned else (ins, outs))
        ]
        leaves = tuple(f"{role}.kernel" for role in roles)
        entries.append(Entry(f"{name}{separator}{kernel}", " ".join(kernel_axes) + around, leaves))
    for name, _, outs, roles in rows:
        axes = f"({outs})" if " " in outs else outs
        group = "out bias" if roles == ("out",) else "qkv bias"
        if suffix == NAMED:  # each layer may lack its bias
            group = f"{roles[0]} bias"
        leaves = tuple(f"{role}.bias" for role in roles)
        entries.append(Entry(f"{name}{separator}{bias}", axes, leaves, group))
    return Layout(
        style.replace("dense-file", "dense")
        + f"-{suffix}" * bool(suffix)
        + "-file" * ("file" in style),
        tuple(entries),
        ties=_ties(names, suffix),
        separator=separator,
        other_keys=_TERMS.get(suffix, ()),
        convention=convention,
        about=f"{_NUMBERS[len(names)]} {about} {', '.join(names)}",
    )


def _packs_queries(names: Sequence[str]) -> bool:
    """True if the first of three layers packs queries and keys, as in TNT."""
    return len(names) == 3 and "qk" in names[0].rpartition(".")[2].replace("query_key", "qk")


def _ties(names: Sequence[str], suffix: str) -> Mapping[str, tuple[str, str]]:
    if len(names) == 2:
        return _PACKED
    if len(names) == 3:
        return _QUERY_KEY if _packs_queries(names) else _KEY_VALUE
    return _GROUPED if suffix not in ("", "combine") else TIES


DENSE_FILE = _by_hand("dense-file", ("q_proj", "k_proj", "v_proj", "out_proj"), "")
BY_HAND = tuple(
    _by_hand(style, names, suffix)
    for style in ("linear", "dense", "dense-file")
    for suffix, names in (
        *NAMES.items(),
        ("qkv", ("qkv", "proj")),
        ("qkv-out", ("qkv", "out_proj")),
        ("qkv-projection", ("qkv", "projection")),  # BLIP
    )
    if (style, suffix) != ("linear", "qkv")  # layout `timm` has these keys
) + tuple(_by_hand("linear", names, suffix) for suffix, names in PUBLISHED.items())
X_TRANSFORMERS = replace(
    _by_hand("linear", NAMES["to"], "to"),
    name="x-transformers",
    cyclic=True,
    about="x-transformers with grouped queries: query head n attends key head n modulo K",
)
# Name of a layout -> the layout of the same layers in a .weights.h5 file.
IN_FILE = {
    layout.name.removesuffix("-file"): layout
    for layout in (DENSE_FILE, *BY_HAND)
    if layout.name.endswith("-file")
}


def norms(query: str, key: str, axes: str) -> tuple[Entry, ...]:
    """Entries for the scales and biases of the query norm and the key norm.

    `axes` are the axes of a query scale: `H`, or with an element for every head `N H` or `(N H)`.
    """
    form = "" if axes == "H" else "_heads"
    of_key = axes.replace("N", "K")
    return (
        Entry(f"{query}.weight", axes, (f"query_norm{form}",)),
        Entry(f"{key}.weight", of_key, (f"key_norm{form}",)),
        Entry(f"{query}.bias", axes, (f"query_norm_bias{form}",), "norm bias"),
        Entry(f"{key}.bias", of_key, (f"key_norm_bias{form}",), "norm bias"),
    )


def of_names(name: str) -> Layout | None:
    """The layout of the torch layers that `name` lists; None for any other name.

    `+` and the names of two norms may follow the layers, and then `(heads)` if each norm covers all
    heads.

    >>> of_names("linear:to_q,to_kv,to_out.0").about
    'three torch.nn.Linear to_q, to_kv, to_out.0'
    >>> of_names("conv:qkv,proj").entries[0].axes
    '(qkv N H) Dq 1 1'
    """
    start = next((start for start in KERNELS if name.startswith(start)), None)
    if start is None:
        return None
    listed, _, of_norms = name.removeprefix(start).partition("+")
    parts, pair = tuple(listed.split(",")), of_norms.removesuffix(_OF_ALL).split(",")
    every = (*parts, *pair) if of_norms else parts
    if len(parts) not in _NUMBERS or len({*every}) < len(every) or (of_norms and len(pair) != 2):
        return None
    if not all(re.fullmatch(r"\w+(\.\w+)*", part) for part in every):
        return None
    made = replace(_by_hand(start.removesuffix(":"), parts, NAMED), name=name)
    if not of_norms:
        return made
    whole = of_norms.endswith(_OF_ALL)
    return replace(
        made,
        entries=(*made.entries, *norms(pair[0], pair[1], "(N H)" if whole else "H")),
        semantics=Semantics(qk_norm="rms", qk_norm_scope="heads" if whole else "head"),
        holds=frozenset({"qk_norm_epsilon"}),
        about=f"{made.about}, with norms {' and '.join(pair)}",
    )
