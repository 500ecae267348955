"""Rows with nothing left under the flax preset: gradients, half precision and decoding."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmha import Semantics
from jaxmha.flax import linen as ours_linen
from jaxmha.flax import nnx as ours_nnx
from tests.flax.common import DQ, B, N, Row, T, inputs, normal, pairs, randomise, theirs
from tests.flax.rows import WIDE, agree, agree_in_gradients, widths

ROWS = (
    Row("float32", WIDE, 2),
    Row("dtype", {**WIDE, "dtype": jnp.bfloat16}, 2),
    Row("half", {**WIDE, "param_dtype": jnp.bfloat16}, 2, "bfloat16"),
)


def preset(row: Row, path: Any = "weights") -> dict[str, Any]:
    """Arguments of jaxmha's module; half precision is that of flax's softmax too."""
    dtype = np.dtype(row.settings.get("dtype", row.dtype))
    half = dtype if dtype.itemsize == 2 else None
    return {**row.settings, "semantics": Semantics.flax(path, dtype=half)}


def masked(columns: int) -> Any:
    """One row of one head is empty, and one row of every head."""
    return pairs(columns, empty=True).at[1, :, 3].set(False)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_linen_and_its_gradients(row: Row) -> None:
    flax = nn.MultiHeadAttention(**row.settings)
    ours = ours_linen.MultiHeadAttention(**preset(row))
    x = inputs(row, widths(row))
    variables = randomise(theirs(jax.eval_shape, flax.init, jax.random.key(0), *x))
    mask = masked(x[-1].shape[1])

    def loss(module: Any) -> Any:
        def of(variables: Any, x: Any) -> Any:
            out = module.apply(variables, *x, mask=mask)
            return jnp.vdot(out.astype(jnp.float32), normal("cotangent", out.shape)), out

        return jax.jit(jax.grad(of, (0, 1), has_aux=True))

    (expected, out), (actual, mine) = theirs(loss(flax), variables, x), loss(ours)(variables, x)
    agree(mine, out, row)
    agree_in_gradients(expected, actual, row)


@pytest.mark.everyday(row=["float32"])
@pytest.mark.parametrize("row", ROWS)
def test_decoding_of_nnx(row: Row) -> None:
    """Slots that no token has reached yet are part of the mean, as in flax."""
    settings = {"in_features": DQ, "decode": True, **row.settings}
    flax = theirs(nnx.MultiHeadAttention, rngs=nnx.Rngs(3), **settings)
    ours = ours_nnx.MultiHeadAttention(rngs=nnx.Rngs(3), **{**settings, **preset(row, "fused")})
    state = randomise(nnx.state(flax, nnx.Param))
    x = normal("decoded", (B, T, DQ), row.dtype)
    for module in (flax, ours):
        nnx.update(module, state)
        module.init_cache(x.shape, row.settings.get("dtype", x.dtype))
    mask = np.ones((B, N, 1, T), bool)
    mask[0, :, :, :2] = False  # empty in the first two steps
    mask[1, 2] = False  # always
    step = nnx.jit(lambda module, token: module(token, mask=mask))
    for t in range(3):
        token = x[:, t : t + 1]
        agree(step(ours, token), theirs(step, flax, token), row, f"step {t}")
