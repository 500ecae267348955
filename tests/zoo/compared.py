"""Compares one attention of a model with jaxmha's on the same inputs, step by step.

The mask is the one that jaxmha reads, with the padding that the runner gave (`masked`). Where the
output differs, the logits tell why: by rotary positions (a position and itself agree), by a bias that depends on positions
alone (all batch rows agree), or by anything else.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

import jaxmha
from jaxmha.converters.discovery.positions import turned
from tests.zoo.masked import Given
from tests.zoo.rotated import rotated

KINDS = ("equal", "bias", "rotary", "other")  # from the best to the worst
TOLERANCE = 1e-5  # of the largest number
MASKED = -5e3
NOT_FINITE = "no logit is finite"
WAYS = ("B T D", "T B D", "B (T windows) D")  # axes of the inputs
SHIFTED = -100.0  # what Swin adds to the logits of masked pairs


class Outcome(NamedTuple):
    """`kind`: of `KINDS`; `error`: of the output, relative to its largest number.

    `mask`: "" if the mask of the model is the one that is read; else how they differ.
    """

    kind: str
    error: float
    why: str = ""
    mask: str = ""


def compare(
    params: Any,
    semantics: Any,
    given: list[Any],
    logits: Any,
    out: Any,
    positions: Any = None,
    chunk: int = 0,
    masks: Given = Given(None),
) -> Outcome:
    """Compares on the inputs of the three projections; `logits` are `... T S`, `out` the output."""
    N = params.query.kernel.shape[-2]
    theirs, sinks = _without_sinks(params, _by_head(logits.detach().double().numpy(), N))
    *_, T, S = theirs.shape
    if theirs.size % (N * T * S):
        return Outcome("other", float("inf"), f"logits {theirs.shape} have no {N} heads")
    theirs = theirs.reshape(-1, N, T, S)
    sinks = None if sinks is None else np.broadcast_to(sinks, (*logits.shape[:-1], 1))
    sinks = None if sinks is None else sinks.reshape(-1, N, T, 1)
    batch, extra = theirs.shape[0], int(params.bias_k is not None)
    sides = [x.detach().double().numpy() for x in given]
    best = Outcome(
        "other", float("inf"), f"inputs {[x.shape for x in sides]}, logits {theirs.shape}"
    )
    target = None if out is None else out.detach().double().numpy()
    several = sides[0].size // sides[0].shape[-1] // (batch * T)
    if several > 1 and batch * T * several * sides[0].shape[-1] == sides[0].size:
        sides = [_part(x, several, chunk) for x in sides]
        target = None if target is None else _part(target, several, chunk)
    for way in WAYS:
        try:
            sizes = (T, S - extra, S - extra)
            query, key, value = (_rows(x, batch, n, way) for x, n in zip(sides, sizes, strict=True))
        except ValueError:
            continue
        found = _compare(
            params, semantics, (query, key, value), theirs, target, positions, sinks, masks
        )
        if KINDS.index(found.kind) < KINDS.index(best.kind) or found.error < best.error:
            best = found
        if best.kind == "equal":
            break
    return best


def _by_head(logits: Any, N: int) -> Any:
    """Logits with the axis of heads before `T S`; a model may have an axis of windows between."""
    *lead, _, _ = logits.shape
    if len(lead) < 2 or lead[-1] == N or N not in lead:
        return logits
    return np.moveaxis(logits, len(lead) - 1 - lead[::-1].index(N), -3)


def _part(x: Any, several: int, chunk: int) -> Any:
    """The rows of one of several equally long sequences, which follow each other."""
    flat = x.reshape(-1, x.shape[-1])
    size = len(flat) // several
    return flat[chunk * size : (chunk + 1) * size] if chunk < several else flat


def _rows(x: Any, batch: int, length: int, way: str) -> Any:
    width = x.shape[-1]
    if way == "T B D":
        if x.ndim < 3 or len(x) != length or x.size != batch * length * width:
            raise ValueError
        return x.reshape(length, batch, width).swapaxes(0, 1)
    if way == "B (T windows) D":
        if x.ndim < 3 or batch % len(x) or x.size != batch * length * width:
            raise ValueError
        windows = x.reshape(len(x), length, batch // len(x), width)
        return windows.swapaxes(1, 2).reshape(batch, length, width)
    if x.size == length * width and batch > 1:
        x = np.broadcast_to(x.reshape(1, length, width), (batch, length, width))
    return x.reshape(batch, length, width)


def _compare(
    params: Any,
    semantics: Any,
    given: Any,
    theirs: Any,
    out: Any,
    positions: Any,
    sinks: Any,
    masks: Given,
) -> Outcome:
    query, key, value = given
    valid = theirs > MASKED
    try:
        mine = _scores(params, semantics, query, key, positions)
    except ValueError as error:  # the term has another number of tokens
        return Outcome("other", float("inf"), str(error))
    valid |= np.isfinite(theirs) & (np.abs(theirs - mine) <= TOLERANCE * np.abs(mine))
    valid &= ~(np.abs(theirs - mine - SHIFTED) < 1e-3)
    if not valid.any():
        return Outcome("other", 1e300, NOT_FINITE)
    valid, told = masks.against(valid, int(params.bias_k is not None))
    found = _with_mask(params, semantics, query, value, theirs, mine, out, sinks, valid)
    return found._replace(mask=told)


def _with_mask(
    params: Any,
    semantics: Any,
    query: Any,
    value: Any,
    theirs: Any,
    mine: Any,
    out: Any,
    sinks: Any,
    valid: Any,
) -> Outcome:
    """Compares the outputs of the same mask, and where they differ, the logits."""
    weights = _softmax(np.where(valid, theirs, -np.inf), sinks)
    heads = _clipped(_project(value, params.value), semantics)
    heads = _extended(heads, params.bias_v)
    groups = weights.shape[1] // heads.shape[2]
    mixed = np.einsum("bnts,bsnh->btnh", weights, np.repeat(heads, groups, 2))
    result = _combine(params, _gated(params, mixed, query))
    rest = _error(result, out, valid.any((1, 3))) if out is not None else 0.0
    if rest > TOLERANCE:
        return Outcome("other", rest, "values, output, or a step after the softmax")
    size = np.abs(np.where(valid, theirs, 0)).max() or 1.0
    apart = np.where(valid, np.where(valid, theirs, 0) - mine, 0)
    if np.abs(apart).max() <= TOLERANCE * size:
        return Outcome("equal", float(np.abs(apart).max() / size))
    free = _shift(apart, valid)
    if np.abs(free).max() <= TOLERANCE * size:
        return Outcome("equal", float(np.abs(free).max() / size))
    if len(apart) > 1:
        both = valid & valid[:1]
        if np.abs(np.where(both, apart - apart[:1], 0)).max() <= TOLERANCE * size:
            return Outcome("bias", float(np.abs(apart).max() / size), "a bias of positions")
    if theirs.shape[-1] == theirs.shape[-2]:
        diagonal = np.einsum("bntt->bnt", apart)
        if np.abs(diagonal).max() <= TOLERANCE * size:
            return Outcome("rotary", float(np.abs(apart).max() / size), "rotary positions")
        own, other = (
            np.einsum("bntt->bnt", np.where(valid, theirs, np.nan)),
            np.einsum("bntt->bnt", mine),
        )
        ratio = own / other
        ratio = ratio[np.isfinite(ratio)]
        if ratio.size and np.abs(ratio / np.median(ratio) - 1).max() < 1e-3:
            return Outcome(
                "other", float(np.abs(apart).max() / size), f"logits times {np.median(ratio):.4g}"
            )
    return Outcome("other", float(np.abs(apart).max() / size), "logits")


def with_jaxmha(
    params: Any,
    semantics: Any,
    given: list[Any],
    logits: Any,
    out: Any,
    positions: Any,
    masks: Given,
) -> float:
    """The error of jaxmha's own output on the same inputs, with the same mask and the positions."""
    N = params.query.kernel.shape[-2]
    theirs, _ = _without_sinks(params, _by_head(logits.detach().double().numpy(), N))
    *_, T, S = theirs.shape
    extra = int(params.bias_k is not None)
    valid, _ = masks.against(theirs.reshape(-1, N, T, S) > MASKED, extra)
    sides = [x.detach().double().numpy() for x in given]
    target = out.detach().double().numpy()
    best = float("inf")
    for way in WAYS:
        try:
            sizes = (T, S - extra, S - extra)
            rows = [_rows(x, len(valid), n, way) for x, n in zip(sides, sizes, strict=True)]
        except ValueError:
            continue
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
            if extra:
                seen = valid[..., :-extra]
                mine = np.asarray(
                    jaxmha.multi_head_attention(wide, *rows, mask=seen, semantics=semantics)
                )
                best = min(best, _error(mine, target, valid.any((1, 3))))
                continue
            q: Any
            k: Any
            q, k, v = jaxmha.project(wide, *rows, semantics=semantics)
            bias = None
            if positions is not None:
                q, k = turned(positions, q, k)
                if positions.added is not None:
                    bias = positions.added.bias(T, S, np.asarray(q), np.asarray(k))
                    bias = bias[None] if bias.ndim == 3 else bias
            heads = jaxmha.dot_product_attention(
                q,
                k,
                v,
                bias=bias,
                mask=valid,
                scale=semantics.scale,
                logits_soft_cap=semantics.logits_soft_cap,
                sinks=wide.sinks,
                implementation="reference",
            )
            gated = None if wide.gate is None else rows[0]
            mine = np.asarray(jaxmha.combine(wide, heads, semantics=semantics, query=gated))
        best = min(best, _error(mine, target, valid.any((1, 3))))
    return best


