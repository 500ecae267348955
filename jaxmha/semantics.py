"""`Semantics`: the behaviour of a layer apart from its weights, and presets of the frameworks."""

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import numpy as np

from jaxmha import static_checks
from jaxmha.arrays import DTypeLike, as_dtype, to_dtype

FullyMasked: TypeAlias = Literal["zero", "nan", "mean"]
ReturnWeights: TypeAlias = bool | Literal["before_dropout", "after_dropout"]
Precision: TypeAlias = jax.lax.PrecisionLike


class Path(NamedTuple):
    """The behaviour of one code path of a framework.

    Attributes:
      fully_masked: output of a fully masked row.
      softmax: dtype of the softmax: `input`, `float32`, or None: at least float32.
      weights: the weights that it returns, "before_dropout" or "after_dropout"; None: it returns none.
      dropout_broadcast: axes of BNTS along which the dropout mask is the same.
    """

    fully_masked: FullyMasked
    softmax: Literal["input", "float32"] | None = None
    weights: Literal["before_dropout", "after_dropout"] | None = None
    dropout_broadcast: tuple[str, ...] = ()


# Fields of `Semantics` that describe the norms of queries and keys.
NORM_FIELDS = (
    "qk_norm",
    "qk_norm_epsilon",
    "qk_norm_scope",
    "qk_norm_offset",
    "qk_norm_learned",
)
_NUMBERS = ("dropout_rate", "qk_norm_epsilon", "qk_norm_offset")
_OPTIONAL_NUMBERS = ("scale", "logits_soft_cap", "clip_qkv")

