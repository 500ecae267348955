"""A script of a forum, repaired: three random matrices, eight heads or one, and the print of True.

As posted it does not parse: three brackets are not closed and the comparison is missing. Where it
merges heads, `view` after `transpose` raises; `reshape` does not. Nothing else is changed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

E, B, T, N = 512, 2, 10, 8

# Where its matrices are drawn from; the first is the script's.
WEIGHTS: dict[str, Callable[[Any, int], Any]] = {
    "uniform on [0, 1)": lambda torch, E: torch.rand(E, E),
    "uniform on [-1/2, 1/2)": lambda torch, E: torch.rand(E, E) - 0.5,
    "normal": lambda torch, E: torch.randn(E, E),
    "Xavier-uniform": lambda torch, E: torch.nn.init.xavier_uniform_(torch.empty(E, E)),
}


def attend(x: Any, weights: Sequence[Any], h: int) -> tuple[Any, Any]:
    """The layer of the script without its mask and dropout: output `B T E`, logits `B h T S`."""
    B, T, E = x.shape
    d_k = E // h
    query, key, value = [(x @ w).view(B, T, h, d_k).transpose(1, 2) for w in weights]
    scores = query @ key.transpose(-2, -1) / math.sqrt(d_k)
    out = scores.softmax(dim=-1) @ value
    return out.transpose(1, 2).reshape(B, T, h * d_k), scores


class Seed(NamedTuple):
    """Results of the script for one seed: eight heads compared with one head.

    Attributes:
      equal: True if both outputs are bitwise equal, which the script prints.
      difference: norm of the difference of the outputs, relative to the norm with one head.
      largest_logit: of one head.
      same_key: share of (query, head) whose largest logit is at the same key as with one head.
      least_top_weight: smallest of the largest weights of all rows, in both layers.
      query_gradient: norm of the gradient of `wq` relative to that of `wv`, for the sum of the
        outputs with one head.
    """

    seed: int
    equal: bool
    difference: float
    largest_logit: float
    same_key: float
    least_top_weight: float
    query_gradient: float


def run(weights: str, seeds: int) -> Iterator[Seed]:
    """The script from every seed below `seeds`, with matrices drawn as `weights` says.

    >>> next(run("uniform on [0, 1)", 1)).same_key <= 1
    True
    """
    import torch

    for seed in range(seeds):
        torch.manual_seed(seed)
        matrices = [WEIGHTS[weights](torch, E).requires_grad_() for _ in range(3)]
        x = torch.rand(B, T, E)
        single, scores = attend(x, matrices, 1)
        norms = [s.norm().item() for s in torch.autograd.grad(single.sum(), matrices)]
        single, scores = single.detach(), scores.detach()
        multi, by_head = (part.detach() for part in attend(x, matrices, N))
        tops = [s.softmax(-1).max(-1).values.min().item() for s in (scores, by_head)]
        yield Seed(
            seed,
            bool((multi == single).all()),
            float((multi - single).norm() / single.norm()),
            scores.max().item(),
            float(np.mean((by_head.argmax(-1) == scores.argmax(-1)).numpy())),
            min(tops),
            norms[0] / norms[2],
        )
