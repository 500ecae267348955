"""Zeroes features that a mask excludes, for modules whose projections belong to another library."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxmha import checks
from jaxmha.arrays import Array
from jaxmha.explicit_sharding import by_types, sharding_of_heads, specs_of_leaves
from jaxmha.layer import attended_features
from jaxmha.mask import Mask
from jaxmha.mask_arguments import as_mask, with_window
from jaxmha.mod_arguments import MaskMod, Mods, traced_mods
from jaxmha.semantics import Semantics
from jaxmha.sharding import Axes


def zero_unattended(
    features: tuple[Float[Array, "*B T Dq"], Float[Array, "*#B S Dk"], Float[Array, "*#B S Dv"]],
    N: int,
    bias: Float[Array, "..."] | None,
    mask: Array | Mask | None,
    semantics: Semantics,
    mask_mod: MaskMod | None,
    *,
    keep_finite: bool = False,
) -> tuple[Array, Array, Array]:
    """Zeroes query, key and value features at positions that cannot affect attention of N heads.

    If they hold NaN, gradients of the projections would be 0 * NaN. Where nothing can exclude a
    position (no mask, window, bias or mask function), the features are returned as they are.

    `keep_finite`: zeroes only positions with a feature that is not finite, for heads that mix
    positions after the projection.
    """
    structure = with_window(as_mask(mask), semantics)
    if structure.empty and bias is None and mask_mod is None:
        return features
    if min(x.ndim for x in features) < 2 or features[1].shape[-2] != features[2].shape[-2]:
        return features  # the layer raises for these shapes
    mods = traced_mods(None, mask_mod, features[0].dtype)
    found: tuple[Array, Array, Array] = _zeroed(
        features, bias, structure, semantics, mods, N=N, keep_finite=keep_finite
    )
    return found


def _specs(features: tuple[Array, ...], *_: object, **__: object) -> tuple[Axes, object] | None:
    found = sharding_of_heads(jnp.expand_dims(features[0], -1))
    return found and (found.axes, specs_of_leaves(features))


@partial(jax.jit, static_argnames=("N", "keep_finite"))
@by_types(_specs)
def _zeroed(
    features: tuple[jax.Array, jax.Array, jax.Array],
    bias: jax.Array | None,
    mask: Mask,
    semantics: Semantics,
    mods: Mods,
    *,
    N: int,
    keep_finite: bool,
) -> tuple[jax.Array, ...]:
    batch, T = features[0].shape[:-2], features[0].shape[-2]
    sizes = {"T": T, "N": N, "S": features[1].shape[-2]}
    # All batch axes are one here, because masks and biases have one batch axis or none.
    flat = (math.prod(batch),) if batch else ()
    attended = attended_features(
        math.prod(batch),
        None if bias is None else checks.flatten_bias(bias, flat, sizes),
        checks.flatten_mask(mask, flat, sizes),
        sizes,
        0,
        semantics.fully_masked,
        mods.mask,
    )
    found = []
    for x, kept in zip(features, attended[:3], strict=True):
        if kept is not None:
            kept = _in_own_batch(kept, x.shape[:-2], batch)[..., None]
            kept = kept | jnp.isfinite(x).all(-1, keepdims=True) if keep_finite else kept
            x = jnp.where(kept, x, 0.0)
        found.append(x)
    return tuple(found)


def _in_own_batch(kept: jax.Array, own: tuple[int, ...], batch: tuple[int, ...]) -> jax.Array:
    """Reduces positions of the flattened batch to the batch axes of an input, some of which may be 1
    or, from the left, missing: a row of it that several batch rows read counts if one of them does."""
    kept = kept.reshape(*batch, kept.shape[-1]).any(tuple(range(len(batch) - len(own))))
    ones = tuple(axis for axis, size in enumerate(own) if size == 1)
    return kept.any(ones, keepdims=True)
