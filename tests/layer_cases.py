"""Cases of the whole layer as data. Sizes are different primes, so that no two axes can be confused."""

import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from jaxmha.arrays import to_dtype

# Leaves of MHAParams and their axes, as the contract has them.
LEAVES: dict[str, str] = {
    "query.kernel": "Dq N H", "query.bias": "N H", "key.kernel": "Dk K H", "key.bias": "K H",
    "value.kernel": "Dv K h", "value.bias": "K h", "out.kernel": "N h Do", "out.bias": "Do",
    "bias_k": "K H", "bias_v": "K h", "query_norm": "H", "key_norm": "H", "query_norm_heads": "N H",
    "key_norm_heads": "K H", "query_norm_bias": "H", "key_norm_bias": "H",
    "query_norm_bias_heads": "N H", "key_norm_bias_heads": "K H", "sinks": "N",
    "gate.kernel": "Dq N h", "gate.bias": "N h", "gate_heads.kernel": "Dq N",
    "gate_heads.bias": "N",
}  # fmt: skip
BIASES: tuple[str, ...] = ("query.bias", "key.bias", "value.bias")
OUT: tuple[str, ...] = ("out.kernel", "out.bias")


@dataclass(frozen=True)
class LayerCase:
    """One call of the whole layer; fields as in `Case` where they have the same name.

    Attributes:
      batch: leading batch axes.
      inputs: how many of query, key, value are given; the others default to the one before.
      leaves: leaves of MHAParams in addition to the three kernels, "query.bias" and so on.
      mask, bias: axes of "*NTS" or 1; `*` is the batch, `E` stands for S plus extra positions.
      conditions: arguments of `tests.reference.pairs` to draw or to take as they are.
      semantics: fields of jaxmha.Semantics.
    """

    name: str
    batch: tuple[int, ...] = (2,)
    inputs: int = 3
    T: int = 5
    S: int = 7
    K: int = 3
    G: int = 2
    H: int = 11
    h: int = 13
    leaves: tuple[str, ...] = (*BIASES, *OUT)
    mask: str | None = None
    bias: str | None = None
    conditions: tuple[str, ...] = ()
    is_causal: bool = False
    semantics: tuple[tuple[str, Any], ...] = ()

    @property
    def N(self) -> int:
        """Query heads."""
        return self.K * self.G

    @property
    def extras(self) -> int:
        """Extra positions."""
        return ("bias_k" in self.leaves) + bool(dict(self.semantics).get("add_zero_attn"))


