"""Layouts of published models whose attention has norms, sinks or gates next to the projections.

Most layouts add arrays of these parts to Llama's four projections.
"""

from dataclasses import replace

from jaxmha import Semantics
from jaxmha.converters.layout.base import Entry, Layout
from jaxmha.converters.layout.by_hand import BY_HAND, norms
from jaxmha.converters.layout.huggingface import NEOX, TIMM
from jaxmha.converters.layout.linear import LLAMA, LLAMA_ENTRIES, UNEVEN

_HOLDS = frozenset({"qk_norm_epsilon"})


_OF_HEAD = norms("q_norm", "k_norm", "H")
_OF_EACH = norms("q_norm", "k_norm", "N H")
_OF_ALL = norms("q_norm", "k_norm", "(N H)")
_SINKS = (Entry("sinks", "N", ("sinks",)),)
_GATE = (Entry("gate_proj.weight", "(N h) Dq", ("gate.kernel",)),)
_GATE_BIAS = (Entry("gate_bias", "N", ("gate_heads.bias",)),)
_GATE_OF_HEADS = (Entry("gate_proj.weight", "N Dq", ("gate_heads.kernel",)),)
_OFFSETS = (Entry("softmax_offset", "N", ("sinks",)),)
_RMS = Semantics(qk_norm="rms")
_LAYER = Semantics(qk_norm="layer", qk_norm_epsilon=1e-5)
_ALL_HEADS = Semantics(qk_norm="rms", qk_norm_scope="heads")
_PLAIN = Semantics()
# Layout -> entries in addition to Llama's, semantics if there is no config, and description.
_MEANING: dict[str, tuple[tuple[Entry, ...], Semantics, str]] = {
    "llama-norm-heads": (
        _OF_ALL,
        _ALL_HEADS,
        "OLMo 2 and 3, OLMoE, MiniMax-M2: norms of all heads",
    ),
    "llama-norm": (_OF_HEAD, _RMS, "Qwen3, Gemma 3: a norm of each head of queries and keys"),
    "llama-norm-each": (_OF_EACH, _LAYER, "Cohere, Chameleon: norms with a scale for every head"),
    "llama-sinks": (_SINKS, _PLAIN, "gpt-oss: sinks, a logit per head in every softmax"),
    "llama-norm-sinks": (_OF_HEAD + _OFFSETS, _RMS, "Flint: norms, and sinks in softmax_offset"),
    "llama-gate": (_GATE, _PLAIN, "Muse: a gate for every feature"),
    "llama-norm-gate": (_OF_HEAD + _GATE, _RMS, "AFMoE: norms, and a gate for every feature"),
    "llama-norm-gate-bias": (
        _OF_HEAD + _GATE + _GATE_BIAS,
        _RMS,
        "Beam: norms, and a gate for every feature with a bias for every head",
    ),
    "llama-norm-gate-heads": (_OF_HEAD + _GATE_OF_HEADS, _RMS, "LFM3: norms, and a gate per head"),
}


def _meaning(name: str, more: tuple[Entry, ...], semantics: Semantics, about: str) -> Layout:
    ties = {letter: tie for letter, tie in LLAMA.ties.items() if letter != "h"}
    return Layout(
        name,
        (*LLAMA_ENTRIES, *more),
        ties=ties if semantics.qk_norm is None else LLAMA.ties,
        semantics=semantics,
        holds=_HOLDS if semantics.qk_norm is not None else frozenset(),
        other_keys=LLAMA.other_keys,
        about=f"{about} (rotary embedding apart)",
    )


# One linear layer computes the query and the gate of every head.
_QUERY_AND_GATE = {
    "q_proj.weight": Entry("q_proj.weight", "(N qg H) Dq", ("query.kernel", "gate.kernel")),
    "q_proj.bias": Entry("q_proj.bias", "(N qg H)", ("query.bias", "gate.bias"), "qkv bias"),
}
QWEN3_NEXT = Layout(
    "qwen3-next",
    (*(_QUERY_AND_GATE.get(entry.key, entry) for entry in LLAMA_ENTRIES), *_OF_HEAD),
    ties=LLAMA.ties,
    semantics=Semantics(qk_norm="rms", qk_norm_offset=1.0),
    holds=_HOLDS,
    other_keys=LLAMA.other_keys,
    about="Qwen3-Next and 3.5: norms with an offset of 1, a gate in the rows of every query head",
)
_RENAMED = {
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "o_proj": "out_proj",
}


def _renamed(layout: Layout, name: str, names: dict[str, str], about: str) -> Layout:
    entries = []
    for entry in layout.entries:
        module, _, array = entry.key.partition(".")
        entries.append(entry._replace(key=f"{names.get(module, module)}.{array}"))
    return replace(layout, name=name, entries=tuple(entries), about=about)


