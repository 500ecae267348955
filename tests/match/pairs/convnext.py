"""ConvNeXt blocks in torch, and in nnx."""

# mypy: ignore-errors
import jax
import jax.numpy as jnp
import torch
from flax import nnx

from tests.match.pairs.base import Pair, floats

D = 12


class CNBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dwconv = torch.nn.Conv2d(D, D, 7, padding=3, groups=D)
        self.norm = torch.nn.LayerNorm(D)
        self.pwconv1, self.pwconv2 = torch.nn.Linear(D, 4 * D), torch.nn.Linear(4 * D, D)
        self.gamma = torch.nn.Parameter(torch.randn(D))

    def forward(self, x):
        y = self.norm(self.dwconv(x.movedim(-1, 1)).movedim(1, -1))
        return x + self.gamma * self.pwconv2(torch.nn.functional.gelu(self.pwconv1(y)))


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, D, 4, 4)
        self.stages = torch.nn.ModuleList([CNBlock() for _ in range(2)])
        self.head = torch.nn.Linear(D, 6)

    def forward(self, x):
        x = self.stem(x.movedim(-1, 1)).movedim(1, -1)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((1, 2)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.depthwise = nnx.Conv(D, D, (7, 7), padding=3, feature_group_count=D, rngs=rngs)
        self.ln = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.expand = nnx.Linear(D, 4 * D, rngs=rngs)
        self.reduce = nnx.Linear(4 * D, D, rngs=rngs)
        self.layer_scale = nnx.Param(jnp.ones(D))

    def __call__(self, x):
        y = self.ln(self.depthwise(x))
        y = self.reduce(jax.nn.gelu(self.expand(y), approximate=False))
        return x + self.layer_scale * y


class ConvNeXt(nnx.Module):
    def __init__(self, rngs):
        self.patch = nnx.Conv(3, D, (4, 4), (4, 4), padding="VALID", rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.classifier = nnx.Linear(D, 6, rngs=rngs)

    def __call__(self, x):
        x = self.patch(x)
        for block in self.blocks:
            x = block(x)
        return self.classifier(x.mean((1, 2)))


PAIR = Pair(TorchNet, lambda: ConvNeXt(nnx.Rngs(0)), floats(2, 16, 16, 3))
