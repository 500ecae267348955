"""The ways through torch.nn.MultiheadAttention."""

from functools import partial
from typing import Any

import numpy as np
import torch

from experiments.numerics.inputs import Run, T
from jaxmha import MHAParams
from jaxmha.bench.program import UnsupportedError
from jaxmha.converters import torch as convert
from jaxmha.converters.layout.arrays import NDArray, to_numpy, to_torch

LONGEST = 1024  # of the native path, which computes all rows, and is slow in half precision


def run(
    path: str, weights: MHAParams, x: NDArray, keep: NDArray | None, bias: NDArray | None
) -> NDArray:
    """The path is the one that torch takes for these arguments in eval mode."""
    native = path == "native"
    if native and bias is not None:
        raise UnsupportedError("a float mask keeps torch off its fast path")
    if native and x.shape[1] > LONGEST:
        raise UnsupportedError("all rows of the native path take too long")
    module = convert.to_module(weights)
    rows = to_torch(x)
    query = rows if native else rows[:, :T].clone()
    mask: Any = None if keep is None else to_torch(~keep[None])
    if bias is not None:
        mask = to_torch(bias[None])
    with torch.no_grad():
        out = module(query, rows, rows, key_padding_mask=mask, need_weights=path == "weights")[0]
    return np.asarray(to_numpy(out))[0, :T]


RUNS: dict[str, Run] = {
    f"torch {path}": partial(run, path) for path in ("weights", "sdpa", "native")
}
