"""Cases of attention as data, shared by tests and benchmarks.

Sizes are different primes, so that no two axes can be confused.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from jaxmha.arrays import to_dtype

DTYPES: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")
# The fields of a case that are keyword arguments as they are.
OPTIONS: tuple[str, ...] = (
    "is_causal", "local_window_size", "scale", "logits_soft_cap", "fully_masked", "dropout_rate",
    "dropout_broadcast",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call of attention. Arrays are described by their axes and drawn from a seed.

    Attributes:
      name: for reports.
      B: batch; None: no batch axis.
      T, S, K, H, h: as in the dimension key; N = K * G.
      bias: axes of the bias, letters of BNTS or 1 ("N1S"); None: no bias.
      bias_excludes: some entries of the bias are -inf.
      mask: axes of the mask, the same way.
      empty_rows: the mask leaves the first row of queries nothing.
      dead_keys: mask and bias exclude the second key from every query.
      query_seq_lengths, key_value_seq_lengths: one per batch row.
      segments: None, "self" (one array, T = S) or "pair".
      sinks: a logit of every head in every softmax.
      is_causal and below: keyword arguments of `dot_product_attention` as they are.
    """

    name: str
    B: int | None = 2
    T: int = 5
    S: int = 7
    K: int = 3
    G: int = 2
    H: int = 11
    h: int = 13
    bias: str | None = None
    bias_excludes: bool = False
    mask: str | None = None
    empty_rows: bool = False
    dead_keys: bool = False
    query_seq_lengths: tuple[int, ...] | None = None
    key_value_seq_lengths: tuple[int, ...] | None = None
    segments: str | None = None
    is_causal: bool = False
    local_window_size: int | tuple[int, int] | None = None
    scale: float | None = None
    logits_soft_cap: float | None = None
    fully_masked: str = "zero"
    dropout_rate: float = 0.0
    dropout_broadcast: tuple[str, ...] = ()
    sinks: bool = False

    @property
    def N(self) -> int:
        """Query heads."""
        return self.K * self.G

    @property
    def batch(self) -> tuple[int, ...]:
        """The batch axes."""
        return () if self.B is None else (self.B,)

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that are not arrays, where they are not the default."""
        defaults = Case("defaults")
        return {
            name: getattr(self, name)
            for name in OPTIONS
            if getattr(self, name) != getattr(defaults, name)
        }


def shaped(*shape: int, dtype: DTypeLike = ml_dtypes.bfloat16) -> Any:
    """An array of which only shape and dtype are known."""
    make: Any = jax.ShapeDtypeStruct
    return make(shape, dtype)


def arrays(case: Case, dtype: DTypeLike = np.float32, seed: int = 0) -> dict[str, Any]:
    """The array arguments of a case, by name, drawn from the seed and rounded to `dtype`."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else to_dtype(dtype)
    N, sizes = case.N, {"B": case.B or 1, "T": case.T, "S": case.S, "N": case.N, "1": 1}

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    found: dict[str, Any] = {
        "query": normal(*case.batch, case.T, N, case.H),
        "key": normal(*case.batch, case.S, case.K, case.H),
        "value": normal(*case.batch, case.S, case.K, case.h),
    }
    if case.bias is not None:
        bias = normal(*(sizes[axis] for axis in case.bias))
        if case.bias_excludes:
            bias[rng.random(bias.shape) < 0.4] = -np.inf
        if case.dead_keys:
            bias[..., 1] = -np.inf
        found["bias"] = bias
    if case.mask is not None:
        mask = rng.random([sizes[axis] for axis in case.mask]) < 0.6
        if case.empty_rows:
            mask[..., 0, :] = False
        if case.dead_keys:
            mask[..., 1] = False
        found["mask"] = mask
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        lengths = getattr(case, name)
        if lengths is not None:
            found[name] = np.asarray(lengths, np.int32)
    if case.segments is not None:
        query_ids, key_value_ids = (
            np.sort(rng.integers(0, 3, (*case.batch, size)), -1).astype(np.int32)
            for size in (case.T, case.S)
        )
        pair = case.segments == "pair"
        found["segment_ids"] = (query_ids, key_value_ids) if pair else query_ids
    if case.sinks:
        found["sinks"] = normal(N)
    return found