LLAMA_MEANING = tuple(_meaning(name, *row) for name, row in _MEANING.items())
LFM = _renamed(
    next(layout for layout in LLAMA_MEANING if layout.name == "llama-norm"),
    "lfm",
    _RENAMED,
    "LFM2: a norm of each head, q_layernorm and k_layernorm (rotary embedding apart)",
)
_PERSIMMON = (
    *NEOX.entries,
    *norms("q_layernorm", "k_layernorm", "H"),
)
PERSIMMON = Layout(
    "persimmon",
    _PERSIMMON,
    ties=NEOX.ties,
    semantics=_LAYER,
    holds=_HOLDS | NEOX.holds,
    other_keys=("rotary_emb.inv_freq",),
    about="Persimmon: packed head by head, with layer norms of each head (rotary embedding apart)",
)
_SAPIENS = _renamed(
    next(layout for layout in LLAMA_MEANING if layout.name == "llama-norm"),
    "sapiens",
    {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "proj"},
    "Sapiens 2: a norm of each head, and LayerScale after the block (rotary embedding apart)",
)
SAPIENS = replace(_SAPIENS, other_keys=("gamma.weight",))
COSMOS = _renamed(
    next(layout for layout in LLAMA_MEANING if layout.name == "llama-norm"),
    "cosmos",
    {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "o_proj": "to_out",
     "q_norm": "norm_q", "k_norm": "norm_k"},
    "Cosmos 3: a norm of each head, norm_q and norm_k (rotary embedding apart)",
)  # fmt: skip
TIMM_NORM = Layout(
    "timm-norm",
    (*TIMM.entries, *_OF_HEAD),
    ties=TIMM.ties,
    semantics=_RMS,
    holds=_HOLDS | TIMM.holds,
    about="GLM-OCR, vision transformers of timm with norms of each head (rotary embedding apart)",
)
_GROUPED = next(layout for layout in UNEVEN if layout.name == "timm-grouped")
LITGPT = tuple(
    replace(
        _GROUPED,
        name=name,
        entries=(*_GROUPED.entries, *norms("norm_q", "norm_k", axes)),
        semantics=semantics,
        holds=_HOLDS,
        about=f"litgpt: queries, keys and values in one array, {about} (rotary embedding apart)",
    )
    for name, axes, semantics, about in (
        ("litgpt-norm-heads", "(N H)", _ALL_HEADS, "norms of all heads"),
        ("litgpt-norm", "H", _RMS, "a norm of each head"),
    )
)
_MOLMO = next(layout for layout in UNEVEN if layout.name == "molmo")
MOLMO = tuple(
    replace(
        _MOLMO,
        name=name,
        entries=(*_MOLMO.entries, *norms("q_norm", "k_norm", axes)),
        semantics=semantics,
        holds=_HOLDS,
        about=f"Molmo 2: all queries, then all keys, then all values, {about} (rotary embedding apart)",
    )
    for name, axes, semantics, about in (
        ("molmo-norm-heads", "(N H)", _ALL_HEADS, "norms of all heads"),
        ("molmo-norm", "H", _RMS, "a norm of each head"),
    )
)
_W_QKV = next(layout for layout in BY_HAND if layout.name == "linear-w-qkv")
W_QKV_NORM = replace(
    _W_QKV,
    name="linear-w-qkv-norm",
    entries=(*_W_QKV.entries, *_OF_HEAD),
    semantics=_LAYER,
    holds=_HOLDS,
    about="Nemotron 3.5: w_qkv and out_proj, layer norms of each head (rotary embedding apart)",
)
LAYOUTS = (
    *LLAMA_MEANING,
    QWEN3_NEXT,
    LFM,
    PERSIMMON,
    SAPIENS,
    COSMOS,
    TIMM_NORM,
    *LITGPT,
    *MOLMO,
    W_QKV_NORM,
)
# Layout -> the clause after "no tensor tells how" in its error. Other layouts get "q_norm and
# k_norm normalise".
OPEN = {
    **dict.fromkeys(("lfm", "persimmon"), "q_layernorm and k_layernorm normalise"),
    **dict.fromkeys(("cosmos", "litgpt-norm-heads", "litgpt-norm"), "norm_q and norm_k normalise"),
    "sapiens": "q_norm and k_norm normalise",
    "llama-gate": "gate_proj acts, or what is computed next to it",
}
# Layouts whose tensors do not determine the function of their norms and gates: reading them
# requires a configuration.
ASKING = tuple(layout.name for layout in LAYOUTS if layout.name != "llama-sinks")
