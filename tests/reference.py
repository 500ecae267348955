"""The specification: multi-head attention in float64 NumPy, written as loops over B N T S.

Dimension key: B batch, T query length, S key/value length, N query heads, K key/value heads,
H head dim of query and key, h head dim of value, D features. `*B`: any number of batch axes.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Output(NamedTuple):
    """out `*B T N h`; weights and kept (weights after dropout) `*B N T S`; lse `*B N T`."""

    out: Array
    weights: Array
    kept: Array
    lse: Array


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    fully_masked: str = "zero",
    dropout_rate: float = 0.0,
    dropout_keep: Array | None = None,
    sinks: Array | None = None,
    query_seq_lengths: Array | None = None,
    **conditions: Any,
) -> Output:
    """Attention over `*B T N H`, `*B S K H` and `*B S K h`; `conditions` are those of `pairs`.

    `dropout_keep`, broadcastable to `*B N T S`, is True where dropout keeps a weight.
    """
    *batch, T, N, _ = query.shape
    S = key.shape[-3]
    allowed = pairs(batch, N, T, S, mask, query_seq_lengths=query_seq_lengths, **conditions)
    return attend(
        query,
        key,
        value,
        allowed,
        valid=within(query_seq_lengths, batch, T),
        bias=bias,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        fully_masked=fully_masked,
        dropout_rate=dropout_rate,
        dropout_keep=dropout_keep,
        sinks=sinks,
    )


def pairs(
    batch: Sequence[int],
    N: int,
    T: int,
    S: int,
    mask: Array | None = None,
    *,
    is_causal: bool = False,
    causal_offset: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    query_padding: Array | None = None,
    key_value_padding: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None,
) -> Array:
    """Which query i may attend which key j, `*B N T S`: every condition has to hold."""
    allowed = np.zeros((*batch, N, T, S), bool)
    if segment_ids is not None and not isinstance(segment_ids, tuple):
        segment_ids = segment_ids, segment_ids
    window = local_window_size
    left, right = window if isinstance(window, tuple) else (window, window)
    offset, query_length, key_length = (
        None if x is None else np.broadcast_to(x, tuple(batch))
        for x in (causal_offset, query_seq_lengths, key_value_seq_lengths)
    )
    for b in np.ndindex(*batch):
        for i in range(T):
            for j in range(S):
                allowed[*b, :, i, j] = all(
                    (
                        not is_causal or j <= i,
                        offset is None or j <= i + offset[b],
                        left is None or i - left <= j,
                        right is None or j <= i + right,
                        query_length is None or i < query_length[b],
                        key_length is None or j < key_length[b],
                        query_padding is None or query_padding[*b, i],
                        key_value_padding is None or key_value_padding[*b, j],
                        segment_ids is None or segment_ids[0][*b, i] == segment_ids[1][*b, j],
                    )
                )
    return allowed if mask is None else allowed & np.broadcast_to(mask, allowed.shape)


def attend(
    query: Array,
    key: Array,
    value: Array,
    allowed: Array,
    *,
    valid: Array,
    bias: Array | None,
    scale: float | None,
    logits_soft_cap: float | None,
    fully_masked: str,
    dropout_rate: float,
    dropout_keep: Array | None,
    sinks: Array | None = None,
) -> Output:
    """`sinks`, `N`, are logits without values. `allowed` is `*B N T S`; `there`, `*B T`, is False on rows beyond a query length."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    *batch, T, N, H = query.shape
    *_, S, K, h = value.shape
    full = (*batch, N, T, S)
    bias = np.broadcast_to(np.zeros(()) if bias is None else np.asarray(bias, np.float64), full)
    keep = np.broadcast_to(np.ones((), bool) if dropout_keep is None else dropout_keep, full)
    scale = 1 / math.sqrt(H) if scale is None else scale
    out, weights, kept = np.zeros((*batch, T, N, h)), np.zeros(full), np.zeros(full)
    lse = np.full((*batch, N, T), -math.inf)
    for b in np.ndindex(*batch):
        for n in range(N):
            k = n // (N // K)  # N // K successive query heads share one key/value head
            for i in range(T):
                if not valid[*b, i]:
                    continue
                logits = {}
                attends = allowed[*b, n, i] & (bias[*b, n, i] != -math.inf)
                places = np.flatnonzero(attends).tolist()
                products = dots(query[*b, i, n], key[*b, places, k])
                for j, product in zip(places, products, strict=True):
                    logit = scale * product
                    if logits_soft_cap is not None:
                        logit = logits_soft_cap * math.tanh(logit / logits_soft_cap)
                    logits[j] = logit + bias[*b, n, i, j]
                sink = [] if sinks is None else [float(sinks[n])]
                if logits or sink:
                    highest = max([*logits.values(), *sink])
                    exps = {j: math.exp(logit - highest) for j, logit in logits.items()}
                    total = math.fsum([*exps.values(), *(math.exp(x - highest) for x in sink)])
                    row = {j: e / total for j, e in exps.items()}
                    lse[*b, n, i] = highest + math.log(total)
                elif fully_masked == "zero":
                    row = {}
                elif fully_masked == "mean":
                    row = dict.fromkeys(range(S), 1 / S)
                else:
                    row = dict.fromkeys(range(S), math.nan)
                for j, weight in row.items():
                    weights[*b, n, i, j] = weight
                    stays = keep[*b, n, i, j] or math.isnan(weight)  # a row of NaN stays one
                    kept[*b, n, i, j] = weight / (1 - dropout_rate) if stays else 0.0
                attended = [*row]
                out[*b, i, n] = dots(kept[*b, n, i, attended], value[*b, attended, k].T)
                if fully_masked == "nan" and not (logits or sink):
                    out[*b, i, n] = math.nan
    return Output(out, weights, kept, lse)


