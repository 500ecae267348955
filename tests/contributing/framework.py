"""A toy library with one attention layer, which is called as (query, key, value, hidden)."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


class Attention:
    """Self-attention with weights `pack.w` and `mix.w`; True in `hidden` `(B, S)` blocks a key."""

    def __init__(self, num_heads: int, weights: dict[str, Array]) -> None:
        self.num_heads, self.weights = num_heads, weights

    def __call__(
        self, query: Array, key: Array, value: Array, hidden: NDArray[np.bool_] | None = None
    ) -> Array:
        kernels = self.weights["pack.w"].reshape(len(self.weights["pack.w"]), self.num_heads, 3, -1)
        q, k, v = (
            np.einsum("btd,dnh->bnth", x, kernels[:, :, i])
            for i, x in enumerate((query, key, value))
        )
        logits = q @ np.swapaxes(k, 2, 3) * q.shape[-1] ** -0.5
        if hidden is not None:
            logits = np.where(hidden[:, None, None], -np.inf, logits)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        context = weights / weights.sum(-1, keepdims=True) @ v
        rows = np.moveaxis(context, 1, 2).reshape(*query.shape[:2], -1)
        output: Array = rows @ self.weights["mix.w"]
        return output
