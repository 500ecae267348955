"""The operands and static config of the native attention kernels."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.implementations.tiled.block_mask import Conditions
from jaxmha.matmul import split_scale

# A bound that masks nothing: larger than any position.
FAR = 2**40


class Settings(NamedTuple):
    """The static config of an attention kernel.

    Attributes:
      scale: factor of the logits.
      soft_cap: soft cap of the logits; None: no soft cap.
      below, above: static bounds, `i - below <= j <= i + above`; FAR: no bound.
      out: dtype of the output of the forward pass.
      gradient: in the forward pass, whether a backward pass will read its row max and row sum.
      in_parts: whether there is a gradient, and calls of the forward or the backward pass get only
        some of the queries or keys. Both passes must round each logit alike, though their calls
        differ in size, and so sum its products in the same order: kernels that only some sizes
        have, and that sum in another order, are not used.
    """

    scale: float
    soft_cap: float | None
    below: int
    above: int
    out: np.dtype[Any]
    gradient: bool = False
    in_parts: bool = False

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of an FFI call. Their `scale` is a power of two, and times `rest` it is the
        scale of the logits; a soft cap of 0 is none."""
        return {
            "scale": np.float32(split_scale(self.scale)[0]),
            "rest": np.float32(split_scale(self.scale)[1]),
            "soft_cap": np.float32(self.soft_cap or 0.0),
            "below": np.int64(self.below),
            "above": np.int64(self.above),
            "in_parts": self.in_parts,
        }


class Problem(NamedTuple):
    """Operands of every attention kernel; an array without elements stands for an absent operand.

    All operands have the same number of leading batch axes, each of full size or 1. vmap adds one
    more at the front, so the kernels count the other axes from the last. Axes b, n, t and s have
    full size or 1.

    Attributes:
      query, key, value: `B T N H`, `B S K H` and `B S K h`, of one dtype.
      bias: `b n t s`, float32, -inf excludes a pair; or, if T > 1, `b n 1 (T + S - 1)`, the bias of
        every distance j - i, from 1 - T on.
      allowed: `b n t s`, the dense mask.
      bits: `b n t8 S`, uint8, another dense mask: bit r of byte i is query `8 * i + r`, and t8 is
        T / 8, rounded up.
      rows, keys: `b T` and `b S`, valid queries and valid keys.
      query_ids, key_ids: `b T` and `b S`, segment ids of queries and keys.
      offset: `b`, causal offsets: `j <= i + offset`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array
    allowed: jax.Array
    bits: jax.Array
    rows: jax.Array
    keys: jax.Array
    query_ids: jax.Array
    key_ids: jax.Array
    offset: jax.Array


class Residuals(NamedTuple):
    """Further operands of the backward pass, with the same batch axes as `Problem`.

    Attributes:
      row_max: `B N T`, row max of the logits, divided by `unit(settings, problem)`; the lowest
        float32 on fully masked rows.
      row_sum: `B N T`, row sum of exp(logit - row max); 0 on fully masked rows.
      d_out: `B T N h`, cotangent of the output.
      d_lse: `B N T`, cotangent of the lse, or absent.
    """

    row_max: jax.Array
    row_sum: jax.Array
    d_out: jax.Array
    d_lse: jax.Array


# Number of axes of each field of `Problem` and `Residuals` after the batch axes.
RANKS: tuple[int, ...] = (3, 3, 3, 3, 3, 3, 1, 1, 1, 1, 0)
RANKS_OF_RESIDUALS: tuple[int, ...] = (2, 2, 3, 2)


def absent(dtype: Any) -> jax.Array:
    """An array without elements, in place of an operand that the request lacks."""
    return jnp.zeros((0,), dtype)


def unit(settings: Settings, problem: Problem) -> float:
    """The row max of the logits divided by the one that kernels return: the part of the scale that is
    not a power of two (`split_scale`), or 1 if there is a soft cap or a bias."""
    whole = settings.soft_cap is not None or problem.bias.size
    return 1.0 if whole else split_scale(settings.scale)[1]


def lse(settings: Settings, problem: Problem, row_max: jax.Array, row_sum: jax.Array) -> jax.Array:
    """The lse `B N T` of the logits, -inf on fully masked rows, from row max and row sum as in
    `Residuals`."""
    return row_max * unit(settings, problem) + jnp.log(row_sum)


def given(x: Any) -> Any:
    """The operand, or None if it is absent."""
    return x if x.size else None


def problem(query: Any, key: Any, value: Any, bias: Any, conditions: Conditions) -> Problem:
    """Operands of a request, `bits` absent; the window and a static causal offset are left to
    `Settings`, and a mask function to the caller.

    No size is 0, which would make an operand absent.
    """

    def or_absent(x: Any, dtype: Any) -> Any:
        return absent(dtype) if x is None else jnp.asarray(x, dtype)

    ids = conditions.segments or (None, None)
    offset = None if isinstance(conditions.above, int) else conditions.above
    return Problem(
        query,
        key,
        value,
        or_absent(bias, jnp.float32),
        or_absent(conditions.array, jnp.bool_),
        absent(np.uint8),
        or_absent(conditions.rows, jnp.bool_),
        or_absent(conditions.keys, jnp.bool_),
        or_absent(ids[0], jnp.int32),
        or_absent(ids[1], jnp.int32),
        or_absent(offset, jnp.int32),
    )


def bounds(conditions: Conditions) -> tuple[int, int]:
    """The static bounds of conditions, (below, above) of `Settings`; FAR where there is none."""
    left, right = conditions.window
    above = [x for x in (right, conditions.above) if isinstance(x, int)]
    return FAR if left is None else left, min([FAR, *above])


def batch(arrays: tuple[Any, ...], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of the batch axes, broadcast over all operands that are present. `ranks`: the number of
    axes of each operand after its batch axes."""
    shapes = [x.shape[: x.ndim - n] for x, n in zip(arrays, ranks, strict=True) if x.size]
    return np.broadcast_shapes(*shapes)
