"""Extra positions that a layer appends to its S keys and values: `bias_k`/`bias_v`, then zeros.

Source: `torch.nn.MultiheadAttention`, arguments `add_bias_kv` and `add_zero_attn`.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxmha import sharding
from jaxmha.arrays import Array
from jaxmha.checks import flatten_bias, flatten_mask
from jaxmha.mask import Mask
from jaxmha.params import MHAParams
from jaxmha.semantics import Semantics


def count(params: MHAParams, semantics: Semantics) -> int:
    """Returns the number of extra positions of a layer: 0, 1 or 2.

    Raises:
      ValueError: there are extra positions, and positions are in zig-zag order.
    """
    found = (params.bias_k is not None) + semantics.add_zero_attn
    axes = sharding.current()
    if found and axes is not None and axes.zigzag:
        raise ValueError(
            "extra positions (params.bias_k, semantics.add_zero_attn) follow the S given ones and "
            "cannot be in zig-zag order: leave zigzag out of jaxmha.sharding.use and give features "
            "in their natural order"
        )
    return found


def append(heads: jax.Array, learned: Array | None, semantics: Semantics) -> jax.Array:
    """Appends the learned position (`bias_k` or `bias_v`) and the position of zeros to `heads`."""
    B, _, K, size = heads.shape
    rows = [heads]
    if learned is not None:
        row = jnp.asarray(learned).astype(heads.dtype).reshape(1, 1, K, size)
        rows.append(jnp.broadcast_to(row, (B, 1, K, size)))
    if semantics.add_zero_attn:
        rows.append(jnp.zeros((B, 1, K, size), heads.dtype))
    return jnp.concatenate(rows, axis=1) if len(rows) > 1 else heads


def widen_bias(
    bias: Array | None, extra: int, batch: Sequence[int], sizes: dict[str, int]
) -> jax.Array | None:
    """Returns the bias over S and the extra positions, 0 there; a bias that covers them is kept."""
    if bias is None:
        return None
    if extra == 0 or _names_extras(bias, extra, sizes):
        return flatten_bias(bias, batch, sizes | {"S": sizes["S"] + extra})
    flat = flatten_bias(bias, batch, sizes)
    full = jnp.broadcast_to(flat, (*flat.shape[:3], sizes["S"]))
    return jnp.pad(full, ((0, 0),) * 3 + ((0, extra),))


def widen_mask(mask: Mask, extra: int, batch: Sequence[int], sizes: dict[str, int]) -> Mask:
    """Returns the mask over S and the extra positions, True there; an array that covers them is kept.

    Invalid query rows attend nothing, not even extra positions.
    """
    if extra == 0:
        return flatten_mask(mask, batch, sizes)
    explicit = mask.array is not None and _names_extras(mask.array, extra, sizes)
    given = flatten_mask(replace(mask, array=None) if explicit else mask, batch, sizes)
    wide = Mask(query_lengths=given.query_lengths, query_padding=given.query_padding)
    if not given.empty:
        array = given.to_array(sizes["T"], sizes["S"])
        wide &= Mask(array=jnp.pad(array, ((0, 0),) * 3 + ((0, extra),), constant_values=True))
    if explicit:
        own = Mask(array=mask.array)
        wide &= flatten_mask(own, batch, sizes | {"S": sizes["S"] + extra})
    return wide


def _names_extras(array: Array, extra: int, sizes: dict[str, int]) -> bool:
    return array.ndim > 0 and array.shape[-1] == sizes["S"] + extra
