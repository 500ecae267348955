"""Checks of the third document: measures of similarity, and the softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from experiments.claims.claims import Found, found
from experiments.claims.printed import apart

F = torch.nn.functional
H, S = 8, 7


def cosine() -> Found:
    """u v = |u| |v| cos."""
    u, v = torch.randn(2, 1000, H, dtype=torch.float64)
    products = F.cosine_similarity(u, v, dim=-1) * u.norm(dim=-1) * v.norm(dim=-1)
    away = apart(products.numpy(), (u * v).sum(-1).numpy())
    return found({"1000 pairs": away < 1e-12}, apart=away)


def cosine_ignores_lengths() -> Found:
    """The same pairs, one of each made longer."""
    u, v = torch.randn(2, 1000, H, dtype=torch.float64)
    longer = F.cosine_similarity(1000 * u, v, dim=-1)
    away = apart(longer.numpy(), F.cosine_similarity(u, v, dim=-1).numpy())
    return found({"1000 pairs": away < 1e-12}, apart=away)


def finds_similar() -> Found:
    """How many of 200 vectors are most similar to themselves, by their product with all."""
    torch.manual_seed(0)
    x = torch.randn(200, 3 * H, dtype=torch.float64)
    shares = []
    for rows in (F.normalize(x, dim=-1), x * torch.rand(200, 1).exp2() ** 4):
        shares.append(float(((rows @ rows.T).argmax(-1) == torch.arange(200)).double().mean()))
    holds = {"vectors of one length": shares[0] == 1, "lengths 1 to 16": shares[1] == 1}
    return found(holds, same=shares[0], other=shares[1])


def cheaper() -> Found:
    """Operations that XLA counts."""

    def dot(u: jax.Array, v: jax.Array) -> jax.Array:
        return u @ v.T

    def cosine(u: jax.Array, v: jax.Array) -> jax.Array:
        lengths = (jnp.linalg.norm(x, axis=-1) for x in (u, v))
        return dot(u, v) / jnp.multiply.outer(*lengths)

    times = []
    for count in (1, 512):
        x = jnp.zeros((count, 64))
        costs = [jax.jit(f).lower(x, x).cost_analysis() or {} for f in (dot, cosine)]
        flops = [cost["flops"] for cost in costs]
        times.append(flops[1] / flops[0])
    return found(
        {"one pair": times[0] > 1, "512 queries by 512 keys": times[1] > 1},
        one=times[0],
        many=times[1],
    )


def scaling() -> Found:
    """Variance of products of normal vectors, before and after."""
    torch.manual_seed(0)
    variances = {}
    for d in (16, 512):
        u, v = torch.randn(2, 20_000, d)
        variances[d] = float((u * v).sum(-1).var()), float(((u * v).sum(-1) / d**0.5).var())
    holds = {f"width {d}": abs(after - 1) < 0.1 for d, (_, after) in variances.items()}
    return found(holds, narrow=variances[16][0], wide=variances[512][0], scaled=variances[512][1])


def softmax_properties() -> Found:
    """Order, sign and sum, of near logits and of far ones."""
    near, far = torch.randn(S), torch.tensor([0.0, -150.0, -151.0])

    def fine(logits: torch.Tensor) -> bool:
        p = logits.softmax(-1)
        return bool(torch.equal(p.argsort(), logits.argsort()) and (p > 0).all()) and bool(
            abs(p.sum() - 1) < 1e-6
        )

    holds = {"near logits": fine(near), "logits 150 apart, in float32": fine(far)}
    return found(holds, far=str([round(p, 3) for p in far.softmax(-1).tolist()]))


def soft_argmax() -> Found:
    """Logits far apart, close together, and two that are the largest."""
    logits = torch.randn(100, S)
    hard = F.one_hot(logits.argmax(-1), S).float()
    far, near = ((c * logits).softmax(-1) for c in (1e6, 1.0))
    tied = torch.tensor([1e6, 1e6, 0.0]).softmax(-1)
    return found(
        {
            "the largest weighs most": torch.equal(near.argmax(-1), logits.argmax(-1)),
            "logits far apart": torch.equal(far, hard),
            "two that are the largest": float(tied[0]) == 1,
        },
        tied=str(tied.tolist()),
    )


def plain_normalisation() -> Found:
    """x / sum x, of positive numbers and of any."""
    positive, mixed = np.array([1.0, 2.0, 3.0]), np.array([-1.0, 2.0, -3.0])
    holds = {}
    for name, x in {"positive numbers": positive, "numbers of both signs": mixed}.items():
        p = x / x.sum()
        holds[name] = bool((p > 0).all() and (np.argsort(p) == np.argsort(x)).all())
    return found(holds, mixed=str([round(float(p), 2) for p in mixed / mixed.sum()]))