EVERYTHING = Case(
    "everything",
    bias="BNTS",
    bias_excludes=True,
    mask="1NTS",
    query_seq_lengths=(3, 5),
    key_value_seq_lengths=(6, 5),
    local_window_size=(3, 2),
    segments="pair",
    scale=0.37,
    logits_soft_cap=1.3,
)

CASES: tuple[Case, ...] = (
    Case("plain"),
    Case("multi_query", K=1, G=3),
    Case("multi_head", K=3, G=1),
    Case("unbatched", B=None, bias="NTS", mask="TS"),
    Case("bias_full", bias="BNTS"),
    Case("bias_per_head", bias="N1S"),
    Case("bias_excludes", bias="B1TS", bias_excludes=True),
    Case("mask_full", mask="BNTS"),
    Case("mask_keys", mask="B11S"),
    Case("mask_rows", mask="NT1"),
    Case("causal", is_causal=True),
    Case("causal_long", T=7, S=5, is_causal=True),
    Case("lengths", query_seq_lengths=(3, 5), key_value_seq_lengths=(7, 2)),
    Case("window", local_window_size=1),
    Case("window_sides", local_window_size=(2, 0), T=7, S=5),
    Case("segments_self", segments="self", T=5, S=5),
    Case("segments_pair", segments="pair"),
    Case("soft_cap", logits_soft_cap=0.7, bias="BNTS", scale=1.9),
    Case("empty_zero", mask="B1TS", empty_rows=True),
    Case("empty_nan", mask="BNTS", empty_rows=True, fully_masked="nan"),
    Case("empty_mean", mask="BNTS", empty_rows=True, fully_masked="mean"),
    Case("empty_nan_lengths", query_seq_lengths=(3, 5), mask="TS", empty_rows=True,
        fully_masked="nan"),
    Case("empty_mean_lengths", query_seq_lengths=(3, 5), key_value_seq_lengths=(0, 5),
        fully_masked="mean"),
    Case("no_keys_left", key_value_seq_lengths=(0, 3), bias="BNTS"),
    Case("dropout", dropout_rate=0.3, mask="BNTS"),
    Case("empty_nan_dropout", mask="BNTS", empty_rows=True, fully_masked="nan", dropout_rate=0.5),
    Case("empty_mean_dropout", mask="BNTS", empty_rows=True, fully_masked="mean", dropout_rate=0.5),
    Case("dropout_shared", dropout_rate=0.6, dropout_broadcast=("B", "N")),
    Case("no_keys", S=0),
    Case("no_keys_nan", S=0, fully_masked="nan"),
    Case("no_queries", T=0),
    Case("one_key", S=1, bias="BNTS"),
    Case("sinks", sinks=True, is_causal=True),
    Case("sinks_empty_nan", sinks=True, mask="BNTS", empty_rows=True, fully_masked="nan"),
    Case("sinks_everything", sinks=True, bias="BNTS", mask="1NTS", key_value_seq_lengths=(0, 5),
        fully_masked="mean", logits_soft_cap=1.3, dropout_rate=0.3),
    EVERYTHING,
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}

# Small enough to differentiate the loops entry by entry.
SMALL = Case(
    "small",
    T=3,
    S=5,
    K=2,
    G=2,
    H=7,
    h=2,
    bias="BNTS",
    bias_excludes=True,
    mask="BNTS",
    empty_rows=True,
    key_value_seq_lengths=(4, 5),
    logits_soft_cap=1.7,
)

# Cases with keys that no query of their batch row may attend.
POISONED: tuple[Case, ...] = (
    Case("poisoned_lengths", query_seq_lengths=(3, 5), key_value_seq_lengths=(7, 2), bias="BNTS"),
    Case("poisoned_causal", is_causal=True, key_value_seq_lengths=(0, 3)),
    Case("poisoned_window", local_window_size=(1, 0), logits_soft_cap=1.1, fully_masked="mean"),
    Case("poisoned_mask", mask="BNTS", dead_keys=True, empty_rows=True),
    Case("poisoned_bias", bias="N1S", dead_keys=True),
    replace(EVERYTHING, name="poisoned_everything"),
)
