"""MLP-Mixer in torch, and in nnx."""

# mypy: ignore-errors
import jax
import torch
from flax import nnx
from torch.nn.functional import gelu

from tests.match.pairs.base import Pair, floats

D, T = 20, 9


class Mlp(torch.nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(d, h), torch.nn.Linear(h, d)

    def forward(self, x):
        return self.fc2(gelu(self.fc1(x)))


class MixerBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.mlp_tokens = torch.nn.LayerNorm(D), Mlp(T, 16)
        self.norm2, self.mlp_channels = torch.nn.LayerNorm(D), Mlp(D, 32)

    def forward(self, x):
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class TorchMixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Linear(12, D)
        self.blocks = torch.nn.Sequential(*[MixerBlock() for _ in range(3)])
        self.norm, self.head = torch.nn.LayerNorm(D), torch.nn.Linear(D, 4)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.stem(x))).mean(1))


class TwoLayer(nnx.Module):
    def __init__(self, d, h, rngs):
        self.lin_in, self.lin_out = nnx.Linear(d, h, rngs=rngs), nnx.Linear(h, d, rngs=rngs)

    def __call__(self, x):
        return self.lin_out(jax.nn.gelu(self.lin_in(x), approximate=False))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.token_mixing, self.channel_mixing = TwoLayer(T, 16, rngs), TwoLayer(D, 32, rngs)
        self.ln_a = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.ln_b = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)

    def __call__(self, x):
        x = x + self.token_mixing(self.ln_a(x).swapaxes(1, 2)).swapaxes(1, 2)
        return x + self.channel_mixing(self.ln_b(x))


class Mixer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(12, D, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(3)])
        self.out_norm = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.out = nnx.Linear(D, 4, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.out_norm(x).mean(1))


PAIR = Pair(TorchMixer, lambda: Mixer(nnx.Rngs(0)), floats(2, T, 12))
