"""The same three matrices split into any number of heads: what changes, tensor by tensor."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from jaxmha import MHAParams, Semantics, multi_head_attention
from jaxmha.converters import linear
from jaxmha.converters.verify import oracle

E, B, T = 512, 2, 128
HEADS = (1, 2, 4, 8, 16)

Matrices = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]  # Wq, Wk, Wv: `E E`


def split(matrices: Matrices, h: int) -> MHAParams:
    """Three matrices `E E` as a layer of h heads without an output layer."""
    state = {f"linears.{i}": matrix for i, matrix in enumerate(matrices)}
    return linear.import_params(state, layout="matrices", num_heads=h)[0]


def drawn(seed: int, E: int, B: int, T: int) -> tuple[Matrices, NDArray[np.float64]]:
    """Xavier-uniform matrices `E E` and inputs `B T E` of unit variance."""
    rng = np.random.default_rng(seed)
    bound = (3 / E) ** 0.5
    wq, wk, wv = (rng.uniform(-bound, bound, (E, E)) for _ in range(3))
    return (wq, wk, wv), rng.normal(size=(B, T, E))


def exact(matrices: Matrices, x: NDArray[Any], h: int) -> oracle.Stages:
    """Every stage of self-attention in float64."""
    return oracle.run(split(matrices, h), Semantics(), x, x, x)


def distance(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Of b from a, relative to the norm of a."""
    return float(np.linalg.norm(b - a) / np.linalg.norm(a))


def gradients(matrices: Matrices, x: NDArray[Any], h: int, cotangent: NDArray[Any]) -> list[Any]:
    """Of `sum(cotangent * output)` by the three matrices, each `E E`, by jaxmha in float64."""

    def total(params: MHAParams) -> Any:
        return (multi_head_attention(params, x) * cotangent).sum()

    with jax.enable_x64(True):
        found = jax.grad(total)(split(matrices, h))
    return [np.asarray(projection.kernel).reshape(x.shape[-1], -1) for projection in found[:3]]


def of_seed(seed: int, heads: Sequence[int], E: int = E, B: int = B, T: int = T) -> list[Any]:
    """One record for each number of heads, against one head of the same matrices."""
    matrices, x = drawn(seed, E, B, T)
    cotangent = np.random.default_rng([seed, 1]).normal(size=(B, T, E))
    alone = exact(matrices, x, 1)
    of_one = gradients(matrices, x, 1, cotangent)
    wq, wk, wv = (matrix.astype(np.float32) for matrix in matrices)
    records = []
    for h in heads:
        stages = exact(matrices, x, h)
        out = multi_head_attention(split((wq, wk, wv), h), x.astype(np.float32))
        same_key = stages.logits.argmax(-1) == alone.logits.argmax(-1)
        records.append(
            {
                "heads": h,
                "logits": list(stages.logits.shape),
                "float32_error": distance(stages.output, np.asarray(out)),
                "output": distance(alone.output, stages.output),
                "same_key": float(same_key.mean()),
                "logits_rank": rank(stages.logits),
                "weights_rank": rank(stages.probabilities),
                "sum_of_logits": sum_of_logits(alone.logits, stages.logits, E),
                "gradients": [
                    distance(one, many)
                    for one, many in zip(of_one, gradients(matrices, x, h, cotangent), strict=True)
                ],
            }
        )
    return records


def rank(matrices: NDArray[Any]) -> list[int]:
    """Smallest and largest numerical rank of matrices `B N T S` (float64)."""
    found = np.linalg.matrix_rank(matrices)
    return [int(found.min()), int(found.max())]


def sum_of_logits(alone: NDArray[Any], many: NDArray[Any], E: int) -> float:
    """Distance of the sum of all heads' products from those of one head, scales undone."""
    H = E // many.shape[1]
    return distance(alone[:, 0] * E**0.5, many.sum(1) * H**0.5)


def spectra(seed: int, heads: Sequence[int], E: int = E, T: int = T) -> dict[str, Any]:
    """Singular values of logits and weights of the first head, relative to the largest."""
    matrices, x = drawn(seed, E, 1, T)
    found: dict[str, Any] = {"logits": {}, "weights": {}}
    for h in heads:
        stages = exact(matrices, x, h)
        for name, stage in (("logits", stages.logits), ("weights", stages.probabilities)):
            values = np.linalg.svd(stage[0, 0], compute_uv=False)
            found[name][str(h)] = [float(f"{v:.3g}") for v in values / values[0]]
    return found


def pictures(seed: int, h: int, E: int = E, T: int = 8) -> dict[str, Any]:
    """Products q·k and weights of every head and of one head, `T T` each, for heat maps."""
    matrices, x = drawn(seed, E, 1, T)
    alone, many = (exact(matrices, x, n) for n in (1, h))
    return {
        "products": np.round(many.logits[0] * (E // h) ** 0.5, 3).tolist(),
        "one_product": np.round(alone.logits[0, 0] * E**0.5, 3).tolist(),
        "weights": np.round(many.probabilities[0], 4).tolist(),
        "one_weights": np.round(alone.probabilities[0, 0], 4).tolist(),
    }