# Measured with torch 2.13, keras 3.15, flax 0.12 and jax 0.10 on CPU.
PATHS: dict[str, dict[str, Path]] = {
    "torch": {
        "weights": Path("nan", "input", "after_dropout"),
        "sdpa": Path("zero"),
        "native": Path("nan", "input", "after_dropout"),
    },
    "torch_sdpa": {"sdpa": Path("zero")},
    "keras": {
        "fused": Path("mean", "float32"),
        "scores": Path("zero", "input", "before_dropout"),
    },
    "flax": {
        "weights": Path("mean", "input", "before_dropout", ("B", "N")),
        "fused": Path("mean", "float32"),
    },
    "jax": {"fused": Path("mean", "float32")},
    "equinox": {"weights": Path("mean")},
    "haiku": {"weights": Path("mean", "input")},
}


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class Semantics:
    """How attention behaves: one frozen, hashable value, static under jit.

    Attributes:
      scale: factor of the logits; None: `H ** -0.5`.
      logits_soft_cap: c > 0 turns scaled logits x into `c * tanh(x / c)`, before the bias.
      fully_masked: the output of a fully masked row: `zero` (its weights too), `nan`, or `mean` of
        the values over all key positions.
      softmax_dtype: None: at least float32; float64 stays float64.
      precision: of matmuls, as in `jax.lax.dot_general`; None: `jax_default_matmul_precision` if
        that is set, else `highest`: float32 is float32 on every platform, and bfloat16 operands are
        multiplied directly, with float32 accumulation, on devices that support it.
      dropout_rate: probability that a weight is dropped; has no effect without a dropout key.
      dropout_broadcast: axes of BNTS that share a draw; flax shares over `("B", "N")`.
      add_zero_attn: adds a position whose key and value are zero.
      qk_norm: normalisation of projected queries and keys, scaled by `MHAParams.query_norm` and
        `.key_norm`: `layer` (subtracts the mean) or `rms`.
      qk_norm_epsilon: added to the variance.
      qk_norm_scope: `head` takes mean and variance over H, in each head; `heads` takes them over N
        and H (K and H for keys).
      qk_norm_offset: added to the scales: 1.0 where a model stores `scale - 1` (Gemma 3).
      qk_norm_learned: False: queries and keys are normalised without learned scales.
      clip_qkv: c > 0 clips projected queries, keys and values to [-c, c], after the norms.
      local_window_size: (left, right): `i - left <= j <= i + right`, in every call of a layer, in
        addition to its masks; None for one side, or for both: no bound.
      attention_axes: the axes of the inputs over which a layer attends (Keras' `attention_axes`),
        merged to one sequence, in which the last given axis varies fastest. Other axes are batch
        axes. None: the axis before the features.

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
    qk_norm_scope: Literal["head", "heads"] = "head"
    qk_norm_offset: float = 0.0
    qk_norm_learned: bool = True
    clip_qkv: float | None = None
    local_window_size: tuple[int | None, int | None] | None = None
    attention_axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        static_checks.one_of("fully_masked", self.fully_masked, get_args(FullyMasked))
        static_checks.one_of("qk_norm", self.qk_norm, (None, "layer", "rms"))
        static_checks.one_of("qk_norm_scope", self.qk_norm_scope, ("head", "heads"))
        static_checks.one_of("qk_norm_learned", self.qk_norm_learned, (True, False))
        for name in (*_NUMBERS, *_OPTIONAL_NUMBERS):
            if name in _NUMBERS or getattr(self, name) is not None:
                object.__setattr__(self, name, static_checks.number(name, getattr(self, name)))
        object.__setattr__(
            self, "add_zero_attn", static_checks.flag("add_zero_attn", self.add_zero_attn)
        )
        object.__setattr__(self, "precision", static_checks.precision(self.precision))
        object.__setattr__(self, "local_window_size", static_checks.window(self.local_window_size))
        object.__setattr__(
            self, "attention_axes", static_checks.attention_axes(self.attention_axes)
        )
        if not 0.0 <= self.dropout_rate < 1.0:
            raise ValueError(f"dropout_rate must be in [0, 1), got {self.dropout_rate}")
        object.__setattr__(
            self, "dropout_broadcast", static_checks.names_of_axes(self.dropout_broadcast)
        )
        for name in ("logits_soft_cap", "clip_qkv"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.qk_norm_epsilon >= 0:
            raise ValueError(f"qk_norm_epsilon must be >= 0, got {self.qk_norm_epsilon}")
        if self.softmax_dtype is not None:
            dtype = as_dtype("softmax_dtype", self.softmax_dtype)
            if not jax.numpy.issubdtype(dtype, jax.numpy.floating):
                raise ValueError(f"softmax_dtype must be a floating dtype, got {dtype}")
            if not np.isneginf(np.array(-np.inf).astype(dtype).astype(np.float64)):
                raise ValueError(
                    f"softmax_dtype must hold -inf, the logit of an excluded key, got {dtype}"
                )
            object.__setattr__(self, "softmax_dtype", dtype)

    def _compared(self) -> tuple[object, ...]:
        """The fields to compare, with the softmax dtype by name.

        `np.dtype("float64") == None` is True in NumPy: jit would take the program of one for the other.
        """
        dtype = None if self.softmax_dtype is None else to_dtype(self.softmax_dtype).name
        return tuple((vars(self) | {"softmax_dtype": dtype}).values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Semantics) and self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash(self._compared())

    @classmethod
    def torch(
        cls,
        path: Literal["weights", "sdpa", "native"] = "weights",
        *,
        dtype: DTypeLike | None = None,
        **fields: Any,
    ) -> "Semantics":
        """A code path of `torch.nn.MultiheadAttention`; `jaxmha.converters.torch.path_of` names it.

        Args:
          path: `weights`: `need_weights=True`, the default, in training; `sdpa`:
            `need_weights=False`; `native`: both in eval mode, if torch takes its fast path.
          dtype: dtype of the inputs, and of the softmax except for `sdpa`, so that half precision
            overflows as in torch. Other roundings of torch are not reproduced.
          fields: further fields, such as `dropout_rate` and `add_zero_attn`.

        torch returns the weights after dropout: give `return_weights="after_dropout"`.

        >>> Semantics.torch("weights").fully_masked, Semantics.torch("sdpa").fully_masked
        ('nan', 'zero')
        """
        return cls._preset("torch", path, dtype, fields)

    @classmethod
    def torch_sdpa(cls, **fields: Any) -> "Semantics":
        """`torch.nn.functional.scaled_dot_product_attention`, with any of its CPU kernels.

        >>> Semantics.torch_sdpa(scale=0.5).fully_masked
        'zero'
        """
        return cls._preset("torch_sdpa", "sdpa", None, fields)

    @classmethod
    def keras(
        cls,
        path: Literal["fused", "scores"] = "fused",
        *,
        dtype: DTypeLike | None = None,
        **fields: Any,
    ) -> "Semantics":
        """A code path of `keras.layers.MultiHeadAttention` and `GroupQueryAttention`.

        Args:
          path: `fused`: without dropout and scores; `scores`: with a dropout rate above 0, even
            at inference, or `return_attention_scores`, or inputs of a rank other than 3.
          dtype: compute dtype, in which `scores` computes its softmax.
          fields: further fields, such as `dropout_rate`.

        The softmax of `fused` is float32, for float64 too (Keras on TensorFlow stays in float64:
        give `softmax_dtype=None`).

        Keras returns the scores before dropout. Its finite mask constants are not reproduced: they
        differ from exclusion only where logits are as low as the constants (-3e4 in float16).

        >>> Semantics.keras("scores", dropout_rate=0.1).fully_masked
        'zero'
        """
        return cls._preset("keras", path, dtype, fields)

    @classmethod
    def flax(
        cls,
        path: Literal["weights", "fused"] = "weights",
        *,
        dtype: DTypeLike | None = None,
        **fields: Any,
    ) -> "Semantics":
        """A code path of flax's attention layers, where batch rows and heads share a dropout draw.

        Args:
          path: `weights`: linen always, nnx with dropout or `sow_weights`; `fused`: nnx otherwise,
            which is `jax.nn.dot_product_attention`.
          dtype: compute dtype, in which `weights` computes its softmax.
          fields: further fields; `dropout_broadcast=()` is `broadcast_dropout=False`.

        flax returns the weights before dropout.

        >>> Semantics.flax(dropout_rate=0.1).dropout_broadcast
        ('B', 'N')
        """
        return cls._preset("flax", path, dtype, fields)

    @classmethod
    def jax(cls, **fields: Any) -> "Semantics":
        """`jax.nn.dot_product_attention`: softmax in float32, also for float64.

        A row that a bias of -inf masks fully is NaN in `jax.nn`; here it is the mean of the values.

        >>> Semantics.jax().fully_masked
        'mean'
        """
        return cls._preset("jax", "fused", None, fields)

    @classmethod
    def equinox(cls, **fields: Any) -> "Semantics":
        """`equinox.nn.MultiheadAttention`: softmax in at least float32.

        >>> Semantics.equinox(dropout_rate=0.1).fully_masked
        'mean'
        """
        return cls._preset("equinox", "weights", None, fields)

    @classmethod
    def haiku(cls, *, dtype: DTypeLike | None = None, **fields: Any) -> "Semantics":
        """`haiku.MultiHeadAttention`: softmax in `dtype`, the dtype of the inputs.

        Its constant for masked logits, -1e30, is -inf in float16, where a fully masked row is NaN:
        give `fully_masked="nan"`.

        >>> Semantics.haiku().fully_masked
        'mean'
        """
        return cls._preset("haiku", "weights", dtype, fields)

    @classmethod
    def _preset(
        cls, framework: str, path: str, dtype: DTypeLike | None, fields: dict[str, Any]
    ) -> "Semantics":
        static_checks.one_of("path", path, tuple(PATHS[framework]))
        row = PATHS[framework][path]
        softmax = dtype if row.softmax == "input" else row.softmax
        return cls(
            **{
                "fully_masked": row.fully_masked,
                "softmax_dtype": softmax,
                "dropout_broadcast": row.dropout_broadcast,
                **fields,
            }
        )


def logit_scale(semantics: Semantics, features: int) -> float:
    """The factor of the logits, by default 1 over the square root of a head's features."""
    return features**-0.5 if semantics.scale is None else semantics.scale


def reject_axes(semantics: Semantics) -> None:
    """Raises ValueError for `attention_axes`, which only `multi_head_attention` reads."""
    if semantics.attention_axes is not None:
        raise ValueError(
            f"semantics.attention_axes={semantics.attention_axes} is for multi_head_attention: here, "
            "move the attended axis before that of the features"
        )


def with_norms(semantics: Semantics, scales: bool) -> Semantics:
    """Returns `semantics` without norms if these have learned scales and the layer has no scales.

    `scales`: True if the layer has scales of norms.
    """
    if scales or not semantics.qk_norm_learned:
        return semantics
    default = Semantics()
    return replace(semantics, **{name: getattr(default, name) for name in NORM_FIELDS})
