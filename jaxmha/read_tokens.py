"""Finds the tokens of a call that affect attention over a cache.

Callers zero all other tokens, so that NaN in them reaches neither outputs nor gradients.

A later call may attend keys that a Boolean array or a mask function excludes in this one. Only
lengths and key/value padding, which every call repeats, exclude a key for good. Its token is padding:
the query of the token does not count either.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxmha.arrays import Array
from jaxmha.decoding_checks import prompt_lengths
from jaxmha.layer import Attended, attended_features
from jaxmha.mask import Mask
from jaxmha.mod_arguments import Mods
from jaxmha.semantics import FullyMasked


def of_prompts(
    x: Float[jax.Array, "B T D"],
    mask: Mask,
    causal: Mask,
    sizes: dict[str, int],
    mods: Mods,
    policy: FullyMasked,
    extra: int = 0,
) -> Attended:
    """Returns the tokens of prompts that affect attention, now or in later calls.

    `causal`: `mask` and the causal mask, with one batch axis, over T tokens and `extra` positions.
    """
    B, T = x.shape[:2]
    sizes = {**sizes, "S": T}
    found = attended_features(B, None, causal, sizes, extra, policy, mods.mask)
    queries, _, _, gates = found
    keys = None
    if mask.key_value_padding is not None:
        keys = jnp.broadcast_to(mask.key_value_padding, (B, T))
    if mask.key_value_lengths is not None:
        keys = _both(_first(prompt_lengths(mask, sizes), T), keys)
    if keys is not None:
        keys = _or_finite(keys, x)
        queries, gates = (_both(keys, kept) for kept in (queries, gates))
    return Attended(queries, keys, None if policy == "mean" else keys, gates)


def of_step(
    x: Float[jax.Array, "B T D"],
    padding: Bool[Array, "#B P"] | None,
    positions: Int[jax.Array, "B T"],
    counts: Int[jax.Array, "B"] | None = None,
) -> Attended:
    """Returns the tokens of a step that affect attention, now or in later calls.

    `positions`: of the tokens. `padding`: True for the valid ones of the first P positions.
    `counts`: the number of tokens of each sequence; None: all T.
    """
    kept = None
    if padding is not None:
        kept = _or_finite(valid_at(jnp.asarray(padding), positions), x)
    if counts is not None:
        kept = _both(_first(counts, positions.shape[1]), kept)
    return Attended(kept, kept, kept, kept)


def valid_at(
    padding: Bool[jax.Array, "#B P"], positions: Int[jax.Array, "B s"]
) -> Bool[jax.Array, "B s"]:
    """Key/value padding at positions. Tokens after its P positions are valid: a ring buffer reuses
    the slots of padding for them. A row without a valid position has no valid token at all."""
    valid = jnp.take_along_axis(padding, positions.clip(0), 1, mode="fill", fill_value=True)
    return valid & padding.any(1, keepdims=True)


def _first(counts: jax.Array, T: int) -> jax.Array:
    return jnp.arange(T, dtype=np.int32)[None] < counts[:, None]


def _both(kept: jax.Array, others: jax.Array | None) -> jax.Array:
    return kept if others is None else kept & others


def _or_finite(valid: jax.Array, x: jax.Array) -> jax.Array:
    """True for valid tokens, and for padding that is finite: it is projected as usual, so that a
    later call that no longer excludes it reads its true keys."""
    return valid | jnp.isfinite(x).all(-1)
