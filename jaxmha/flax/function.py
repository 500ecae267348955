"""`attention_fn`: jaxmha's attention for flax's own modules."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes
from jaxtyping import Float, Int, PRNGKeyArray

from jaxmha import checks
from jaxmha.arrays import Array, DTypeLike, require_arrays
from jaxmha.flax.heads import CallSettings, Implementation, attend_heads, rotated
from jaxmha.flax.settings import behaviour, cast, read_mask, reject_hooks, require_features
from jaxmha.mask import Mask
from jaxmha.mod_arguments import MaskMod, ScoreMod, traced_mods
from jaxmha.rotary import Rotate
from jaxmha.semantics import Precision, Semantics


def attention_fn(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K h"],
    bias: Float[Array, "..."] | None = None,
    mask: Array | Mask | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: PRNGKeyArray | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: Precision = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    promote_dtype: Any = None,
    is_causal: bool = False,
    *,
    semantics: Semantics | None = None,
    implementation: Implementation = None,
    rotate: Rotate | None = None,
    input_positions: Int[Array, "..."] | None = None,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
) -> Float[jax.Array, "*B T N h"]:
    """`dot_product_attention` of `flax.linen` and `flax.nnx` by jaxmha, with the same arguments.

    Use it as `nn.MultiHeadDotProductAttention(..., attention_fn=attention_fn)` or
    `nnx.MultiHeadAttention(..., attention_fn=attention_fn)`. It computes what flax's own function
    computes, with these differences: fully masked rows are 0 (in flax the mean of the values:
    `functools.partial(attention_fn, semantics=Semantics.flax())`), the softmax is at least in
    float32, float32 matmuls are float32 on every platform, dropout draws differ for the same key,
    integer inputs, masks that are Python scalars and known negative numbers in a mask are rejected,
    and forward-mode differentiation (`jax.jvp`, `jax.jacfwd`, `jax.linearize`) needs
    `implementation="reference"`, or `"few_queries"` where it supports the call.

    Args:
      query: `(*B, T, N, H)`.
      key: `(*B, S, K, H)`; N is a multiple of K.
      value: `(*B, S, K, h)`.
      bias: added to the logits, broadcastable to `(*B, N, T, S)`.
      mask: broadcastable to `(*B, N, T, S)`, nonzero entries attend; or a `jaxmha.Mask`.
      broadcast_dropout: batch rows and heads share a draw; takes precedence over `semantics`.
      dropout_rng: a PRNG key; required if there is dropout.
      dropout_rate: probability that a weight is dropped, unless `deterministic`.
      deterministic: no dropout.
      dtype: of the computation; None: the promoted dtype.
      precision: of the matmuls.
      module: flax module that sows the weights before dropout as `attention_weights`.
      force_fp32_for_softmax: the softmax is in float32, also for float64, and so are weights and
        output for half precision.
      einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum, promote_dtype: must
        be left out.
      is_causal: query i attends keys j <= i.
      semantics: settings without an argument in flax (scale, soft cap, fully masked rows).
      implementation: as in `jaxmha.dot_product_attention`.
      rotate: `rotate(heads, positions)` of queries and keys, such as `jaxmha.rope`; needs T = S.
      input_positions: `(*B, T)` for `rotate`, default 0, 1, ...
      score_mod, mask_mod: as in `jaxmha.dot_product_attention`; give them to flax's modules by
        `functools.partial(attention_fn, score_mod=...)`.

    Returns:
      `(*B, T, N, h)` in `dtype`, or in the promoted dtype.

    Raises:
      ValueError: a shape does not fit, a hook is given, dropout has no key, or semantics have a
        setting of layers (`add_zero_attn`, `qk_norm`, `clip_qkv`).
      TypeError: a dtype does not fit, or arguments after `module` are given by position.

    Source: flax/linen/attention.py and flax/nnx/nn/attention.py of flax 0.12.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen as nn
    >>> layer = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention_fn)
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((3, 5, 6)))[0].shape
    (3, 5, 6)
    """
    reject_hooks(
        dtypes.promote_dtype,
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
        promote_dtype=promote_dtype,
        instead="leave it out, here and in the module",
    )
    if not isinstance(force_fp32_for_softmax, bool):  # nnx has another argument at this position
        raise TypeError(
            "force_fp32_for_softmax must be a bool; arguments after module are given by name"
        )
    read = behaviour(
        semantics,
        dropout_rate=dropout_rate,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        force_fp32_for_softmax=force_fp32_for_softmax,
    )
    _refuse_settings_of_layers(read, dropout_rate)
    drops = read.dropout_rate > 0 and not deterministic
    if drops and dropout_rng is None:
        raise ValueError(f"dropout_rate={read.dropout_rate} needs a dropout_rng, or deterministic")
    require_features(query=query, key=key, value=value)
    require_arrays(optional=True, bias=bias)
    checks.reject_rounding(query=query, key=key, value=value, bias=bias)
    _check_heads(query, key, value)
    query, key, value = (jnp.asarray(cast(x, dtype)) for x in (query, key, value))
    query, key = rotated(query, key, rotate, input_positions)
    if force_fp32_for_softmax and query.dtype != np.float64:  # flax keeps the weights in float32
        query, key, value = cast((query, key, value), np.float32)
    mask = read_mask(mask, is_causal=is_causal, semantics=read)
    dtype = checks.promoted(query=query, key=key, value=value)
    mods = traced_mods(score_mod, mask_mod, dtype)
    drawn = dropout_rng if drops else None
    settings = CallSettings(read, drawn, module is not None, implementation, mods)
    out, weights = attend_heads(query, key, value, bias, mask, settings)
    if module is not None:
        sow(module, weights)
    return out


def _refuse_settings_of_layers(semantics: Semantics, dropout_rate: float) -> None:
    """Raises ValueError for settings that only a layer applies, and for a dropout rate that only
    `semantics` sets."""
    if semantics.add_zero_attn or semantics.qk_norm is not None or semantics.clip_qkv is not None:
        raise ValueError(
            "semantics: add_zero_attn, qk_norm and clip_qkv belong to a layer; use "
            "jaxmha.flax.linen.MultiHeadDotProductAttention or jaxmha.flax.nnx.MultiHeadAttention"
        )
    if semantics.dropout_rate > 0 and not dropout_rate:
        raise ValueError(
            f"semantics.dropout_rate={semantics.dropout_rate} alone has no effect, since flax's "
            "modules pass their own: set dropout_rate there, or replace(semantics, dropout_rate=0.0)"
        )


def _check_heads(query: Array, key: Array, value: Array) -> None:
    """Raises ValueError if the axes of query, key and value do not fit together."""
    if not (
        query.ndim == key.ndim == value.ndim >= 3
        and query.shape[:-3] == key.shape[:-3]
        and key.shape[:-1] == value.shape[:-1]
        and query.shape[-1] == key.shape[-1]
    ):
        raise ValueError(
            "expected query (*B, T, N, H), key (*B, S, K, H) and value (*B, S, K, h) with the same "
            f"*B, S, K and H, got shapes {query.shape}, {key.shape}, {value.shape}"
        )


def sow(module: Any, weights: jax.Array | None) -> None:
    """Sows the weights in a module for inspection, under the same name as flax."""
    collection = nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates"
    module.sow(collection, "attention_weights", weights)
