"""Attention of new tokens over a cache by a native kernel, which reads keys and values in place."""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.arrays import Array
from jaxmha.implementations.native.operands import FAR, absent
from jaxmha.implementations.native.replacing import in_place_of_xla, unavailable

# The dtypes of keys and values that the kernel reads.
STORED = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")


class Settings(NamedTuple):
    """The static config of one step, in which the queries of new tokens attend a cache.

    Attributes:
      tokens: T, the number of new tokens of each batch row.
      left: left bound of the window, `i - left <= j`; None: no bound.
      soft_cap: soft cap of the logits; None: no soft cap.
      in_xla: `(settings, operands)` -> the results of `attend`, computed in plain XLA.
      context: further static values that `in_xla` reads.
    """

    tokens: int
    left: int | None
    soft_cap: float | None
    in_xla: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    context: Hashable

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the FFI call, in which 0 means no soft cap and FAR no left bound."""
        return {
            "soft_cap": np.float32(self.soft_cap or 0.0),
            "tokens": np.int64(self.tokens),
            "left": np.int64(FAR if self.left is None else self.left),
        }

    def shapes(self, rows: Any, _: Any, value: Any, *__: Any) -> list[tuple[tuple[int, ...], Any]]:
        """Shapes and dtypes of the results of `attend`, given the fields of `Operands`."""
        of_rows = rows.shape[:3], np.float32
        return [((*rows.shape[:3], value.shape[3]), np.float32), of_rows, of_rows]


class Operands(NamedTuple):
    """Operands of the kernel; an array without elements stands for an absent operand.

    Slot s holds the latest token whose position is s modulo the number of slots, `M * page`.

    Attributes:
      rows: `B K r H`, queries times the scale, float32; `r = G * T`: query heads of a group, then
        new tokens.
      key, value: `P K page H` and `P K page h`, P pages of slots. A dense cache has one page per
        batch row.
      key_scale, value_scale: `P K page`, factors of stored keys and values; absent: 1.
      table: `B M`, the pages of each batch row, in the order of its slots; absent in a dense cache.
      lengths: `B`, the number of tokens written so far, with the new ones.
      first: `B`, the position of the first new token.
      allowed: `b n t s`, the dense mask of new tokens and slots, each axis full or 1; or absent.
    """

    rows: jax.Array
    key: jax.Array
    value: jax.Array
    key_scale: jax.Array
    value_scale: jax.Array
    table: jax.Array
    lengths: jax.Array
    first: jax.Array
    allowed: jax.Array


def unsupported_reason(rows: Array, key: Array, value: Array) -> str | None:
    """Returns None if the kernel can compute a step with these fields of `Operands`, else the reason
    why not."""
    if rows.dtype != np.float32:
        return f"rows are float32, got {rows.dtype}"
    if key.dtype != value.dtype or key.dtype.name not in STORED:
        return f"keys and values of one dtype among {', '.join(STORED)}, got {key.dtype}"
    if not all(isinstance(size, int) for size in (*rows.shape, *key.shape, *value.shape)):
        return "sizes must be known"
    return unavailable()


def operands(rows: Any, key: Any, value: Any, lengths: Any, first: Any, **others: Any) -> Operands:
    """The operands of a step; all but rows, key and value are cast to the dtypes that the kernel reads.
    `others`: key_scale, value_scale, table and allowed, all four; None: absent."""
    dtypes: dict[str, Any] = dict.fromkeys(("key_scale", "value_scale"), np.float32)
    dtypes |= {"table": np.int32, "allowed": np.bool_}
    given = {
        name: absent(dtype) if others[name] is None else jnp.asarray(others[name], dtype)
        for name, dtype in dtypes.items()
    }
    counts = (jnp.asarray(x).astype(np.int32) for x in (lengths, first))
    lengths, first = counts
    return Operands(rows, key, value, lengths=lengths, first=first, **given)


def attend(settings: Settings, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Softmax state of the rows: output `B K r h` before its division by the row sum, and row max
    and row sum `B K r`."""
    out, row_max, row_sum = in_place_of_xla("attend_cache").bind(*operands, settings=settings)
    return out, row_max, row_sum