def multi_head_attention(
    params: Any,
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    *,
    semantics: Any,
    bias: Array | None = None,
    mask: Array | None = None,
    query_seq_lengths: Array | None = None,
    query_padding: Array | None = None,
    dropout_keep: Array | None = None,
    **conditions: Any,
) -> tuple[Array, Output]:
    """A whole layer over `*B T Dq`, `*B S Dk`, `*B S Dv`: its output, and that of attention."""
    key = query if key is None else key
    value = key if value is None else value
    q, k, v = project(params, query, key, value, semantics)
    *batch, T, N, _ = q.shape
    S = k.shape[-3]

    # Extra positions follow the given ones: first the learned one, then the zero one.
    learned, zero = params.bias_k is not None, semantics.add_zero_attn
    extras = learned + zero
    if learned:
        k, v = append(k, params.bias_k), append(v, params.bias_v)
    if zero:
        k, v = append(k, np.zeros(k.shape[-2:])), append(v, np.zeros(v.shape[-2:]))

    # They are visible unless an array says otherwise, or the query row itself is not there.
    valid = within(query_seq_lengths, batch, T)
    names_extras = extras > 0 and mask is not None and mask.shape[-1] == S + extras
    given = pairs(
        batch,
        N,
        T,
        S,
        None if names_extras else mask,
        query_seq_lengths=query_seq_lengths,
        query_padding=query_padding,
        **conditions,
    )
    allowed = np.zeros((*batch, N, T, S + extras), bool)
    for *b, n, i, j in np.ndindex(*allowed.shape):
        row = valid[*b, i] and (query_padding is None or query_padding[*b, i])
        allowed[*b, n, i, j] = given[*b, n, i, j] if j < S else row
    if names_extras:
        allowed &= np.broadcast_to(np.asarray(mask), allowed.shape)
    if bias is not None and extras and bias.shape[-1] != S + extras:
        bias = np.broadcast_to(np.asarray(bias, np.float64), (*batch, N, T, S))
        bias = np.concatenate([bias, np.zeros((*batch, N, T, extras))], -1)

    attended = attend(
        q,
        k,
        v,
        allowed,
        valid=valid,
        bias=bias,
        scale=semantics.scale,
        logits_soft_cap=semantics.logits_soft_cap,
        fully_masked=semantics.fully_masked,
        dropout_rate=semantics.dropout_rate,
        dropout_keep=dropout_keep,
        sinks=params.sinks,
    )
    return combine(params, attended.out, query), attended