def layer_arrays(
    case: LayerCase, dtype: DTypeLike = np.float32, seed: int = 0
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Leaves of the parameters by name, inputs by name, and mask, bias and conditions by name."""
    rng = np.random.default_rng([seed, *case.name.encode()])
    dtype = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else to_dtype(dtype)
    S = case.S if case.inputs > 1 else case.T
    sizes = {"N": case.N, "K": case.K, "H": case.H, "h": case.h, "Do": 29}
    sizes |= dict(zip(("Dq", "Dk", "Dv"), ((17,) * 3, (17, 19, 19), (17, 19, 23))[case.inputs - 1],
                      strict=True))  # fmt: skip

    def normal(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(dtype)

    leaves = {}
    for name, axes in LEAVES.items():
        if name in ("query.kernel", "key.kernel", "value.kernel", *case.leaves):
            shape = [sizes[axis] for axis in axes.split()]
            # Kernels keep the variance of what passes through them.
            fan_in = math.prod(shape[:2] if name == "out.kernel" else shape[:1])
            scale = fan_in**-0.5 if name.endswith("kernel") else 1.0
            leaves[name] = (rng.standard_normal(shape) * scale).astype(dtype)
    inputs = {
        name: normal(*case.batch, size, sizes[axis])
        for name, size, axis in (("query", case.T, "Dq"), ("key", S, "Dk"), ("value", S, "Dv"))
    }
    inputs = dict(list(inputs.items())[: case.inputs])

    lengths = {"1": 1, "N": case.N, "T": case.T, "S": S, "E": S + case.extras}
    others: dict[str, Any] = {}
    for name in ("mask", "bias"):
        axes = getattr(case, name)
        if axes is not None:
            lead = case.batch if axes.startswith("*") else ()
            shape = [*lead, *(lengths[axis] for axis in axes.removeprefix("*"))]
            drawn = rng.standard_normal(shape).astype(dtype)
            if name == "bias":
                drawn[rng.random(shape) < 0.3] = -np.inf
            others[name] = drawn > -0.3 if name == "mask" else drawn
    draw: dict[str, Any] = {
        "causal_offset": lambda: rng.integers(-1, 3, case.batch).astype(np.int32),
        "local_window_size": lambda: (2, 1),
        "query_seq_lengths": lambda: rng.integers(1, case.T, case.batch).astype(np.int32),
        "key_value_seq_lengths": lambda: rng.integers(1, S, case.batch).astype(np.int32),
        "query_padding": lambda: rng.random((*case.batch, case.T)) < 0.7,
        "key_value_padding": lambda: rng.random((*case.batch, S)) < 0.7,
        "segment_ids": lambda: tuple(
            rng.integers(0, 2, (*case.batch, size)).astype(np.int32) for size in (case.T, S)
        ),
    }
    others |= {name: draw[name]() for name in case.conditions}
    return leaves, inputs, others


_ZERO = (("add_zero_attn", True),)
_KV = ("bias_k", "bias_v")
_NORMS = ("query_norm", "key_norm")
_HEAD_NORMS = ("query_norm_heads", "key_norm_heads")
_NORM_BIASES = ("query_norm_bias", "key_norm_bias")
_EVERY_CONDITION = (
    "causal_offset", "local_window_size", "query_seq_lengths", "key_value_seq_lengths",
    "query_padding", "key_value_padding", "segment_ids",
)  # fmt: skip

LAYERS: tuple[LayerCase, ...] = (
    LayerCase("plain"),
    LayerCase("self_unbatched", batch=(), inputs=1, is_causal=True),
    LayerCase("cross_two_batch_axes", batch=(2, 3), inputs=2, mask="*1TS", bias="*NTS"),
    LayerCase("no_biases", leaves=("out.kernel",)),
    LayerCase("some_biases", leaves=("query.bias", "value.bias", "out.kernel")),
    LayerCase("no_out", leaves=BIASES),
    LayerCase("bias_kv", leaves=(*BIASES, *OUT, *_KV), mask="1NTS", bias="*1TS"),
    LayerCase("zero_attn", mask="*NTS", bias="TS", semantics=_ZERO),
    LayerCase("both_extras", leaves=(*BIASES, *OUT, *_KV), mask="*NTE", semantics=_ZERO),
    LayerCase("both_extras_in_bias", leaves=(*BIASES, *OUT, *_KV), bias="*NTE", mask="*1TS",
              is_causal=True, semantics=_ZERO),
    LayerCase("extras_structure", leaves=(*BIASES, *OUT, *_KV), conditions=_EVERY_CONDITION,
              mask="*NTE", semantics=_ZERO),
    LayerCase("extras_nan", leaves=(*BIASES, *OUT, *_KV), mask="*NTE", bias="*NTE",
              conditions=("query_seq_lengths",), semantics=(*_ZERO, ("fully_masked", "nan"))),
    LayerCase("extras_mean", conditions=("query_padding",),
              semantics=(*_ZERO, ("fully_masked", "mean"))),
    LayerCase("norm_layer", leaves=(*BIASES, *OUT, *_NORMS), semantics=(("qk_norm", "layer"),)),
    LayerCase("norm_rms", leaves=(*BIASES, *OUT, *_NORMS, *_KV),
              semantics=(("qk_norm", "rms"), ("qk_norm_epsilon", 0.03))),
    LayerCase("norm_bias", leaves=(*BIASES, *OUT, *_NORMS, *_NORM_BIASES),
              semantics=(("qk_norm", "layer"),)),
    LayerCase("norm_heads_weights",
              leaves=(*OUT, *_HEAD_NORMS, "query_norm_bias_heads", "key_norm_bias_heads"),
              semantics=(("qk_norm", "layer"),)),
    LayerCase("norm_all_heads", batch=(2, 1), leaves=(*BIASES, *OUT, *_HEAD_NORMS),
              semantics=(("qk_norm", "rms"), ("qk_norm_scope", "heads"), ("clip_qkv", 1.1))),
    LayerCase("norm_all_heads_layer", leaves=(*OUT, *_NORMS),
              semantics=(("qk_norm", "layer"), ("qk_norm_scope", "heads"))),
    LayerCase("norm_unlearned", leaves=OUT,
              semantics=(("qk_norm", "rms"), ("qk_norm_learned", False), ("qk_norm_epsilon", 0.1))),
    LayerCase("norm_offset", leaves=(*OUT, *_NORMS),
              semantics=(("qk_norm", "rms"), ("qk_norm_offset", 1.0))),
    LayerCase("clip", semantics=(("clip_qkv", 0.4),)),
    LayerCase("sinks", leaves=(*BIASES, *OUT, *_KV, "sinks"), mask="*NTE",
              conditions=("key_value_seq_lengths",), semantics=(*_ZERO, ("fully_masked", "nan"))),
    LayerCase("gate", leaves=(*BIASES, *OUT, "gate.kernel", "gate.bias"), mask="*1TS"),
    LayerCase("several", inputs=2, leaves=(*BIASES, *OUT, *_NORMS, "sinks", "gate.kernel", "gate.bias"),
              mask="*1TS", semantics=(("qk_norm", "rms"), ("qk_norm_offset", 1.0), ("clip_qkv", 0.9),
                                      ("logits_soft_cap", 0.9), ("scale", 0.6))),
    LayerCase("gate_heads", batch=(2, 3), inputs=1, S=5,
              leaves=("sinks", "gate_heads.kernel", "gate_heads.bias")),
    LayerCase("structure", conditions=_EVERY_CONDITION, mask="*NTS", bias="*NTS"),
    LayerCase("soft_cap", semantics=(("logits_soft_cap", 0.9), ("scale", 0.6))),
    LayerCase("dropout", semantics=(("dropout_rate", 0.4), *_ZERO), mask="*NTS"),
)  # fmt: skip
