"""Multi-head latent attention: project, attend, combine."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, overload

import jax
from jaxtyping import Bool, Float, Integer, PRNGKeyArray

from jaxmha import checks
from jaxmha.arrays import Array
from jaxmha.attention import attend
from jaxmha.attention_options import hashable
from jaxmha.explicit_sharding import by_types, layer_specs
from jaxmha.implementations import forward_mode
from jaxmha.latent.heads import Latent, check_arguments, check_inputs, flat_positions
from jaxmha.latent.params import LatentParams
from jaxmha.latent.rotation import LatentRotate, static_latent_rotation
from jaxmha.layer import attended_features
from jaxmha.mask import Mask
from jaxmha.mask_arguments import as_mask, with_window
from jaxmha.mod_arguments import MaskMod, Mods, ScoreMod, traced_mods
from jaxmha.semantics import ReturnWeights, Semantics, logit_scale
from jaxmha.static_checks import flag


@overload
def latent_attention(
    params: LatentParams,
    x: Float[Array, "*B T Dq"],
    *,
    positions: Integer[Array, "*#B T"] | None = None,
    rotate: LatentRotate | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    is_causal: bool = False,
    semantics: Semantics = Semantics(),
    dropout_key: PRNGKeyArray | None = None,
    return_weights: Literal[False] = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array: ...
@overload
def latent_attention(
    params: LatentParams,
    x: Float[Array, "*B T Dq"],
    *,
    positions: Integer[Array, "*#B T"] | None = None,
    rotate: LatentRotate | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    is_causal: bool = False,
    semantics: Semantics = Semantics(),
    dropout_key: PRNGKeyArray | None = None,
    return_weights: ReturnWeights,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def latent_attention(
    params: LatentParams,
    x: Float[Array, "*B T Dq"],
    *,
    positions: Integer[Array, "*#B T"] | None = None,
    rotate: LatentRotate | None = None,
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | Mask | None = None,
    is_causal: bool = False,
    semantics: Semantics = Semantics(),
    dropout_key: PRNGKeyArray | None = None,
    return_weights: ReturnWeights = False,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """A whole layer of multi-head latent attention (MLA) over one sequence, as for training.

    It is differentiable, and attends the keys and values of `jaxmha.latent.project`. For decoding
    with a cache of latents see `jaxmha.latent.prefill` and `jaxmha.latent.extend`.

    Args:
      params: the weights; all sizes are read from their shapes.
      x: features `(*B, T, Dq)` with any number of leading batch axes, including none.
      positions: positions of the tokens, for `rotate`; None: 0 to T - 1.
      rotate: `rotate(heads, positions)`, such as `rope`, for the R rotary features of queries and
        of the shared key; None: no rotation. It is a static argument: give the same function in
        every call, or a `functools.partial` of the same function with equal arguments; values that
        it captures must not change. A `latent.ScaledQueries` also multiplies queries by factors of
        their positions.
      bias: added to the logits, broadcastable to `(*B, N, T, T)`; -inf excludes the pair.
      mask: Boolean, broadcastable to `(*B, N, T, T)`, True = attend; or a `Mask`.
      is_causal: query i attends keys j <= i.
      semantics: as in `multi_head_attention`; the scale is `E ** -0.5` by default, and
        `qk_norm_epsilon` is the epsilon of the norms of latents. `qk_norm`, `clip_qkv`,
        `add_zero_attn` and `attention_axes` are not supported.
      dropout_key: a PRNG key; None: no dropout.
      return_weights: also return the weights `(*B, N, T, T)`, `"before_dropout"` (= True) or
        `"after_dropout"`.
      score_mod, mask_mod: score and mask functions, as in `dot_product_attention`.
      implementation: name, or names in order of preference; None: the first that supports the call.

    Returns:
      `out` or `(out, weights)`; out is `(*B, T, Do)`, or `(*B, T, N*h)` where `params.out` is None.

    Raises:
      ValueError: a shape does not fit; names the argument, the axes and the shape received.
      TypeError: a dtype does not fit, or float64 would be rounded because x64 is off.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.

    >>> import jax.numpy as jnp
    >>> from jaxmha import rope
    >>> from jaxmha.latent import init_latent_params
    >>> params = init_latent_params(
    ...     jax.random.key(0), num_heads=3, features=8, latent_dim=6, rotary_dim=4, head_dim=5
    ... )
    >>> latent_attention(params, jnp.ones((2, 7, 8)), rotate=rope, is_causal=True).shape
    (2, 7, 8)
    """
    check_arguments(params, semantics, {"x": x}, positions=positions, bias=bias)
    if dropout_key is not None:
        checks.prng_key("dropout_key", dropout_key)
    mods = Mods()
    if score_mod is not None or mask_mod is not None:
        mods = traced_mods(score_mod, mask_mod, check_inputs(params, x=x).dtype)
    with forward_mode():
        found: jax.Array | tuple[jax.Array, jax.Array] = _latent_attention(
            params,
            x,
            positions,
            bias,
            as_mask(mask),
            dropout_key,
            semantics,
            mods,
            rotate=static_latent_rotation(rotate),
            is_causal=flag("is_causal", is_causal),
            return_weights=checks.weights_kind(return_weights),
            implementation=hashable(implementation),
        )
    return found


@partial(jax.jit, static_argnames=("rotate", "is_causal", "return_weights", "implementation"))
@by_types(layer_specs)
def _latent_attention(
    params: LatentParams,
    x: jax.Array,
    positions: jax.Array | None,
    bias: jax.Array | None,
    mask: Mask,
    dropout_key: PRNGKeyArray | None,
    semantics: Semantics,
    mods: Mods,
    *,
    rotate: LatentRotate | None,
    is_causal: bool,
    return_weights: ReturnWeights,
    implementation: str | tuple[str, ...] | None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    sizes, dtype = check_inputs(params, x=x)
    sizes["S"] = sizes["T"]
    batch = x.shape[:-2]
    B = math.prod(batch)
    structure = with_window(mask & (Mask.causal() if is_causal else Mask()), semantics)
    mask = checks.flatten_mask(structure, batch, sizes)
    bias = None if bias is None else checks.flatten_bias(bias, batch, sizes)
    attended = attended_features(B, bias, mask, sizes, 0, semantics.fully_masked, mods.mask)
    rows = x.reshape(B, *x.shape[-2:])
    at = flat_positions(positions, batch, B, sizes["T"])
    latent = Latent(params, semantics, dtype, rotate, implementation)
    queries = latent.queries(rows, at, attended.queries)
    keys = latent.keys(rows, at, None if attended.values is None else attended.keys)
    result = attend(
        *latent.expanded(queries, keys),
        bias,
        mask,
        with_scale(semantics, sizes),
        dropout_key,
        return_weights,
        implementation,
        mods=mods,
    )
    out = latent.combined(result.out)
    out = out.reshape(*batch, *out.shape[1:])
    if result.weights is None:
        return out
    return out, result.weights.reshape(*batch, *result.weights.shape[1:])


def with_scale(semantics: Semantics, sizes: dict[str, int]) -> Semantics:
    """Semantics with an explicit scale, by default `E ** -0.5`, also for absorbed queries, which
    have C features."""
    return replace(semantics, scale=logit_scale(semantics, sizes["E"]))
