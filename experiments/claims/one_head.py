"""Checks of the second document that need no draws of their own; `elsewhere` has the others."""

import torch

from experiments.claims.claims import Found, found
from experiments.claims.printed import B, D, T, apart
from experiments.heads import measure, script

H = 8


def drawn() -> tuple[list[torch.Tensor], torch.Tensor]:
    """Wq, Wk, Wv, Xavier-uniform in float64, and features."""
    matrices, x = measure.drawn(0, D, B, T)
    return [torch.from_numpy(w) for w in matrices], torch.from_numpy(x)


def heads(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """`B h T D/h`."""
    return (x @ matrix).reshape(*x.shape[:2], H, D // H).transpose(1, 2)


def two_products() -> Found:
    """The script's function and torch's own."""
    given, x = drawn()
    q, k, v = (heads(x, w) for w in given)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
    away = apart(script.attend(x, given, H)[0].numpy(), exact.numpy())
    return found({"8 heads": away < 1e-12}, apart=away)


def script_runs() -> Found:
    """The step that raises when the missing brackets are there."""
    context = torch.zeros(B, H, T, D // H).transpose(1, 2)
    context = context.transpose(1, 2).contiguous().transpose(1, 2)
    try:
        context.view(B, -1, D)
        error = ""
    except RuntimeError as raised:
        error = type(raised).__name__
    return found({"brackets restored": not error}, error=error)


def same_projections() -> Found:
    """Before heads are split, and after they are put together."""
    given, x = drawn()
    same = [torch.equal(heads(x, w).transpose(1, 2).flatten(-2), x @ w) for w in given]
    return found({"8 heads": all(same)}, count=sum(same))
