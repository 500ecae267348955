"""A mixture of gated experts in torch, and in nnx."""

# mypy: ignore-errors
import jax
import torch
from flax import nnx

from tests.match.pairs.base import Pair, floats

D, F, E = 12, 20, 4


class Expert(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = torch.nn.Linear(D, F, bias=False), torch.nn.Linear(D, F, bias=False)
        self.w2 = torch.nn.Linear(F, D, bias=False)

    def forward(self, x):
        return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))


class MoE(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(D, E, bias=False)
        self.experts = torch.nn.ModuleList([Expert() for _ in range(E)])

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., i : i + 1] * e(x) for i, e in enumerate(self.experts))


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            [
                torch.nn.ModuleDict({"block_sparse_moe": MoE(), "norm": torch.nn.LayerNorm(D)})
                for _ in range(2)
            ]
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["block_sparse_moe"](layer["norm"](x))
        return x


class FFN(nnx.Module):
    def __init__(self, rngs):
        self.gate_proj = nnx.Linear(D, F, use_bias=False, rngs=rngs)
        self.up_proj = nnx.Linear(D, F, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(F, D, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.pre_norm = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.router = nnx.Linear(D, E, use_bias=False, rngs=rngs)
        self.experts = nnx.List([FFN(rngs) for _ in range(E)])

    def __call__(self, x):
        y = self.pre_norm(x)
        weights = jax.nn.softmax(self.router(y))
        return x + sum(weights[..., i : i + 1] * e(y) for i, e in enumerate(self.experts))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Layer(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


PAIR = Pair(TorchNet, lambda: Net(nnx.Rngs(0)), floats(2, 5, D))
