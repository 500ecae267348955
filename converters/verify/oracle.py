"""Multi-head attention in float64 NumPy, stage by stage: the reference for all errors."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jaxmha import Mask, MHAParams, Projection, Semantics
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.params import field_of, leaves
from jaxmha.semantics import logit_scale

# (logits `B N T S`, allowed pairs of the same shape) -> probabilities.
Softmax = Callable[[NDArray, NDArray], NDArray]
Rounded = Callable[[NDArray], NDArray]


class Stages(NamedTuple):
    """Every intermediate of a layer, in the order of computation.

    query `B T N H`, key `B S K H`, value `B S K h` (S includes extra positions), logits and
    probabilities `B N T S`, context `B T N h`, output `B T Do`.
    """

    query: NDArray
    key: NDArray
    value: NDArray
    logits: NDArray
    probabilities: NDArray
    context: NDArray
    output: NDArray


def exclude(logits: NDArray, allowed: NDArray) -> NDArray:
    """Softmax over the allowed keys; a fully masked row is zero.

    >>> exclude(np.zeros((2, 2)), np.array([[True, False], [False, False]]))
    array([[1., 0.],
           [0., 0.]])
    """
    logits = np.where(allowed, logits, -np.inf)
    row_max = logits.max(-1, keepdims=True, initial=-np.inf)
    exps = np.exp(logits - np.where(np.isfinite(row_max), row_max, 0.0))
    row_sum = exps.sum(-1, keepdims=True)
    probabilities: NDArray = exps / np.where(row_sum == 0, 1.0, row_sum)
    return probabilities


def run(
    params: MHAParams,
    semantics: Semantics,
    query: NDArray,
    key: NDArray,
    value: NDArray,
    mask: NDArray | None = None,
    *,
    softmax: Softmax = exclude,
    rounded: Rounded = lambda x: x,
) -> Stages:
    """Computes the layer on `(B, T, Dq)`, `(B, S, Dk)`, `(B, S, Dv)`, without dropout.

    `mask` is Boolean, broadcastable to `B N T S`, True = attend. `softmax` defines the
    probabilities of fully masked rows, by default zeros; its S includes the extra positions.
    `rounded` is applied to every intermediate array from the heads on, by default not at all.

    >>> from jaxmha import Projection
    >>> params = MHAParams(*[Projection(np.ones((6, 2, 3)))] * 3)
    >>> run(params, Semantics(), *[np.ones((1, 5, 6))] * 3).output.shape
    (1, 5, 6)
    """
    weights = {name: to_numpy(array).astype(np.float64) for name, array in leaves(params).items()}
    heads = []
    for name, x in (("query", query), ("key", key), ("value", value)):
        x = np.asarray(x, np.float64)
        head = np.einsum("btd,dnh->btnh", x, weights[f"{name}.kernel"], optimize=True)
        heads.append(head + weights.get(f"{name}.bias", 0.0))
    q, k, v = heads
    if semantics.qk_norm is not None:
        q, k = (_normalise(x, weights, name, semantics) for name, x in (("query", q), ("key", k)))
    if semantics.clip_qkv is not None:
        q, k, v = (np.clip(x, -semantics.clip_qkv, semantics.clip_qkv) for x in (q, k, v))
    k = _append(k, weights.get("bias_k"), semantics)
    v = _append(v, weights.get("bias_v"), semantics)
    q, k, v = (rounded(x) for x in (q, k, v))

    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    grouped = rounded(logit_scale(semantics, H) * q).reshape(B, T, K, N // K, H)
    logits = rounded(np.einsum("btkgh,bskh->bkgts", grouped, k).reshape(B, N, T, S))
    if semantics.logits_soft_cap is not None:
        logits = rounded(semantics.logits_soft_cap * np.tanh(logits / semantics.logits_soft_cap))
    allowed = np.ones(logits.shape, bool)
    if mask is not None:
        allowed[..., : key.shape[1]] = mask
    if semantics.local_window_size is not None:
        window = Mask.window(*semantics.local_window_size)
        allowed[..., : key.shape[1]] &= window.to_array(T, key.shape[1], np)
    probabilities = softmax(logits, allowed)
    if "sinks" in weights:
        probabilities = with_sinks(probabilities, logits, allowed, weights["sinks"])
    logits = np.where(allowed, logits, -np.inf)
    probabilities = rounded(probabilities)
    rows = probabilities.reshape(B, K, N // K, T, S)
    context = rounded(np.einsum("bkgts,bskh->btkgh", rows, v).reshape(B, T, N, -1))
    if params.gate is not None:
        context = rounded(context * rounded(gates(np.asarray(query, np.float64), params.gate)))
    output = context.reshape(B, T, -1)
    if params.out is not None:
        output = np.einsum("btnh,nhd->btd", context, weights["out.kernel"], optimize=True)
        output = rounded(output + weights.get("out.bias", 0.0))
    return Stages(q, k, v, logits, probabilities, context, output)


def rounding_floor(exact: NDArray, dtype: np.dtype) -> float:
    """Expected RMS error of rounding exact values to a dtype once, called a rounding floor.

    Each error is uniform within half the spacing of the dtype at its value.

    >>> floor = rounding_floor(np.array([1.0, 1.5]), np.dtype(np.float32))
    >>> bool(np.isclose(floor, 2**-23 / 12**0.5))
    True
    """
    info = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    exponent = np.maximum(np.frexp(exact)[1] - 1, int(info.minexp))
    spacing = np.ldexp(float(info.eps), exponent)
    return float(np.sqrt(np.mean(np.square(spacing) / 12)))


def _normalise(
    x: NDArray, weights: Mapping[str, NDArray], name: str, semantics: Semantics
) -> NDArray:
    axes = (-2, -1) if semantics.qk_norm_scope == "heads" else (-1,)
    if semantics.qk_norm == "layer":
        x = x - x.mean(axes, keepdims=True)
    variance = np.square(x).mean(axes, keepdims=True)
    normalised: NDArray = x / np.sqrt(variance + semantics.qk_norm_epsilon)
    held = {field_of(leaf): array for leaf, array in weights.items()}
    if f"{name}_norm" in held:
        normalised = normalised * (held[f"{name}_norm"] + semantics.qk_norm_offset)
    return normalised + held.get(f"{name}_norm_bias", 0.0)


def with_sinks(
    probabilities: NDArray, logits: NDArray, allowed: NDArray, sinks: NDArray
) -> NDArray:
    """Rescales probabilities for `sinks` `N`: one more logit per head in each row, without a value.

    Fully masked rows become 0.
    """
    logits = np.where(allowed, logits, -np.inf)
    sinks = np.broadcast_to(sinks[:, None, None], (*logits.shape[:-1], 1))
    row_max = np.maximum(logits.max(-1, keepdims=True, initial=-np.inf), sinks)
    row_sum = np.exp(logits - row_max).sum(-1, keepdims=True)
    share = row_sum / (row_sum + np.exp(sinks - row_max))
    found: NDArray = np.where(allowed.any(-1, keepdims=True), probabilities, 0.0) * share
    return found


def gates(query: NDArray, gate: Projection) -> NDArray:
    """Returns the sigmoid gates that multiply the head outputs: `B T N h` or `B T N 1`."""
    kernel = to_numpy(gate.kernel).astype(np.float64)
    logits = np.tensordot(query, kernel.reshape(*kernel.shape[:2], -1), 1)
    if gate.bias is not None:
        logits = logits + to_numpy(gate.bias).astype(np.float64).reshape(kernel.shape[1], -1)
    found: NDArray = 1 / (1 + np.exp(-logits))
    return found


def _append(heads: NDArray, learned: NDArray | None, semantics: Semantics) -> NDArray:
    B, _, K, size = heads.shape
    rows = [heads]
    if learned is not None:
        rows.append(np.broadcast_to(learned, (B, 1, K, size)))
    if semantics.add_zero_attn:
        rows.append(np.zeros((B, 1, K, size)))
    return np.concatenate(rows, axis=1)
