"""cuDNN's fused attention as JAX documents it, defects included, with every score materialised.

What it cannot do it refuses; what it leaves undefined is NaN, so that nothing can rest on it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as private

MaskType = private.MaskType
CALLS: list[dict[str, Any]] = []


def install(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Puts it in the place of cuDNN; the list collects what it was asked."""
    CALLS.clear()
    monkeypatch.setattr(jax.nn, "dot_product_attention", public)
    monkeypatch.setattr(private, "dot_product_attention", dot_product_attention)
    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91900)
    return CALLS


def public(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float = 1.0,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: Any = None,
    implementation: Any = None,
) -> Any:
    """`jax.nn.dot_product_attention(implementation="cudnn")`."""
    assert implementation == "cudnn"
    padded = query_seq_lengths is not None
    assert padded == (key_value_seq_lengths is not None)
    kind = {
        (False, False): MaskType.NO_MASK,
        (False, True): MaskType.CAUSAL,
        (True, False): MaskType.PADDING,
        (True, True): MaskType.PADDING_CAUSAL,
    }[padded, is_causal]
    sliding = None
    if local_window_size is not None:
        left, right = local_window_size
        assert right == 0, "cuDNN has no right window"
        sliding = left + 1
    return dot_product_attention(
        query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths,
        scale=scale, mask_type=kind, sliding_window_length=sliding,
    )  # fmt: skip


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
    sliding_window_length: int | None = None,
    return_residual: bool = False,
) -> Any:
    """The private function: BTNH, K may be smaller than N."""
    (B, T, N, H), (_, S, K, h) = query.shape, value.shape
    assert query.dtype in (jnp.bfloat16, jnp.float16)
    assert query.dtype == key.dtype == value.dtype
    assert key.shape == (B, S, K, H)
    assert h == H, "unequal heads need another path"
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
    rules = scale, causal, sliding_window_length, padded
    out, lse = _core(rules, query, key, value, bias, q_seqlen, kv_seqlen)
    return (out, lse) if return_residual else out


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(rules: Any, *operands: Any) -> Any:
    return _answer(rules, False, *operands)


def _answer(rules: Any, skipped: Any, *operands: Any) -> Any:
    """`skipped` rows attend everything, so that no gradient meets what they hold."""
    query, key, value, bias, q_len, kv_len = operands
    scale, causal, sliding, padded = rules
    (B, T, N, _), (_, S, K, _) = query.shape, value.shape
    i, j = jnp.arange(T)[:, None], jnp.arange(S)[None]
    allowed = jnp.ones((1, 1, T, S), bool)
    if causal:
        allowed &= (j <= i)[None, None]
    if sliding is not None:
        allowed &= (j > i - sliding)[None, None]
    if padded:
        allowed = allowed & (j[None, None] < kv_len.reshape(B, 1, 1, 1))
    allowed = allowed | skipped
    wide = (x.astype(np.float32) for x in (query, key, value))
    q, k, v = (jnp.moveaxis(x, 2, 1) for x in wide)
    k, v = (jnp.repeat(x, N // K, 1) for x in (k, v))
    logits = scale * jnp.einsum("bnth,bnsh->bnts", q, k)
    if bias is not None:
        logits += bias.astype(np.float32)
    logits = jnp.where(allowed, logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=3)
    weights = jnp.exp(logits - lse[..., None])  # NaN in rows without keys
    weights = weights.astype(query.dtype).astype(np.float32)
    out = jnp.moveaxis(jnp.einsum("bnts,bnsh->bnth", weights, v), 1, 2).astype(query.dtype)
    if padded:  # rows beyond are 0, their lse is anything
        there = i[None, :, 0] < q_len.reshape(B, 1)
        out = jnp.where(there[..., None, None], out, 0)
        lse = jnp.where(there[:, None], lse, jnp.nan)
    return out, lse


def _forward(rules: Any, *operands: Any) -> Any:
    return _answer(rules, False, *operands), operands


def _backward(rules: Any, operands: Any, slopes: Any) -> Any:
    query, key, value, bias, q_len, kv_len = operands
    T, S = query.shape[1], key.shape[1]
    assert S > 1, "no gradient for one key"
    assert T % 2 == S % 2 == 0, "JAX refuses it, with or without a bias"
    if bias is not None:
        assert T % 128 != 64
        assert S % 128 != 64
    if rules[3]:  # nor do rows beyond pass a gradient
        there = jnp.arange(T).reshape(1, T) < q_len.reshape(-1, 1)
    else:
        assert T % 64 == S % 64 == 0, "NaN at odd sizes without lengths"
        there = jnp.ones((1, T), bool)

    def out(*x: Any) -> Any:
        found = _answer(rules, ~there[:, None, :, None], *x, q_len, kv_len)[0]
        return jnp.where(there[..., None, None], found, 0)

    # The slope of lse is dropped.
    pulled = jax.vjp(out, query, key, value, bias)[1](slopes[0])
    return (*pulled, None, None)


_core.defvjp(_forward, _backward)
