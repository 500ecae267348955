"""gMLP with spatial gating in torch, and in nnx."""

# mypy: ignore-errors
import jax
import torch
from flax import nnx

from tests.match.pairs.base import Pair, tokens

D, F, T = 16, 24, 8


class SpatialGatingUnit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(F // 2)
        self.spatial_proj = torch.nn.Conv1d(T, T, 1)

    def forward(self, x):
        u, v = x.chunk(2, -1)
        return u * self.spatial_proj(self.norm(v))


class GatingMlpBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(D)
        self.proj_1, self.proj_2 = torch.nn.Linear(D, F), torch.nn.Linear(F // 2, D)
        self.spatial_gating_unit = SpatialGatingUnit()

    def forward(self, x):
        y = torch.nn.functional.gelu(self.proj_1(self.norm(x)))
        return x + self.proj_2(self.spatial_gating_unit(y))


class TorchGMLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(30, D)
        self.model = torch.nn.Sequential(*[GatingMlpBlock() for _ in range(2)])
        self.to_logits = torch.nn.Linear(D, 30)

    def forward(self, ids):
        return self.to_logits(self.model(self.embed(ids)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.input_norm = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.in_proj = nnx.Linear(D, F, rngs=rngs)
        self.gate_norm = nnx.LayerNorm(F // 2, epsilon=1e-5, rngs=rngs)
        self.gate = nnx.Linear(T, T, rngs=rngs)
        self.out_proj = nnx.Linear(F // 2, D, rngs=rngs)

    def __call__(self, x):
        y = jax.nn.gelu(self.in_proj(self.input_norm(x)), approximate=False)
        u, v = y[..., : F // 2], y[..., F // 2 :]
        v = self.gate(self.gate_norm(v).swapaxes(1, 2)).swapaxes(1, 2)
        return x + self.out_proj(u * v)


class GMLP(nnx.Module):
    def __init__(self, rngs):
        self.wte = nnx.Embed(30, D, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.lm_head = nnx.Linear(D, 30, rngs=rngs)

    def __call__(self, ids):
        x = self.wte(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


PAIR = Pair(TorchGMLP, lambda: GMLP(nnx.Rngs(0)), tokens(30, 2, T))
