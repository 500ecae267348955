"""How frameworks differ from jaxmha at each node of attention, as tables.

Mask polarity, outputs for fully masked rows, softmax dtypes and parameter arrays come from the
tables of the converters; the other facts are in this module. They were measured on CPU with torch
2.13, keras 3.15 on JAX and TensorFlow, flax 0.12 and jax 0.10.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from jaxmha import MHAParams, Semantics
from jaxmha.converters import flax, keras, torch
from jaxmha.converters.layout.base import Entry, Layout
from jaxmha.converters.layout.uneven import PACKED
from jaxmha.converters.layout.validation import refuse_export
from jaxmha.converters.masks import flax as flax_masks
from jaxmha.converters.masks import jax as jax_masks
from jaxmha.converters.masks import keras as keras_masks
from jaxmha.converters.masks import torch as torch_masks
from jaxmha.converters.masks.spec import MaskArg
from jaxmha.dims import parse
from jaxmha.params import CANONICAL, leaves
from jaxmha.semantics import PATHS
from jaxmha.static_checks import one_of


class Difference(NamedTuple):
    """How one framework differs from jaxmha."""

    framework: str
    what: str


class Framework(NamedTuple):
    """Tables of the converters for one framework.

    Attributes:
      layouts: layouts of the framework's layers, the usual one first; empty for a function of
        projected heads.
      masks: the mask arguments that exclude query-key pairs.
      paths: key of `jaxmha.semantics.PATHS` for the framework's code paths.
    """

    layouts: tuple[Layout, ...]
    masks: tuple[MaskArg, ...]
    paths: str


_KERAS = Framework((keras.VARIABLES, keras.GROUPED), keras_masks.ARGUMENTS[:1], "keras")
FRAMEWORKS: dict[str, Framework] = {
    "torch": Framework(torch.LAYOUTS, torch_masks.ARGUMENTS, "torch"),
    "keras": _KERAS,
    "tensorflow": _KERAS,
    "flax-linen": Framework(
        (replace(flax.LINEN, ties={**flax.LINEN.ties, **flax.LINEN_TIES}),),
        flax_masks.ARGUMENTS[:1],
        "flax",
    ),
    "flax-nnx": Framework(
        (replace(flax.LINEN, ties={**flax.LINEN.ties, **flax.NNX_TIES}),),
        flax_masks.ARGUMENTS[:1],
        "flax",
    ),
    "jax": Framework((), jax_masks.ARGUMENTS[1:2], "jax"),
}
_NONE = dict.fromkeys(FRAMEWORKS, "has no such option")
_SCORES = "with dropout or scores"  # Keras' path without fused attention

# Node -> framework -> difference. keras is Keras on JAX, tensorflow is Keras on TensorFlow.
FACTS: dict[str, dict[str, str]] = {
    "query": {
        "torch": "(T, B, Dq) unless batch_first=True; the wrong layout raises nothing",
        "keras": "called as (query, value, key); another order raises nothing",
        "tensorflow": "called as (query, value, key); another order raises nothing",
        "jax": "takes projected heads (B, T, N, H)",
    },
    "key": {"flax-nnx": "one width of keys and values, in_kv_features: Dk = Dv"},
    "query_heads": {
        "torch": "one packed product where query, key and value are one tensor; H = Dq / N always",
        "keras": "key_dim is H, not N * H",
        "tensorflow": "key_dim is H, not N * H",
        "flax-linen": "H = qkv_features / N",
        "flax-nnx": "H = qkv_features / N",
        "jax": "left to the caller",
    },
    "key_heads": {"jax": "left to the caller"},
    "value_heads": {
        "torch": "h = H always: vdim is the width of the input",
        "flax-linen": "h = H always",
        "flax-nnx": "h = H always",
        "jax": "left to the caller",
    },
    "query_normed": {
        "torch": "has no such option",
        "keras": "has no such option",
        "tensorflow": "has no such option",
        "jax": "left to the caller",
    },
    "key_extended": {name: what for name, what in _NONE.items() if name != "torch"}
    | {
        "torch": "is_causal=True with need_weights=False hides the extra positions from earlier rows"
    },
    "scaled_query": {
        "torch": "need_weights=False scales inside scaled_dot_product_attention",
        "keras": f"the logits are scaled instead; {_SCORES} the queries, in the compute dtype",
        "tensorflow": f"the logits are scaled instead; {_SCORES} the queries, in the compute dtype",
        "flax-linen": "divides by √H, in the compute dtype",
        "flax-nnx": "the logits are scaled instead; with dropout or sow_weights as linen",
        "jax": "the logits are scaled instead",
    },
    "logits": {
        "torch": "need_weights=True: in the input dtype",
        "keras": f"{_SCORES}: in the compute dtype",
        "tensorflow": "in the compute dtype, and only then scaled: float16 overflows at 65504",
        "flax-linen": "in the compute dtype",
        "flax-nnx": "with dropout or sow_weights: in the compute dtype",
    },
    "capped_logits": _NONE,
    "masked_logits": {
        "torch": "-inf; is_causal is a hint in addition to attn_mask, which need_weights=False replaces by "
        "the top-left triangle",
        "keras": f"about -2.4e38; {_SCORES} -1e9, in float16 -3e4",
        "tensorflow": f"about -2.4e38; {_SCORES} -1e9, in float16 -3e4",
        "flax-linen": "the lowest finite number of the compute dtype",
        "flax-nnx": "about -2.4e38; with dropout or sow_weights as linen",
        "jax": "about -2.4e38",
    },
    "kept_weights": {
        "torch": "returned weights are these, not those before",
        "keras": "a rate above 0 takes the path with scores, at inference too",
        "tensorflow": "a rate above 0 takes the path with scores, at inference too",
        "flax-linen": "one draw for all batch rows and heads unless broadcast_dropout=False",
        "flax-nnx": "one draw for all batch rows and heads unless broadcast_dropout=False",
        "jax": "has no such option",
    },
    "context": {
        "torch": "need_weights=True: in the input dtype",
        "keras": "weights are rounded to the compute dtype first",
        "tensorflow": "in the compute dtype",
        "flax-linen": "in the compute dtype",
        "flax-nnx": "weights are rounded to the compute dtype first",
        "jax": "weights are rounded to the dtype of the keys first",
    },
    "out": {
        "torch": "out_proj is square: Do = Dq",
        "keras": "Do = Dq unless output_shape says otherwise",
        "tensorflow": "Do = Dq unless output_shape says otherwise",
        "jax": "left to the caller",
    },
}
_FULLY_MASKED = {"nan": "NaN", "zero": "0", "mean": "the mean of all values"}
_OTHER = {
    "nonzero": "other dtypes: nonzero = True, so that an additive mask is inverted",
    "added": "floats are added",
    "refused": "other dtypes are refused",
}
# Framework -> code path -> how users select it.
_PATHS = {
    "torch": {"weights": "need_weights=True", "sdpa": "need_weights=False", "native": "fast path"},
    "keras": {"fused": "fused", "scores": _SCORES},
    "flax-linen": {"weights": ""},
    "flax-nnx": {"weights": "with dropout or sow_weights", "fused": "fused"},
    "jax": {"fused": ""},
}
_RETURNED = {
    "torch": "returned averaged over heads unless average_attn_weights=False",
    "keras": "returned per head by return_attention_scores",
    "tensorflow": "returned per head by return_attention_scores",
    "flax-linen": "sown per head by sow_weights",
    "flax-nnx": "sown per head by sow_weights",
    "jax": "not returned",
}


def differences(node: str, framework: str | None = None) -> tuple[Difference, ...]:
    """The differences of one framework, or of all, at a node.

    Raises:
      ValueError: an unknown framework.

    >>> differences("out", "torch")
    (Difference(framework='torch', what='out_proj is square: Do = Dq'),)
    """
    one_of("framework", framework, (None, *FRAMEWORKS))
    found = []
    for name in FRAMEWORKS if framework is None else (framework,):
        parts = [FACTS.get(node, {}).get(name, "")]
        if node == "mask":
            parts = [_polarity(argument) for argument in FRAMEWORKS[name].masks]
        if node == "weights":
            parts = [*_softmax(name), _RETURNED[name]]
        found += [Difference(name, part) for part in ["; ".join(filter(None, parts))] if part]
    return tuple(found)


def _polarity(argument: MaskArg) -> str:
    means = "attend" if argument.keep else "BLOCKED"
    return f"{argument.name}: True = {means}, {_OTHER[argument.other]}"


def _softmax(framework: str) -> list[str]:
    """Describes softmax dtype and output for fully masked rows, for each code path."""
    known = PATHS[FRAMEWORKS[framework].paths]
    shown = _PATHS["keras" if framework == "tensorflow" else framework]
    dtypes = {"input": "in the input dtype", "float32": "in float32 always", None: ""}
    lines = []
    for path, label in shown.items():
        empty = f"a row with nothing left is {_FULLY_MASKED[known[path].fully_masked]}"
        text = ", ".join(filter(None, (dtypes[known[path].softmax], empty)))
        lines.append(f"{label}: {text}" if label else text)
    return lines


Arrays = dict[str, tuple[tuple[str, str, tuple[int, ...]], ...]]


def stored(
    framework: str | None, params: MHAParams, semantics: Semantics, sizes: Mapping[str, int]
) -> tuple[Arrays, str | None]:
    """Maps each leaf of the parameters to the framework's arrays (name, axes, shape).

    Also returns the reason if no layer of the framework can hold the parameters. In that case, and
    for framework None, the arrays are the leaves themselves.

    Raises:
      ValueError: an unknown framework.
    """
    one_of("framework", framework, (None, *FRAMEWORKS))
    arrays = leaves(params)
    own: Arrays = {n: ((n, CANONICAL[n], tuple(x.shape)),) for n, x in arrays.items()}
    layouts = FRAMEWORKS[framework].layouts if framework is not None else ()
    reasons = []
    for layout in layouts:
        try:
            refuse_export(layout, params, semantics)
        except ValueError as error:
            reasons.append(str(error))
            continue
        entries = [entry for entry in layout.entries if entry.leaves[0] in arrays]
        found = {
            leaf: (entry.key, entry.axes, _shape(entry, sizes))
            for entry in entries
            for leaf in entry.leaves
        }
        return {leaf: (array,) for leaf, array in found.items()}, None
    return own, reasons[0] if reasons else None


def _shape(entry: Entry, sizes: Mapping[str, int]) -> tuple[int, ...]:
    known = {**sizes, **dict.fromkeys(PACKED, len(entry.leaves))}
    groups = parse(entry.axes)
    return tuple(math.prod(int(a) if a.isdigit() else known[a] for a in group) for group in groups)
