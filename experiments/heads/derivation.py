"""The gradients of attention by hand, head by head: the formulas of the page as code."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
        p = softmax(q[:, own] @ k[:, own].T / H**0.5)
        o[:, own] = p @ v[:, own]
        dp = dO[:, own] @ v[:, own].T
        ds = through_softmax(p, dp)
        dq[:, own] = ds @ k[:, own] / H**0.5
        dk[:, own] = ds.T @ q[:, own] / H**0.5
        dv[:, own] = p.T @ dO[:, own]
    return Gradients(x.T @ dq, x.T @ dk, x.T @ dv, o.T @ cotangent)


def softmax(logits: Array) -> Array:
    """Over the last axis."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def through_softmax(p: Array, dp: Array) -> Array:
    """Every row times the Jacobian of its softmax, diag(p) - p p'."""
    return np.asarray(p * (dp - (p * dp).sum(-1, keepdims=True)))


def text(E: int, h: int) -> str:
    """The section of the page, for h heads of E / h and one of E."""
    H = E // h
    return f"""### Derived

One sequence X (T × {E}) is enough. Q = X Wq, K = X Wk, V = X Wv; head *i* has the columns *i* of
each, Q*ᵢ*, K*ᵢ*, V*ᵢ*, which are H wide. The output projection Wo is shared by all numbers of heads
(the script has none: Wo = 1).

```text
forward    Sᵢ = Qᵢ Kᵢᵀ / √H      Pᵢ = softmax of every row of Sᵢ      Oᵢ = Pᵢ Vᵢ
           O = [O₁ … Oₕ]         Y = O Wo
backward   dO  = dY Woᵀ          dWo = Oᵀ dY
           dVᵢ = Pᵢᵀ dOᵢ         dPᵢ = dOᵢ Vᵢᵀ
           row t of dSᵢ = (diag(p) − p pᵀ) (row t of dPᵢ),  p = row t of Pᵢ
                dSᵢ = Pᵢ ∘ (dPᵢ − δᵢ 1ᵀ),   δᵢ(t) = Σₛ Pᵢ(t, s) dPᵢ(t, s)
           dQᵢ = dSᵢ Kᵢ / √H     dKᵢ = dSᵢᵀ Qᵢ / √H
           dWq = Xᵀ [dQ₁ … dQₕ], dWk and dWv alike
```

The matrix diag(p) − p pᵀ is the Jacobian of the softmax of one row. It belongs to one head: that is
where 1 × {E} and {h} × {H} part.

| step | one head of {E} | {h} heads of {H} |
|---|---|---|
| Q, K, V | X Wq, X Wk, X Wv | the same, bit by bit |
| weights | one P, of the sum Σᵢ Qᵢ Kᵢᵀ / √{E} | {h} different Pᵢ, each of its own term over √{H} |
| dO | dY Woᵀ | the same map of dY |
| dP | Σᵢ dOᵢ Vᵢᵀ: the gradients of all columns meet here | dOᵢ Vᵢᵀ: those of its own columns |
| dS | one Jacobian, of P | {h} Jacobians, each of its own Pᵢ |
| columns *i* of dWq | from all of dO and V, through P | from dOᵢ, Vᵢ, Kᵢ and Pᵢ alone |
| columns *i* of dWv | Xᵀ Pᵀ dOᵢ | Xᵀ Pᵢᵀ dOᵢ |
| dWo | Oᵀ dY | the same formula with another O |

So there are three differences. The Pᵢ are not P, which changes every gradient and the output itself.
The Jacobian couples all {E} columns of one head: column 1 of Wq gets a gradient from what column {E}
of V did. With {h} heads it couples {H}: the gradient of Oⱼ by the columns *i* of Wq and Wk is exactly
zero for j ≠ i. And the scale is 1/√{H} in place of 1/√{E}. Wv and Wo enter linearly: they have the
same formula in both, and differ only by P and O.

The shared output projection does not bring the two together. It is applied after the softmax, and
backward it is one linear map, dOᵢ = dY (rows *i* of Wo)ᵀ, for any number of heads. Heads meet there
only through dY: they learn of each other from the loss, and not from each other's softmax.

So heads are indeed optimised separately in Wq and Wk, but that is not all: they compute something
else before the first step.

For a user it means:

- The number of heads is part of the function. No shape shows it where the kernels are {E} × {E}:
  carry it with the weights, and a model fine-tuned with another number starts from another function
  and gets other gradients.
- Zeros in the rows *i* of Wo silence head *i*: its Wq, Wk and Wv then have gradients of exactly zero
  until Wo has one of its own. Heads can be pruned or frozen so one by one, and parts of one wide head
  cannot.
- Two implementations of one layer are compared by the gradients of Wq and Wk too: those of Wv alone
  do not show a wrong Jacobian.

```python
params, _ = linear.import_params(matrices, layout="matrices", num_heads={h})  # or 1
jax.grad(lambda params: (multi_head_attention(params, x) * cotangent).sum())(params)
```
"""
