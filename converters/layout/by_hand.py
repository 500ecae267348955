"""Layouts of hand-written attention classes: linear layers under the usual attribute names."""

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
_GROUPED = {"h": ("H", "the head count splits queries alone, so values are as wide as queries")}
_PACKED = {
    "K": ("N", "query, key and value are packed with one head count"),
    "h": ("H", "query, key and value are packed with one head width"),
    "Dk": ("Dq", "one input is projected to query, key and value"),
    "Dv": ("Dq", "one input is projected to query, key and value"),
}


# Suffix of a layout name -> keys of its relative positions, which add terms to the logits. A
# conversion copies these arrays unchanged.
_TERMS = {
    "conformer": ("distance_embedding.weight", "pos_bias_u", "pos_bias_v", "linear_pos.weight"),
}


def _by_hand(style: str, names: tuple[str, ...], suffix: str) -> Layout:
    """A layout of linear layers with these names.

    Four names are query, key, value and output; of two, the first packs query, key and value.
    """
    separator, kernel, bias, turned, convention, about = _STYLES[style]
    if len(names) == 2:
        packed, out = names
        rows: list[tuple[str, str, str, tuple[str, ...]]] = [
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
    entries: list[Entry] = []
    for name, ins, outs, roles in rows:
        kernel_axes = [
            f"({x})" if " " in x else x for x in ((outs, ins) if turned else (ins, outs))
        ]
        leaves = tuple(f"{role}.kernel" for role in roles)
        entries.append(Entry(f"{name}{separator}{kernel}", " ".join(kernel_axes), leaves))
    for name, _, outs, roles in rows:
        axes = f"({outs})" if " " in outs else outs
        group = "out bias" if roles == ("out",) else "qkv bias"
        leaves = tuple(f"{role}.bias" for role in roles)
        entries.append(Entry(f"{name}{separator}{bias}", axes, leaves, group))
    return Layout(
        style.replace("dense-file", "dense")
        + f"-{suffix}" * bool(suffix)
        + "-file" * ("file" in style),
        tuple(entries),
        ties=_PACKED if len(names) == 2 else _GROUPED if suffix not in ("", "combine") else TIES,
        separator=separator,
        other_keys=_TERMS.get(suffix, ()),
        convention=convention,
        about=f"{'two' if len(names) == 2 else 'four'} {about} {', '.join(names)}",
    )


DENSE_FILE = _by_hand("dense-file", ("q_proj", "k_proj", "v_proj", "out_proj"), "")
BY_HAND = tuple(
    _by_hand(style, names, suffix)
    for style in _STYLES
    for suffix, names in (
        *NAMES.items(),
        ("qkv", ("qkv", "proj")),
        ("qkv-out", ("qkv", "out_proj")),
        ("qkv-projection", ("qkv", "projection")),  # BLIP
    )
    if (style, suffix) != ("linear", "qkv")  # the layout timm has these names
) + tuple(_by_hand("linear", names, suffix) for suffix, names in PUBLISHED.items())
# Name of a layout -> the layout of the same layers in a .weights.h5 file.
IN_FILE = {
    layout.name.removesuffix("-file"): layout
    for layout in (DENSE_FILE, *BY_HAND)
    if layout.name.endswith("-file")
}
