"""Checks of the second document: eight heads of 64 and one head of 512, in float64 unless said."""

import torch

from experiments.claims.found import Found, found
from experiments.claims.printed import B, D, T, apart

H = 8
Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def matrices(seed: int = 0, kind: str = "xavier", dtype: torch.dtype = torch.float64) -> Matrices:
    """Wq, Wk, Wv: Xavier-uniform, or uniform on [0, 1) as in the script."""
    torch.manual_seed(seed)
    drawn = [torch.rand(D, D, dtype=dtype) for _ in range(3)]
    if kind == "xavier":
        drawn = [(2 * w - 1) * (3 / D) ** 0.5 for w in drawn]
    return drawn[0], drawn[1], drawn[2]


def rows(length: int = T) -> torch.Tensor:
    """Normal features."""
    return torch.randn(B, length, D, dtype=torch.float64)


def heads(x: torch.Tensor, matrix: torch.Tensor, h: int) -> torch.Tensor:
    """`B h T D/h`."""
    return (x @ matrix).reshape(*x.shape[:2], h, D // h).transpose(1, 2)


def weights(x: torch.Tensor, given: Matrices, h: int) -> torch.Tensor:
    """`B h T T`."""
    logits = heads(x, given[0], h) @ heads(x, given[1], h).mT / (D // h) ** 0.5
    return torch.softmax(logits, -1)


def attention(x: torch.Tensor, given: Matrices, h: int) -> torch.Tensor:
    """Without output layer, heads concatenated."""
    return (weights(x, given, h) @ heads(x, given[2], h)).transpose(1, 2).flatten(-2)


def difference(x: torch.Tensor, given: Matrices) -> float:
    """Of eight heads from one."""
    return apart(attention(x, given, H).numpy(), attention(x, given, 1).numpy())


def two_products() -> Found:
    """Beside torch's own function."""
    given, x = matrices(), rows()
    q, k, v = (heads(x, w, H) for w in given)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
    away = apart(attention(x, given, H).numpy(), exact.numpy())
    return found({"8 heads": away < 1e-12}, apart=away)


def script_runs() -> Found:
    """The step that raises when the missing brackets are there."""
    context = heads(rows(), matrices()[2], H) * 1.0
    context = context.contiguous().transpose(1, 2)
    try:
        context.view(B, -1, D)
        error = ""
    except RuntimeError as raised:
        error = type(raised).__name__
    return found({"brackets restored": not error}, error=error)


def prints_true() -> Found:
    """In float32, for 40 seeds of each kind of matrices."""
    equal = {}
    for kind in ("uniform", "xavier"):
        equal[kind] = 0
        for seed in range(40):
            given = matrices(seed, kind, torch.float32)
            x = torch.rand(B, T, D)  # as in the script
            equal[kind] += torch.equal(attention(x, given, H), attention(x, given, 1))
    holds = {
        "some seeds": equal["uniform"] > 0,
        "all seeds": equal["uniform"] == 40,
        "matrices with negative entries": equal["xavier"] > 0,
    }
    given = matrices(0, "uniform", torch.float32)
    x = torch.rand(B, T, D)
    largest = (heads(x, given[0], 1) @ heads(x, given[1], 1).mT).abs().max() / D**0.5
    return found(holds, equal=equal["uniform"], xavier=equal["xavier"], largest=largest)


def same_tensor() -> Found:
    """With Xavier-uniform matrices, and with normal ones."""
    torch.manual_seed(1)
    normal = tuple(torch.randn(D, D, dtype=torch.float64) for _ in range(3))
    xavier, other = difference(rows(), matrices()), difference(rows(), normal)  # type: ignore[arg-type]
    return found({"Xavier": xavier < 1e-9, "normal": other < 1e-9}, xavier=xavier, normal=other)


def gradients(h: int) -> list[torch.Tensor]:
    """Of a fixed weighting of the output, for Wq, Wk, Wv."""
    given = tuple(w.requires_grad_() for w in matrices())
    x = rows()
    slope = torch.randn(B, T, D, dtype=torch.float64)
    out = attention(x, given, h)  # type: ignore[arg-type]
    return list(torch.autograd.grad((out * slope).sum(), given))


def only_optimisation() -> Found:
    """Before any step is taken."""
    away = difference(rows(), matrices())
    return found({"outputs are the same": away < 1e-9}, output=away)


def other_gradients() -> Found:
    """Relative differences of eight heads from one."""
    q, k, v = (apart(a.numpy(), b.numpy()) for a, b in zip(gradients(H), gradients(1), strict=True))
    return found({"Xavier": min(q, k, v) > 1e-3}, q=q, k=k, v=v)


def certainly_different() -> Found:
    """In general, and where softmaxes agree for a reason."""
    q, k, v = matrices()
    same = {
        "Xavier": difference(rows(), (q, k, v)),
        "one key": difference(rows(length=1), (q, k, v)),
        "Wq = 0": difference(rows(), (q * 0, k, v)),
        "equal tokens": difference(rows()[:, :1].expand(B, T, D), (q, k, v)),
        "one block in all heads, Wq / sqrt(8)": _blocks((q, k, v)),
    }
    holds = {name: away > 1e-9 for name, away in same.items()}
    return found(holds, apart=same["Xavier"], most=max(list(same.values())[1:]))


def _blocks(given: Matrices) -> float:
    """All heads get the first block of Wq and Wk; one head gets them with the scale made up for."""
    x = rows()
    q, k = (w[:, : D // H].tile(1, H) for w in given[:2])
    eight, one = attention(x, (q, k, given[2]), H), attention(x, (q / H**0.5, k, given[2]), 1)
    return apart(eight.numpy(), one.numpy())


def subset_of_components() -> Found:
    """Sums of products of the heads add up to those of one head; their softmaxes do not."""
    given, x = matrices(), rows()
    parts = (heads(x, given[0], H) @ heads(x, given[1], H).mT).sum(1, keepdim=True)
    whole = heads(x, given[0], 1) @ heads(x, given[1], 1).mT
    away = apart(parts.numpy(), whole.numpy())
    return found({"8 heads": away < 1e-12}, apart=away, terms=D // H, all=D)


def shapes_of_weights() -> Found:
    """Of eight heads and of one."""
    shapes = [list(weights(rows(), matrices(), h).shape) for h in (H, 1)]
    return found(
        {"8 heads and 1": shapes[0] != shapes[1]}, eight=str(shapes[0]), one=str(shapes[1])
    )


def same_projections() -> Found:
    """Before heads are cut, and after they are put together."""
    given, x = matrices(), rows()
    same = [torch.equal(heads(x, w, H).transpose(1, 2).flatten(-2), x @ w) for w in given]
    return found({"8 heads": all(same)}, count=sum(same))
