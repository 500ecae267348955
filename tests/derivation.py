"""The gradients of attention by hand, head by head: the formulas of the page as code."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax  # type: ignore[import-untyped]

Array = NDArray[np.float64]


class Gradients(NamedTuple):
    """Of a loss by Wq, Wk, Wv (`E E` each) and the output projection Wo (`E E`)."""

    Wq: Array
    Wk: Array
    Wv: Array
    Wo: Array


def by_hand(
    x: Array, wq: Array, wk: Array, wv: Array, wo: Array, h: int, cotangent: Array
) -> Gradients:
    """Gradients of one sequence's attention with h heads.

    Args:
      x: `T E`. wq, wk, wv, wo: `E E`; columns of the first three belong to heads, in order.
      h: number of heads.
      cotangent: dY, the gradient of the loss by the output Y = O Wo, `T E`.
    """
    E = x.shape[1]
    H = E // h
    q, k, v = x @ wq, x @ wk, x @ wv
    dO = cotangent @ wo.T
    o, dq, dk, dv = (np.zeros_like(q) for _ in range(4))
    for i in range(h):
        own = slice(i * H, (i + 1) * H)
        p = softmax(q[:, own] @ k[:, own].T / H**0.5, axis=-1)
        o[:, own] = p @ v[:, own]
        dp = dO[:, own] @ v[:, own].T
        ds = through_softmax(p, dp)
        dq[:, own] = ds @ k[:, own] / H**0.5
        dk[:, own] = ds.T @ q[:, own] / H**0.5
        dv[:, own] = p.T @ dO[:, own]
    return Gradients(x.T @ dq, x.T @ dk, x.T @ dv, o.T @ cotangent)


def through_softmax(p: Array, dp: Array) -> Array:
    """Every row times the Jacobian of its softmax, diag(p) - p p'."""
    return np.asarray(p * (dp - (p * dp).sum(-1, keepdims=True)))
