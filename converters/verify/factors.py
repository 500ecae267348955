"""Finds the factors in which two layers differ, and computes mixtures of both layers.

A layer is represented as a flat dict of values, and a factor is a set of names in that dict. Taking
the values of these names from b, and all others from a, changes only this factor of a.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from jaxmha import Mask, MHAParams, Semantics
from jaxmha.converters.layout.arrays import NDArray, narrower, to_numpy
from jaxmha.converters.masks import compare
from jaxmha.converters.masks.compose import array_of
from jaxmha.converters.verify import diagnosis, oracle
from jaxmha.converters.verify.captured_layer import Blocked, Inputs, Layer
from jaxmha.mask_arguments import with_window
from jaxmha.params import CANONICAL, NORMS, check, from_leaves, leaves
from jaxmha.semantics import NORM_FIELDS, logit_scale

Values = dict[str, Any]

# Name of a part of a mask that is compared on its own -> its fields of `Mask`.
MASKS = {
    "mask.causal": ("causal_offset",),
    "mask.window": ("window_size",),
    "mask.padding": ("query_lengths", "key_value_lengths", "query_padding", "key_value_padding"),
    "mask.segments": ("query_segments", "key_value_segments", "packed_ends"),
    "mask.array": ("array",),
}
_TITLES = {"mask.window": "window", "mask.segments": "segments"}
_MERGED = {
    "query.kernel": ("N", -1), "key.kernel": ("K", -1), "value.kernel": ("K", -1),
    "query.bias": ("N", -1), "key.bias": ("K", -1), "value.bias": ("K", -1),
    "bias_k": ("K", -1), "bias_v": ("K", -1),
}  # fmt: skip


class Factor(NamedTuple):
    """A difference of two layers: its name, a description, and the names in `Values` to swap."""

    name: str
    sentence: str
    values: tuple[str, ...]


def values_of(layer: Layer, inputs: Inputs) -> Values:
    """Returns every value that determines the output; weights are float64 with merged head axes."""
    sizes = check(layer.params)
    query, key, _ = inputs
    T, S = query.shape[1], key.shape[1]
    here = {"B": len(query), "N": sizes["N"], "T": T, "S": S}
    mask, bias, blocked = layer.conditions(here)
    mask = with_window(mask, layer.semantics)
    if bias is not None:
        bias = np.broadcast_to(bias, (*bias.shape[:3], S))
    values: Values = {"heads": (sizes["N"], sizes["K"])}
    for name, leaf in leaves(layer.params).items():
        values[name] = _merged(name, to_numpy(leaf).astype(np.float64))
    for name, fields in MASKS.items():
        own = {field: getattr(mask, field) for field in fields}
        values[name] = array_of(Mask(**own), T, S)
    semantics, wide = layer.semantics, _at_least_float32(layer.dtype)
    softmax = semantics.softmax_dtype
    more: Values = {
        "scale": semantics.scale,
        "soft cap": semantics.logits_soft_cap,
        "norm": tuple(getattr(semantics, name) for name in NORM_FIELDS),
        "clip": semantics.clip_qkv,
        "zero position": semantics.add_zero_attn,
        "bias": bias,
        "blocked": blocked,
        "empty": blocked.constant if blocked.added else semantics.fully_masked,
        "softmax": softmax if softmax is not None and narrower(wide, softmax) != wide else None,
        "sum": wide if softmax is None else np.dtype(softmax),
    }
    return values | more


def find(a: Layer, b: Layer, inputs: Inputs) -> tuple[Values, Values, list[Factor]]:
    """Returns the values of both layers, and every factor in which they differ.

    Raises:
      ValueError: the widths of inputs or outputs differ, so that no factor can be swapped.
    """
    check_widths(a.params, b.params)
    sizes = check(a.params), check(b.params)
    if sizes[0]["K"] != sizes[1]["K"]:  # repeated key/value heads give the same output
        a, b = (replace(x, params=_ungrouped(x.params)) for x in (a, b))
    x, y = values_of(a, inputs), values_of(b, inputs)
    found = [*_weights(a, b, x, y), *_masks(x, y), *_behaviour(a, b, x, y)]
    return x, y, found


def check_widths(a: MHAParams, b: MHAParams) -> None:
    """Raises ValueError if inputs or outputs of the two layers differ in width."""
    sizes = check(a), check(b)
    for letter in ("Dq", "Dk", "Dv"):
        if sizes[0][letter] != sizes[1][letter]:
            raise ValueError(
                f"the layers take inputs of different widths: {letter}={sizes[0][letter]} and "
                f"{sizes[1][letter]}; their outputs cannot be compared"
            )
    widths = [n.get("Do", n["N"] * n["h"]) for n in sizes]
    if widths[0] != widths[1]:
        raise ValueError(f"the outputs have different widths: {widths[0]} and {widths[1]}")


def output(values: Mapping[str, Any], inputs: Inputs) -> NDArray:
    """Computes the output `B T Do` in float64; the softmax rounds to the dtypes in `values`."""
    N, K = values["heads"]
    arrays: dict[str, Any] = {}
    for name in CANONICAL:
        if (array := values.get(name)) is not None:
            arrays[name] = _split(name, array, N, K)
    semantics = Semantics(
        scale=values["scale"],
        logits_soft_cap=values["soft cap"],
        add_zero_attn=values["zero position"],
        clip_qkv=values["clip"],
        **dict(zip(NORM_FIELDS, values["norm"], strict=True)),
    )
    parts = [values[name] for name in MASKS if values[name] is not None]
    mask = reduce(np.logical_and, parts) if parts else None

    def softmax(logits: NDArray, allowed: NDArray) -> NDArray:
        return _softmax(logits, allowed, values)

    with np.errstate(over="ignore", invalid="ignore"):
        return oracle.run(from_leaves(arrays), semantics, *inputs, mask, softmax=softmax).output


def _softmax(logits: NDArray, allowed: NDArray, values: Mapping[str, Any]) -> NDArray:
    """Computes probabilities with the mask constants and the softmax rounding in `values`."""
    narrow, sum_dtype, bias = values["softmax"], values["sum"], values["bias"]
    logits = _rounded(logits, narrow)
    if bias is not None:
        bias = np.pad(bias, ((0, 0),) * 3 + ((0, logits.shape[3] - bias.shape[3]),))
        allowed = allowed & (bias != -np.inf)
        logits = _rounded(logits + np.where(bias == -np.inf, 0.0, bias), sum_dtype)
    constant, added = values["blocked"]
    blocked = _rounded(logits + constant if added else np.full_like(logits, constant), sum_dtype)
    found = _normalised(np.where(allowed, logits, blocked), narrow)
    empty = ~allowed.any(-1)
    if not empty.any():
        return found
    empty_output = values["empty"]
    if empty_output == "mean":
        found[empty] = 1 / logits.shape[3]
    elif isinstance(empty_output, str):
        found[empty] = 0.0 if empty_output == "zero" else np.nan
    else:
        found[empty] = _normalised(_rounded(logits[empty] + empty_output, sum_dtype), narrow)
    return found


def _normalised(logits: NDArray, narrow: np.dtype[Any] | None) -> NDArray:
    row_max = logits.max(-1, keepdims=True)
    exps = _rounded(np.exp(logits - np.where(row_max == -np.inf, 0.0, row_max)), narrow)
    row_sum = _rounded(exps.sum(-1, keepdims=True), narrow)
    return _rounded(exps / np.where(row_sum == 0, 1.0, row_sum), narrow)


def _rounded(x: NDArray, dtype: np.dtype[Any] | None) -> NDArray:
    return x if dtype is None else x.astype(dtype).astype(np.float64)


def _at_least_float32(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def _merged(name: str, leaf: NDArray) -> NDArray:
    if name == "out.kernel":
        return leaf.reshape(-1, leaf.shape[2])
    return leaf.reshape(*leaf.shape[:-2], -1) if name in _MERGED else leaf


def _split(name: str, array: NDArray, N: int, K: int) -> NDArray:
    if name == "out.kernel":
        return array.reshape(N, -1, array.shape[1])
    if name not in _MERGED:
        return array
    heads = N if _MERGED[name][0] == "N" else K
    return array.reshape(*array.shape[:-1], heads, -1)


def _ungrouped(params: MHAParams) -> MHAParams:
    sizes = check(params)
    groups = sizes["N"] // sizes["K"]
    found: dict[str, Any] = {
        name: np.repeat(to_numpy(leaf), groups, axis=-2)
        if CANONICAL[name].split()[-2:-1] == ["K"]
        else leaf
        for name, leaf in leaves(params).items()
    }
    return from_leaves(found)


# Factor -> prefixes of the leaves that make it up, which only one layer may have.
_ALONE = {"learned key position": ("bias_k", "bias_v"), "sinks": ("sinks",), "gate": ("gate",)}
_SHOWN = {
    "learned key position": "a learned key position to attend",
    "sinks": "a learned logit in every softmax",
    "gate": "gates on the output of the heads",
}


def _weights(a: Layer, b: Layer, x: Values, y: Values) -> list[Factor]:
    """Returns the factors of heads and weights; a single factor if the leaves differ in shape."""
    names = [n for n in CANONICAL if n in x or n in y]
    shapes = [{n: v[n].shape for n in names if n in v} for v in (x, y)]
    common = [n for n in names if n in x and n in y and "norm" not in n]
    if any(shapes[0][n] != shapes[1][n] for n in common):
        return [
            Factor(
                "weights",
                "the weights have different sizes, so they count as one factor",
                (*names, "heads"),
            )
        ]
    found: list[Factor] = []
    norm = (*NORMS, "norm")
    if x["heads"] != y["heads"]:
        moved = norm if any(n in v for n in NORMS for v in (x, y)) else ()
        sentence = f"a splits its features into {x['heads'][0]} heads, b into {y['heads'][0]}"
        found.append(Factor("number of heads", sentence, ("heads", *moved)))
    elif x["norm"] != y["norm"] or any(_differs(x.get(n), y.get(n)) for n in NORMS):
        sentence = f"queries and keys are normalised by {x['norm'][0]} in a, {y['norm'][0]} in b"
        found.append(Factor("query and key norm", sentence, norm))
    plain = [n for n in names if n not in norm and (n in x or n in y)]
    for title, starts in _ALONE.items():
        part = tuple(n for n in names if n.startswith(starts))
        of_a, of_b = (any(n in v for n in part) for v in (x, y))
        if of_a != of_b:
            sentence = f"only {'a' if of_a else 'b'} has {_SHOWN[title]}"
            found.append(Factor(title, sentence, part))
            plain = [n for n in plain if n not in part]
    rounded = [n for n in plain if n in x and n in y and _is_rounding(x[n], y[n], a.dtype, b.dtype)]
    if rounded:
        kinds = f"{a.dtype} in a, {b.dtype} in b"
        found.append(Factor("rounded weights", f"the same weights, {kinds}", tuple(rounded)))
    # Some conversion errors are recognisable only with the head count of one layer: try both.
    readings = [_explained(plain, x, y | {n: x[n] for n in rounded}, v["heads"]) for v in (y, x)]
    for error in min(readings, key=lambda errors: sum(e.remedy is None for e in errors)):
        of = ", ".join(error.leaves)
        what = error.remedy or "the values differ, and no known conversion error explains it"
        found.append(Factor(error.name, f"{of}: {what}", error.leaves))
    return found


def _is_rounding(one: NDArray, other: NDArray, a: np.dtype[Any], b: np.dtype[Any]) -> bool:
    """True if the arrays differ, and one equals the other rounded to the dtype of its own layer."""
    if not _differs(one, other):
        return False
    return np.array_equal(_rounded(one, b), other) or np.array_equal(one, _rounded(other, a))


def _explained(
    names: list[str], x: Values, y: Values, heads: tuple[int, int]
) -> list[diagnosis.Explained]:
    ours, theirs = ({n: _split(n, v[n], *heads) for n in names if n in v} for v in (x, y))
    return diagnosis.explain_each(ours, theirs)


def _masks(x: Values, y: Values) -> list[Factor]:
    """Returns a factor for each part of the mask (`MASKS`) that differs.

    If each layer has a part that the other lacks, these parts are first merged into "mask.array",
    also in `x` and `y`.
    """
    apart = [[n for n in MASKS if v[n] is not None and w[n] is None] for v, w in ((x, y), (y, x))]
    if all(apart):
        for v, names in zip((x, y), apart, strict=True):
            joined = [v[n] for n in {*names, "mask.array"} if v[n] is not None]
            v.update(dict.fromkeys(names))
            v["mask.array"] = reduce(np.logical_and, joined)
    found = []
    for name in MASKS:
        if _differs_as_mask(x[name], y[name]):
            part = {"mask.causal": "causal part", "mask.array": "array"}.get(name, name[5:])
            title, sentence = compare.explain(x[name], y[name], part)
            if title in ("mask", "mask shifted"):
                title = _TITLES.get(name, title)
                if name == "mask.padding" and title == "mask shifted":
                    title = "padding shifted"
            found.append(Factor(title, sentence, (name,)))
    return found


def _behaviour(a: Layer, b: Layer, x: Values, y: Values) -> list[Factor]:
    found = []
    scales = [_scale(layer) for layer in (a, b)]
    if x["scale"] != y["scale"] and (
        x["heads"] != y["heads"] or not math.isclose(*scales, rel_tol=1e-12)
    ):
        sentence = f"a multiplies the logits by {scales[0]:.4g}, b by {scales[1]:.4g}"
        found.append(Factor("scale", sentence, ("scale",)))
    if x["soft cap"] != y["soft cap"]:
        caps = [f"at {c:g}" if c is not None else "not" for c in (x["soft cap"], y["soft cap"])]
        sentence = f"the logits are capped {caps[0]} in a, {caps[1]} in b"
        found.append(Factor("soft cap", sentence, ("soft cap",)))
    if x["clip"] != y["clip"]:
        clips = [f"at {c:g}" if c is not None else "not" for c in (x["clip"], y["clip"])]
        sentence = f"projections are clipped {clips[0]} in a, {clips[1]} in b"
        found.append(Factor("clipping", sentence, ("clip",)))
    if x["zero position"] != y["zero position"]:
        which = "a" if x["zero position"] else "b"
        found.append(
            Factor("zero position", f"only {which} has a zero key to attend", ("zero position",))
        )
    if _differs(x["bias"], y["bias"]):
        found.append(Factor("bias", "the additive bias of the logits differs", ("bias",)))
    if x["blocked"] != y["blocked"]:
        sentence = f"a {x['blocked']} masked pairs, b {y['blocked']}"
        found.append(Factor("mask constant", sentence, ("blocked",)))
    if x["empty"] != y["empty"]:
        sentence = (
            f"a row with nothing left to attend is {_empty_rows(x)} in a, {_empty_rows(y)} in b"
        )
        found.append(Factor("fully masked rows", sentence, ("empty",)))
    sums = any(v["bias"] is not None or Blocked(*v["blocked"]).added for v in (x, y))
    if x["softmax"] != y["softmax"] or (sums and x["sum"] != y["sum"]):
        sentence = f"the softmax is in {x['sum']} in a, in {y['sum']} in b"
        found.append(Factor("softmax dtype", sentence, ("softmax", "sum")))
    return found


def _empty_rows(values: Values) -> str:
    empty_output = values["empty"]
    if isinstance(empty_output, str):
        return {"zero": "0", "nan": "NaN", "mean": "the mean of the values"}[empty_output]
    return f"computed after adding {empty_output:g} in {values['sum']}"


def _scale(layer: Layer) -> float:
    return float(logit_scale(layer.semantics, check(layer.params)["H"]))


def _differs(a: NDArray | None, b: NDArray | None) -> bool:
    if a is None or b is None:
        return (a is None) != (b is None)
    return not np.array_equal(a, b, equal_nan=True)


def _differs_as_mask(a: NDArray | None, b: NDArray | None) -> bool:
    one, other = (np.ones((1,) * 4, bool) if x is None else x for x in (a, b))
    shape = np.broadcast_shapes(one.shape, other.shape)
    return not np.array_equal(np.broadcast_to(one, shape), np.broadcast_to(other, shape))
