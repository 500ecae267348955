"""Errors of the native kernels are those of torch or less, over random configurations."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch

import jaxmha
from tests import conformance
from tests.drawn import to_jax

OPTIMISED = True  # compiled as users compile it
pytestmark = conformance.native_built
NAMES = ("out", "dq", "dk", "dv")


class Drawn(NamedTuple):
    """One configuration."""

    B: int
    T: int
    S: int
    K: int
    G: int
    H: int
    causal: bool
    padded: bool


def drawn(number: int) -> Drawn:
    """Sizes of all kinds, and T of at most S under a causal mask, as torch has it."""
    rng = np.random.default_rng([7, number])
    most = int(rng.choice([20, 130, 700]))
    T, S = (int(x) for x in np.sort(rng.integers(1, most, 2)))
    K, G, H = int(rng.integers(1, 3)), int(rng.choice([1, 1, 3])), int(rng.choice([8, 33, 64, 128]))
    kind = rng.integers(0, 3)
    return Drawn(int(rng.integers(1, 3)), T, S, K, G, H, bool(kind == 1), bool(kind == 2))


def arrays(case: Drawn, size: float) -> tuple[Any, ...]:
    """Queries, whose logits have about the given size, keys, values, a cotangent, and lengths."""
    B, T, S, K, G, H = case[:6]
    rng = np.random.default_rng([*case])
    shapes = (B, T, K * G, H), (B, S, K, H), (B, S, K, H), (B, T, K * G, H)
    heads = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    heads[0] *= np.float32(size)
    return *heads, rng.integers(1, S + 1, B).astype(np.int32)


def exact(case: Drawn, q: Any, k: Any, v: Any, g: Any, lengths: Any) -> list[Any]:
    """Output and gradients in float64."""
    G, scale = case.G, case.H**-0.5
    q, k, v, g = (np.moveaxis(x.astype(np.float64), 2, 1) for x in (q, k, v, g))
    k, v = (np.repeat(x, G, 1) for x in (k, v))
    logits = scale * q @ np.swapaxes(k, -1, -2)
    T, S = logits.shape[2:]
    if case.causal:
        logits = np.where(np.tri(T, S) > 0, logits, -np.inf)
    if case.padded:
        logits = np.where(np.arange(S) < lengths[:, None, None, None], logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    d_weights = g @ np.swapaxes(v, -1, -2)
    d_logits = scale * weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    dk, dv = np.swapaxes(d_logits, -1, -2) @ q, np.swapaxes(weights, -1, -2) @ g
    dk, dv = (x.reshape(x.shape[0], case.K, G, *x.shape[2:]).sum(2) for x in (dk, dv))
    return [np.moveaxis(x, 1, 2) for x in (weights @ v, d_logits @ k, dk, dv)]


@cache
def program(causal: bool, padded: bool) -> Any:
    def run(q: Any, k: Any, v: Any, g: Any, lengths: Any) -> Any:
        attend = partial(
            jaxmha.dot_product_attention,
            is_causal=causal,
            key_value_seq_lengths=lengths if padded else None,
            implementation="native",
        )
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(g)

    return jax.jit(run)


def of_torch(case: Drawn, q: Any, k: Any, v: Any, g: Any, lengths: Any) -> list[Any]:
    q, k, v, g = (torch.from_numpy(x).transpose(1, 2) for x in (q, k, v, g))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = torch.arange(case.S) < torch.from_numpy(lengths)[:, None, None, None]
    key, value = (x.repeat_interleave(case.G, 1) for x in leaves[1:])
    out = torch.nn.functional.scaled_dot_product_attention(
        leaves[0], key, value, attn_mask=mask if case.padded else None, is_causal=case.causal
    )
    found = (out, *torch.autograd.grad(out, leaves, g))
    return [x.detach().transpose(1, 2).numpy() for x in found]


def ratios(numbers: range, size: float) -> dict[str, Any]:
    """RMS errors against float64, in those of torch."""
    found: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in numbers:
        case = drawn(number)
        given = arrays(case, size)
        want = exact(case, *given)
        ours = program(case.causal, case.padded)(*map(to_jax, given))
        theirs = of_torch(case, *given)
        for name, x, y, z in zip(NAMES, ours, theirs, want, strict=True):
            mine, other = (float(np.sqrt(((np.asarray(e) - z) ** 2).mean())) for e in (x, y))
            tiny = float(np.sqrt((z**2).mean())) * 2.0**-26 + 1e-30
            found[name].append((mine + tiny) / (other + tiny))
    return {name: np.asarray(x) for name, x in found.items()}


@pytest.mark.parametrize("size", [1.0, 10.0])
@pytest.mark.parametrize("count", [12, 200])
@pytest.mark.everyday(count=[12])
def test_errors_are_those_of_torch_or_less(size: float, count: int) -> None:
    for name, found in ratios(range(count), size).items():
        assert np.exp(np.log(found).mean()) <= 0.9, (name, found)
        assert found.max() <= 1.5, (name, found)