def project(
    params: Any, query: Array, key: Array, value: Array, semantics: Any
) -> tuple[Array, Array, Array]:
    """Features to heads: `*B T N H`, `*B S K H`, `*B S K h`."""
    q, k, v = (
        affine(x, projection) for x, projection in zip((query, key, value), params[:3], strict=True)
    )
    if semantics.qk_norm is not None:
        q = normalise(q, params.query_norm, params.query_norm_bias, semantics)
        k = normalise(k, params.key_norm, params.key_norm_bias, semantics)
    if semantics.clip_qkv is not None:
        q, k, v = (np.clip(x, -semantics.clip_qkv, semantics.clip_qkv) for x in (q, k, v))
    return q, k, v


def affine(x: Array, projection: Any) -> Array:
    """`*B L D` by a kernel `D M H` and a bias `M H` is `*B L M H`."""
    x, kernel = np.asarray(x, np.float64), np.asarray(projection.kernel, np.float64)
    y = np.zeros((*x.shape[:-1], *kernel.shape[1:]))
    for *at_position, m, c in np.ndindex(*y.shape):
        y[*at_position, m, c] = dot(x[*at_position], kernel[:, m, c])
        if projection.bias is not None:
            y[*at_position, m, c] += float(projection.bias[m, c])
    return y


def normalise(x: Array, scale: Array | None, bias: Array | None, semantics: Any) -> Array:
    """Each head's vector, or that of all heads, by its own statistics; `rms` keeps the mean."""
    y = np.zeros(x.shape)
    axes = 2 if semantics.qk_norm_scope == "heads" else 1
    for index in np.ndindex(*x.shape[:-axes]):
        head = x[index]
        if semantics.qk_norm == "layer":
            head = head - math.fsum(head.ravel()) / head.size
        variance = dot(head.ravel(), head.ravel()) / head.size
        y[index] = head / math.sqrt(variance + semantics.qk_norm_epsilon)
    if scale is not None:
        y *= semantics.qk_norm_offset + np.asarray(scale, np.float64)
    return y if bias is None else y + np.asarray(bias, np.float64)


def combine(params: Any, heads: Array, query: Array | None = None) -> Array:
    """`*B T N h` to `*B T Do`; without an output layer the heads stand side by side."""
    *batch, T, N, h = heads.shape
    if params.gate is not None:
        assert query is not None
        heads = np.array(heads)
        kernel, bias = (None if x is None else np.asarray(x, np.float64) for x in params.gate)
        assert kernel is not None
        for *at_position, n, c in np.ndindex(*heads.shape):
            weights = kernel[:, n] if kernel.ndim == 2 else kernel[:, n, c]
            logit = dot(query[*at_position], weights)
            if bias is not None:
                logit += float(bias[n] if bias.ndim == 1 else bias[n, c])
            heads[*at_position, n, c] *= 1 / (1 + math.exp(-logit))
    if params.out is None:
        return heads.reshape(*batch, T, N * h)
    kernel = np.asarray(params.out.kernel, np.float64)
    y = np.zeros((*batch, T, kernel.shape[-1]))
    for *at_position, d in np.ndindex(*y.shape):
        y[*at_position, d] = dot(heads[*at_position].ravel(), kernel[..., d].ravel())
        if params.out.bias is not None:
            y[*at_position, d] += float(params.out.bias[d])
    return y


def append(heads: Array, row: Array) -> Array:
    """One more position `K H` after those of `*B S K H`."""
    *batch, _, K, H = heads.shape
    row = np.asarray(row, np.float64)
    return np.concatenate([heads, np.broadcast_to(row, (*batch, 1, K, H))], -3)


def within(lengths: Array | None, batch: Sequence[int], T: int) -> Array:
    """Positions before a length, `*B T`."""
    if lengths is None:
        return np.ones((*batch, T), bool)
    return np.arange(T) < np.broadcast_to(lengths, tuple(batch))[..., None]


def dot(x: Array, y: Array) -> float:
    """A product summed without rounding in between, or plainly where something is not finite."""
    assert x.shape == y.shape
    return dots(x, y[None])[0]


def dots(x: Array, rows: Array) -> list[float]:
    """The product of `x` with every row."""
    assert x.shape == rows.shape[1:]
    with np.errstate(invalid="ignore"):
        products = np.multiply(x, rows, dtype=np.float64).tolist()
        return [
            math.fsum(row) if all(map(math.isfinite, row)) else float(np.sum(row))
            for row in products
        ]