def _shift(apart: Any, valid: Any) -> Any:
    """A difference without what is the same for all keys of a query: the softmax ignores it."""
    first = np.take_along_axis(apart, valid.argmax(-1)[..., None], -1)
    return np.where(valid, apart - first, 0)


def _project(x: Any, projection: Any) -> Any:
    found = np.einsum("btd,dnh->btnh", x, np.asarray(projection.kernel, np.float64))
    return found if projection.bias is None else found + np.asarray(projection.bias, np.float64)


def _clipped(x: Any, semantics: Any) -> Any:
    return x if semantics.clip_qkv is None else np.clip(x, -semantics.clip_qkv, semantics.clip_qkv)


def _extended(heads: Any, learned: Any) -> Any:
    """Keys or values with the learned position after the others, if there is one."""
    if learned is None:
        return heads
    row = np.asarray(learned, np.float64)[None, None]
    return np.concatenate([heads, np.broadcast_to(row, (len(heads), *row.shape[1:]))], 1)


def _without_sinks(params: Any, logits: Any) -> tuple[Any, Any]:
    """Logits `... N T S` without the sinks, and the sinks `... N T 1`; None: there are none.

    A model appends the sinks as a column, and may then subtract the largest logit of every row.
    """
    if params.sinks is None:
        return logits, None
    sinks = np.asarray(params.sinks, np.float64)[:, None, None]
    shifted = np.abs(logits.max(-1)).max() == 0
    if shifted or np.abs(logits[..., -1:] - sinks).max() < TOLERANCE:
        return logits[..., :-1], logits[..., -1:]
    return logits, sinks


