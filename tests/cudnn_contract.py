"""cuDNN's fused attention as JAX documents it, defects included, with every score materialised.

It refuses calls that it cannot compute. Undefined results are NaN, so that none rests on them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as private

MaskType = private.MaskType
# cuDNN has no -inf: its graph selects these logits instead, for padding and causality the lowest
# float32, and for keys beyond the window, which it selects last, one far above that. Source:
# cudnn-frontend, scaled_dot_product_flash_attention.h (negative_inf_padding, negative_inf_swa).
PADDING, BEYOND_WINDOW = float(np.finfo(np.float32).min), -(2.0**30)
CALLS: list[dict[str, Any]] = []
# Operands whose positions beyond lengths are multiplied by weights of 0, as in a tile that is not cut,
# and the number of queries up to which none are, as the kernels for one query do.
LEAKS: Sequence[str] = ()
CLEAN = 0
ALL = ("query", "key", "value")


def install(
    patch: pytest.MonkeyPatch, *, leaks: Sequence[str] = (), clean: int = 0
) -> list[dict[str, Any]]:
    """Puts it in the place of cuDNN; the list collects what it was asked."""
    CALLS.clear()
    patch.setattr(f"{__name__}.LEAKS", leaks)
    patch.setattr(f"{__name__}.CLEAN", clean)
    patch.setattr(private, "dot_product_attention", dot_product_attention)
    patch.setattr(private, "_dot_product_attention", paged_attention)
    patch.setattr(private, "_dot_product_attention_bwd_rule", backward)
    patch.setattr(private, "_dot_product_attention_fwd_p", Bound(packed))
    patch.setattr(private, "_dot_product_attention_bwd_p", Bound(packed_backward))
    patch.setattr(private, "check_cudnn_version", lambda: 91900)
    return CALLS


class Bound(NamedTuple):
    """A function in the place of a primitive."""

    bind: Callable[..., Any]


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    q_seqlen: Any = None,
    kv_seqlen: Any = None,
    *,
    scale: float = 1.0,
    mask_type: Any = MaskType.NO_MASK,
    qkv_layout: str = "BTNH",
    sliding_window_length: int | None = None,
    return_residual: bool = False,
) -> Any:
    """The private function: K may be smaller than N."""
    if qkv_layout == "BNTH":
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    (B, T, N, H), (_, S, K, h) = query.shape, value.shape
    assert query.dtype in (jnp.bfloat16, jnp.float16)
    assert query.dtype == key.dtype == value.dtype
    assert key.shape == (B, S, K, H)
    assert h == H or (H, h) == (192, 128), "unequal heads need another path"
    assert H % 8 == 0
    assert H <= 256
    assert mask is None, "a mask becomes a bias, and hits its defects"
    padded = mask_type in (MaskType.PADDING, MaskType.PADDING_CAUSAL)
    causal = mask_type in (MaskType.CAUSAL, MaskType.PADDING_CAUSAL)
    assert padded == (q_seqlen is not None) == (kv_seqlen is not None)
    if padded:
        assert q_seqlen.shape == kv_seqlen.shape == (B,)
        assert q_seqlen.dtype == kv_seqlen.dtype == np.int32
    if bias is not None:
        assert bias.shape[0] in (1, B)
        assert bias.shape[1] in (1, N)
        assert bias.shape[2:] == (T, S), "T and S of a bias are not broadcast"
        assert bias.dtype == query.dtype
    if sliding_window_length is not None:
        assert causal, "undocumented"
        assert T <= S
        assert sliding_window_length > 0
    CALLS.append({"mask_type": mask_type, "T": T, "S": S, "H": H, "bias": bias is not None,
                  "lse": return_residual})  # fmt: skip
    config = scale, causal, sliding_window_length
    query, key, value = inside(query, key, value, q_seqlen, kv_seqlen)
    k, v = (jnp.repeat(x, N // K, 2) for x in (key, value))
    logits = masked_logits(config, query, k, bias, kv_seqlen)
    lse = jax.nn.logsumexp(logits, axis=3)
    weights = jnp.exp(logits - lse[..., None])  # NaN in rows without keys
    weights = weights.astype(query.dtype).astype(np.float32)
    out = jnp.einsum("bnts,bsnh->btnh", weights, v.astype(np.float32)).astype(query.dtype)
    if padded:  # rows beyond are 0, their lse is anything
        valid = jnp.arange(T).reshape(1, T) < q_seqlen.reshape(B, 1)
        out = jnp.where(valid[..., None, None], out, 0)
        lse = jnp.where(valid[:, None], lse, jnp.nan)
    out = jnp.swapaxes(out, 1, 2) if qkv_layout == "BNTH" else out
    return (out, lse) if return_residual else out


def paged_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    q_seqlen: Any,
    kv_seqlen: Any,
    q_offsets: Any,
    kv_offsets: Any,
    page_table_k: Any,
    page_table_v: Any,
    scale: float,
    seed: int,
    dropout_rate: float,
    variadic_args: tuple[bool, bool],
    mask_type: Any,
    layout: int,
    sliding_window_length: int | None,
    cudnn_version: int,
    return_residual: bool,
) -> Any:
    """The private function below both public ones, with tables of pages `P K page H`."""
    assert bias.size == q_offsets.size == kv_offsets.size == 0
    assert layout == private.AttentionLayout.BNTH.value
    assert (dropout_rate, variadic_args, cudnn_version) == (0.0, (False, False), 91900)
    assert sliding_window_length is None
    assert mask_type == MaskType.PADDING, "queries are causal from the first key on"

    def gathered(pages: Any, table: Any) -> Any:
        return jnp.swapaxes(of_table(jnp.swapaxes(pages, 1, 2), table), 1, 2)

    found = dot_product_attention(
        query,
        gathered(key, page_table_k),
        gathered(value, page_table_v),
        q_seqlen=q_seqlen,
        kv_seqlen=kv_seqlen,
        scale=scale,
        mask_type=mask_type,
        qkv_layout="BNTH",
        return_residual=return_residual,
    )
    CALLS[-1]["pages"] = key.shape[0]
    return found


def of_table(pages: Any, table: Any) -> Any:
    """Keys or values `B S K H` of pages `P page K H`; NaN where an entry is of no page."""
    P, page = pages.shape[:2]
    B, _, M, _ = table.shape
    assert table.shape == (B, 1, M, 1)
    assert table.dtype == np.int32
    assert page & (page - 1) == 0, "the size of a page must be a power of 2"
    entries = table.reshape(B, M)
    inside = ((entries >= 0) & (entries < P))[..., None, None, None]
    found = jnp.where(inside, pages[entries], jnp.nan).astype(pages.dtype)
    return found.reshape(B, M * page, *pages.shape[2:])


def inside(query: Any, key: Any, value: Any, q_seqlen: Any, kv_seqlen: Any) -> Any:
    """The arrays as far as they are read."""
    if q_seqlen is None:
        return query, key, value
    leaks = LEAKS if query.shape[1] > CLEAN else ()

    def cut(name: str, x: Any, lengths: Any) -> Any:
        if name in leaks:
            return x
        positions = jnp.arange(x.shape[1]).reshape(1, -1)
        return jnp.where((positions < lengths.reshape(-1, 1))[..., None, None], x, 0)

    return cut("query", query, q_seqlen), cut("key", key, kv_seqlen), cut("value", value, kv_seqlen)


def masked_logits(config: Any, query: Any, key: Any, bias: Any, kv_seqlen: Any) -> Any:
    """Float32 logits `B N T S`, as cuDNN selects them where a key is excluded."""
    scale, causal, sliding = config
    T, S = query.shape[1], key.shape[1]
    i, j = jnp.arange(T)[:, None], jnp.arange(S)[None]
    allowed = within = jnp.ones((1, 1, T, S), bool)
    if causal:
        allowed &= (j <= i)[None, None]
    if sliding is not None:
        within &= (j > i - sliding)[None, None]
    if kv_seqlen is not None:
        allowed = allowed & (j[None, None] < kv_seqlen.reshape(-1, 1, 1, 1))
    wide = (x.astype(np.float32) for x in (query, key))
    logits = scale * jnp.einsum("btnh,bsnh->bnts", *wide)
    if bias is not None:
        logits += bias.astype(np.float32)
    logits = jnp.where(within, jnp.where(allowed, logits, PADDING), BEYOND_WINDOW)
    # Undefined, so NaN, in rows without keys.
    return jnp.where((allowed & within).any(3, keepdims=True), logits, jnp.nan)


def backward(
    scale: Any,
    seed: Any,
    dropout_rate: Any,
    variadic_args: Any,
    mask_type: Any,
    layout: Any,
    sliding_window_length: Any,
    is_training: Any,
    return_residual: Any,
    res: Any,
    grad_output: Any,
) -> Any:
    """The gradient that belongs to the private function, from what it returned."""
    query, key, value, bias, q_len, kv_len, *unused, lse, out = res
    (B, T, N, _), (_, S, K, _) = query.shape, value.shape
    has_bias, bias_gradient = variadic_args
    assert layout == private.AttentionLayout.BTNH.value
    assert dropout_rate == 0
    assert not return_residual
    assert all(x.size == 0 for x in unused)
    assert lse.shape == (B, N, T)
    assert out.shape == grad_output.shape == (*query.shape[:3], value.shape[3])
    assert out.dtype == grad_output.dtype == query.dtype
    assert S > 1, "no gradient for one key"
    assert T % 2 == S % 2 == 0, "JAX refuses it, with or without a bias"
    if has_bias:
        assert T % 128 != 64
        assert S % 128 != 64
    valid = jnp.ones((B, T), bool)
    if mask_type in (MaskType.PADDING, MaskType.PADDING_CAUSAL):
        valid = jnp.arange(T).reshape(1, T) < q_len.reshape(B, 1)
    else:
        q_len = kv_len = None
        assert T % 64 == S % 64 == 0, "NaN at odd sizes without lengths"
    rows = valid[..., None, None]  # rows beyond pass no gradient
    config = scale, mask_type in (MaskType.CAUSAL, MaskType.PADDING_CAUSAL), sliding_window_length
    query, key, value = inside(query, key, value, q_len, kv_len)
    k, v = (jnp.repeat(x, N // K, 2).astype(np.float32) for x in (key, value))
    logits = masked_logits(config, query, k, bias if has_bias else None, kv_len)
    right = jnp.abs(jax.nn.logsumexp(logits, axis=3) - lse) < 1e-2
    weights = jnp.where(right[..., None], jax.nn.softmax(logits, axis=3), jnp.nan)
    # They are exp(logits - lse), and too large where lse has lost the log of the row's sum.
    most = logits.max(3)
    lost = jax.nn.logsumexp(logits - most[..., None], axis=3) - (lse - most)
    weights *= jnp.exp(jnp.where(jnp.abs(lost) < 1e-2, 0, lost))[..., None]
    weights = jnp.where(jnp.moveaxis(rows, 1, 2), weights, 0)
    d_out = jnp.where(rows, grad_output, 0).astype(np.float32)
    d_weights = jnp.einsum("btnh,bsnh->bnts", d_out, v)
    d_logits = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))

    def of_group(x: Any) -> Any:
        return x.reshape(B, S, K, N // K, -1).sum(3).astype(query.dtype)

    grads = (
        scale * jnp.einsum("bnts,bsnh->btnh", d_logits, k),
        of_group(scale * jnp.einsum("bnts,btnh->bsnh", d_logits, query.astype(np.float32))),
        of_group(jnp.einsum("bnts,btnh->bsnh", weights, d_out)),
    )
    more: tuple[jax.Array, ...] = ()
    if bias_gradient:
        axes = tuple(axis for axis in (0, 1) if bias.shape[axis] == 1)
        more = (d_logits.sum(axes, keepdims=True).astype(bias.dtype),)
    return (grads[0].astype(query.dtype), *grads[1:], *more, *(None,) * (7 - len(more)))


def flattened(
    query: Any, key: Any, q_len: Any, kv_len: Any, q_offsets: Any, kv_offsets: Any, causal: bool
) -> tuple[Any, Any]:
    """Allowed pairs of positions in the whole batch, and which queries any sequence has: sequence n
    begins at offset n, counted in numbers of its own array, and has length n."""
    (B, T, N, H), (_, S, K, _) = query.shape, key.shape
    assert q_offsets.shape == kv_offsets.shape == q_len.shape == kv_len.shape
    assert q_offsets.shape[0] == B
    sequences = B * (q_offsets.shape[1] - 1)
    assert {x.dtype for x in (q_len, kv_len, q_offsets, kv_offsets)} == {np.dtype(np.int32)}
    within = []
    for offsets, lengths, size, stride in (
        (q_offsets, q_len, B * T, N * H),
        (kv_offsets, kv_len, B * S, K * H),
    ):
        first = offsets.reshape(-1)[:sequences] // stride
        places = jnp.arange(size)[:, None] - first[None]
        within.append(
            jnp.where((places >= 0) & (places < lengths.reshape(-1)[:sequences][None]), places, -1)
        )
    i, j = within[0][:, None], within[1][None]
    allowed = (i >= 0) & (j >= 0)
    allowed = allowed & (j <= i) if causal else allowed
    return allowed.any(-1), (within[0] >= 0).any(-1)


def packed_weights(query: Any, key: Any, allowed: Any, scale: float) -> tuple[Any, Any]:
    """Float32 weights `N, B T, B S`, NaN in rows of no sequence, and the keys that they are of."""
    N, K = query.shape[2], key.shape[2]
    q, k = (x.reshape(-1, *x.shape[2:]).astype(np.float32) for x in (query, key))
    k = jnp.repeat(k, N // K, 1)
    logits = jnp.where(allowed[None], scale * jnp.einsum("tnh,snh->nts", q, k), -jnp.inf)
    return jax.nn.softmax(logits, axis=2), k


def packed(
    query: Any, key: Any, value: Any, bias: Any, q_len: Any, kv_len: Any, q_offsets: Any,
    kv_offsets: Any, *pages: Any, scale: float, mask_type: Any, is_training: bool, **static: Any,
) -> Any:  # fmt: skip
    """The primitive forward, of packed sequences or of pages."""
    assert static == {"seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False),
                      "layout": private.AttentionLayout.BTNH.value,
                      "sliding_window_length": None}  # fmt: skip
    assert bias.size == 0
    if pages[0].ndim == 4:
        assert q_offsets.size == kv_offsets.size == 0
        assert not is_training, "pages have no gradient"
        key, value = map(of_table, (key, value), pages)
        out = dot_product_attention(
            query, key, value, None, None, q_len, kv_len, scale=scale, mask_type=mask_type
        )
        CALLS[-1]["table"] = True
        return [out]
    assert pages[0].size == pages[1].size == 0
    (_, T, N, H), K = query.shape, key.shape[2]
    causal = mask_type == MaskType.PADDING_CAUSAL
    assert causal or mask_type == MaskType.PADDING
    CALLS.append({"mask_type": mask_type, "T": T, "S": key.shape[1], "H": H, "packed": True})
    allowed, covered = flattened(query, key, q_len, kv_len, q_offsets, kv_offsets, causal)
    weights, _ = packed_weights(query, key, allowed, scale)
    v = jnp.repeat(value.reshape(-1, K, H).astype(np.float32), N // K, 1)
    out = jnp.einsum("nts,snh->tnh", weights.astype(query.dtype).astype(np.float32), v)
    out = jnp.where(covered[:, None, None], out, jnp.nan).reshape(query.shape).astype(query.dtype)
    lse = jnp.zeros((q_len.size - len(query), N, T), np.float32)
    return [out, lse] if is_training else [out]


def packed_backward(
    query: Any, key: Any, value: Any, bias: Any, q_len: Any, kv_len: Any, q_offsets: Any,
    kv_offsets: Any, page_k: Any, page_v: Any, lse: Any, out: Any, d_out: Any, *, scale: float,
    mask_type: Any, **static: Any,
) -> Any:  # fmt: skip
    """The primitive backward, of packed sequences."""
    (_, T, N, H), K = query.shape, key.shape[2]
    assert T % 2 == 0
    assert lse.shape == (q_len.size - len(query), N, T)
    assert out.shape == d_out.shape == query.shape
    causal = mask_type == MaskType.PADDING_CAUSAL
    allowed, _ = flattened(query, key, q_len, kv_len, q_offsets, kv_offsets, causal)
    weights, k = packed_weights(query, key, allowed, scale)
    v = jnp.repeat(value.reshape(-1, K, H).astype(np.float32), N // K, 1)
    q, d = (x.reshape(-1, N, H).astype(np.float32) for x in (query, d_out))
    d_weights = jnp.einsum("tnh,snh->nts", d, v)
    d_logits = scale * weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    grads = (
        jnp.einsum("nts,snh->tnh", d_logits, k),
        jnp.einsum("nts,tnh->snh", d_logits, q),
        jnp.einsum("nts,tnh->snh", weights, d),
    )

    def of_group(x: Any, like: Any) -> Any:
        return x.reshape(-1, like.shape[2], N // like.shape[2], H).sum(2).reshape(like.shape)

    return [
        of_group(x, like).astype(like.dtype)
        for x, like in zip(grads, (query, key, value), strict=True)
    ]
