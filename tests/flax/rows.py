"""Every constructor argument that flax's modules and ours have, as rows of one grid."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmha.flax import nnx as ours_nnx
from tests.flax.common import DK, DO, DQ, H, N, Row, inputs, plain, randomise, theirs
from tests.tolerance import FLOORS, LAYER, error, floor

WIDE: dict[str, Any] = {"num_heads": N, "qkv_features": N * H}
ZEROS: dict[str, Any] = {"kernel_init": nn.initializers.zeros_init()}
INITS: dict[str, Any] = {
    "kernel_init": nn.initializers.he_normal(),
    "out_kernel_init": nn.initializers.xavier_normal(),
    "bias_init": nn.initializers.normal(0.5),
    "out_bias_init": nn.initializers.constant(2.0),
}
NORM = {"normalize_qk": True}
DROPOUT = {"dropout_rate": 0.5, "deterministic": True}
BOTH = (
    Row("as wide as the input", {"num_heads": N}),
    Row("out_features, precision, initialisers",
        {**WIDE, **INITS, "out_features": DO, "precision": jax.lax.Precision.HIGHEST}, 2),
    Row("no biases, no dropout", {**WIDE, **DROPOUT, "use_bias": False,
                                  "broadcast_dropout": False}),
    Row("normalize_qk", {**WIDE, **NORM}, 2),
    Row("dtype", {**WIDE, "dtype": jnp.bfloat16}),
    Row("half", {**WIDE, **NORM, "param_dtype": jnp.bfloat16}, 2, "bfloat16"),
)  # fmt: skip
LINEN = (
    *BOTH,
    Row("three widths", {**WIDE, "attention_fn": nn.dot_product_attention}, 3),
    Row("half parameters, force_fp32_for_softmax",
        {**WIDE, "param_dtype": jnp.bfloat16, "force_fp32_for_softmax": True}, 1, "bfloat16"),
)  # fmt: skip
NNX = (
    *BOTH,
    Row("num_kv_heads", {**DROPOUT, "num_heads": 2 * N, "qkv_features": 2 * N * H,
                         "num_kv_heads": N, "keep_rngs": False,
                         "attention_fn": nnx.dot_product_attention}, 2),
)  # fmt: skip


def widths(row: Row) -> tuple[int, int, int]:
    Dq = DQ if "qkv_features" in row.settings else 7 * N
    return (Dq, DK, 23) if row.inputs == 3 else (Dq, DK, DK)


def agree(actual: Any, expected: Any, row: Row, what: str = "") -> None:
    """Asserts equal outputs, in floors of the dtype that the row computes in.

    Two results in half precision have each their own roundings, also those of flax's heads where
    the output is float32.
    """
    assert actual.dtype == expected.dtype
    dtype = np.dtype(row.settings.get("dtype", row.dtype))
    allowed = FLOORS[dtype.name] * (LAYER if dtype.itemsize == 2 else 1)
    assert error(actual, np.asarray(expected), dtype) <= allowed, what or row.name


def agree_in_gradients(expected: Any, actual: Any, row: Row) -> None:
    """Asserts that gradients agree, in floors of the dtype that the row computes in.

    The gradient of a key bias is 0 but for noise at the scale of the others.
    """
    dtype = np.dtype(row.settings.get("dtype", row.dtype))
    allowed = FLOORS[dtype.name] * (4 * LAYER if dtype.itemsize == 2 else 4)
    wanted = {name: e.astype(np.float64) for name, e in plain(expected).items()}
    largest = np.array([max(np.abs(e).max() for e in wanted.values())])
    for (name, a), (_, e) in zip(plain(actual).items(), wanted.items(), strict=True):
        assert a.dtype == plain(expected)[name].dtype
        if "key" in name and "bias" in name:
            assert np.abs(a.astype(np.float64) - e).max() <= allowed * floor(largest, dtype), name
        else:
            assert error(a, e, dtype) <= allowed, name


def both(row: Row, **more: Any) -> tuple[Any, Any, Any]:
    """nnx modules of flax and of jaxmha with the same random weights, and inputs."""
    Dq, Dk, _ = widths(row)
    settings = {"in_features": Dq, "decode": False, **row.settings, **more}
    if row.inputs == 2:
        settings["in_kv_features"] = Dk
    flax, ours = (
        theirs(module.MultiHeadAttention, rngs=nnx.Rngs(3), **settings)
        for module in (nnx, ours_nnx)
    )
    state = randomise(nnx.state(flax, nnx.Param))
    nnx.update(flax, state)
    nnx.update(ours, state)
    return flax, ours, inputs(row, widths(row))


def narrow(rows: tuple[Row, ...]) -> list[Row]:
    """Decoding is self-attention."""
    return [row._replace(inputs=1) for row in rows]
