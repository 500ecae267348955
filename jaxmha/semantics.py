"""Behaviour that is not a weight."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

import jax
import numpy as np

from jaxmha.arrays import DTypeLike

FullyMasked: TypeAlias = Literal["zero", "nan", "mean"]
ReturnWeights: TypeAlias = bool | Literal["before_dropout", "after_dropout"]
Precision: TypeAlias = str | jax.lax.Precision | None


@jax.tree_util.register_static
@dataclass(frozen=True)
class Semantics:
    """How attention behaves: one frozen, hashable value, static under jit.

    Attributes:
      scale: factor of the logits; None: `H ** -0.5`.
      logits_soft_cap: c > 0 turns scaled logits x into `c * tanh(x / c)`, before the bias.
      fully_masked: the answer of a row with nothing left to attend: `zero` (its weights too),
        `nan`, or `mean` of the values over all key positions.
      softmax_dtype: None: at least float32; float64 stays float64.
      precision: of matrix products, as in `jax.lax.dot_general`; None: `jax_default_matmul_precision`
        where that is set, else `highest`: float32 is float32 on every platform.
      dropout_rate: probability that a weight is dropped; acts only where a key is given.
      dropout_broadcast: axes of BNTS that share a draw; flax shares over `("B", "N")`.
      add_zero_attn: an extra position whose key and value are zero.
      qk_norm: normalisation of projected queries and keys over H, scaled by
        `MHAParams.query_norm` and `.key_norm`: `layer` (subtracts the mean) or `rms`.
      qk_norm_epsilon: added to the variance.

    Raises:
      ValueError: a field is outside its range.

    >>> Semantics(fully_masked="mean").scale is None
    True
    """

    scale: float | None = None
    logits_soft_cap: float | None = None
    fully_masked: FullyMasked = "zero"
    softmax_dtype: DTypeLike | None = None
    precision: Precision = None
    dropout_rate: float = 0.0
    dropout_broadcast: tuple[str, ...] = ()
    add_zero_attn: bool = False
    qk_norm: Literal["layer", "rms"] | None = None
    qk_norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        one_of("fully_masked", self.fully_masked, get_args(FullyMasked))
        one_of("qk_norm", self.qk_norm, (None, "layer", "rms"))
        for name in ("scale", "logits_soft_cap", "dropout_rate", "qk_norm_epsilon"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _number(name, getattr(self, name)))
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ValueError(f"dropout_rate must be in [0, 1), got {self.dropout_rate}")
        if not set(self.dropout_broadcast) <= set("BNTS"):
            raise ValueError(
                f"dropout_broadcast names axes of B, N, T, S, got {self.dropout_broadcast}"
            )
        if self.logits_soft_cap is not None and not self.logits_soft_cap > 0:
            raise ValueError(f"logits_soft_cap must be positive, got {self.logits_soft_cap}")
        if not self.qk_norm_epsilon >= 0:
            raise ValueError(f"qk_norm_epsilon must be >= 0, got {self.qk_norm_epsilon}")
        if self.softmax_dtype is not None:
            dtype = np.dtype(self.softmax_dtype)
            if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
                raise ValueError(f"softmax_dtype must be a floating dtype, got {dtype}")
            object.__setattr__(self, "softmax_dtype", dtype)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name} must be a Python number, since it is static, got {type(value).__name__}"
            f"{': multiply the queries by it instead' if name == 'scale' else ''}"
        )
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)


def one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raises ValueError unless `value` is one of `choices`."""
    if not any(value is choice or value == choice for choice in choices):
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