def _gated(params: Any, heads: Any, query: Any) -> Any:
    if params.gate is None:
        return heads
    kernel = np.asarray(params.gate.kernel, np.float64)
    gate = np.tensordot(query, kernel, 1)
    gate = gate.reshape(*gate.shape[:3], -1)
    if params.gate.bias is not None:
        bias = np.asarray(params.gate.bias, np.float64)
        gate = gate + bias.reshape(len(bias), -1)
    return heads / (1 + np.exp(-gate))


def _normalised(x: Any, weight: Any, bias: Any, semantics: Any) -> Any:
    axes = (-2, -1) if semantics.qk_norm_scope == "heads" else (-1,)
    x = x - x.mean(axes, keepdims=True) if semantics.qk_norm == "layer" else x
    x = x / np.sqrt((x**2).mean(axes, keepdims=True) + semantics.qk_norm_epsilon)
    x = x if weight is None else x * (semantics.qk_norm_offset + np.asarray(weight, np.float64))
    return x if bias is None else x + bias


def _scores(params: Any, semantics: Any, query: Any, key: Any, positions: Any) -> Any:
    q, k = _project(query, params.query), _project(key, params.key)
    if semantics.qk_norm is not None:
        q = _normalised(q, params.query_norm, params.query_norm_bias, semantics)
        k = _normalised(k, params.key_norm, params.key_norm_bias, semantics)
    q, k = _clipped(q, semantics), _extended(_clipped(k, semantics), params.bias_k)
    added = 0.0
    if positions is not None:
        q, k = rotated(positions, q, k)
        if positions.added is not None:
            added = positions.added.bias(q.shape[1], k.shape[1], q, k)
    groups = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if semantics.scale is None else semantics.scale
    found = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, groups, 2)) * scale
    cap = semantics.logits_soft_cap
    return (found if cap is None else cap * np.tanh(found / cap)) + added


def _combine(params: Any, mixed: Any) -> Any:
    if params.out is None:
        return mixed.reshape(*mixed.shape[:2], -1)
    found = np.einsum("btnh,nhd->btd", mixed, np.asarray(params.out.kernel, np.float64))
    return found if params.out.bias is None else found + np.asarray(params.out.bias, np.float64)


def _error(mine: Any, theirs: Any, live: Any) -> float:
    """The largest difference in rows that attend anything, of the layout that fits better."""
    if mine.size != theirs.size:
        return float("inf")
    batch, length, width = mine.shape
    ways = (
        theirs.reshape(batch, length, width),
        theirs.reshape(length, batch, width).swapaxes(0, 1),
    )
    size = float(np.abs(theirs).max()) or 1.0
    best = min(float(np.abs(mine - one)[live].max(initial=0.0)) for one in ways) / size
    if best > TOLERANCE and live.all():  # windows are put back in place before the output
        best = min(best, float(np.abs(_sorted(mine) - _sorted(theirs)).max()) / size)
    return best


def _sorted(x: Any) -> Any:
    """The rows of an array, ordered by a random projection."""
    rows = x.reshape(-1, x.shape[-1])
    keys = rows @ np.random.default_rng(0).normal(size=x.shape[-1])
    return rows[np.argsort(keys)]


def _softmax(x: Any, sinks: Any = None) -> Any:
    top = x.max(-1, keepdims=True)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(x - top)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - top)
    return weights / np.maximum(total, 1e-300)
