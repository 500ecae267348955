"""A diffusion transformer with adaptive norms in torch, and in nnx."""

# mypy: ignore-errors
import jax
import jax.numpy as jnp
import torch
from flax import nnx
from torch.nn.functional import layer_norm

from tests.match.pairs.base import Pair

D, N, C = 16, 2, 6


class DiTBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = torch.nn.MultiheadAttention(D, N, batch_first=True)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(D, 4 * D), torch.nn.GELU(), torch.nn.Linear(4 * D, D)
        )
        self.adaLN_modulation = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Linear(D, 4 * D))

    def forward(self, x, c):
        a, b, d, e = self.adaLN_modulation(c)[:, None].chunk(4, -1)
        y = layer_norm(x, (D,)) * (1 + a) + b
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(layer_norm(x, (D,)) * (1 + d) + e)


class TorchDiT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.x_embedder = torch.nn.Linear(C, D)
        self.t_embedder = torch.nn.Sequential(
            torch.nn.Linear(10, D), torch.nn.SiLU(), torch.nn.Linear(D, D)
        )
        self.y_embedder = torch.nn.Embedding(9, D)
        self.blocks = torch.nn.ModuleList([DiTBlock() for _ in range(2)])
        self.final_layer = torch.nn.Linear(D, C)

    def forward(self, x, t, y):
        c = self.t_embedder(t) + self.y_embedder(y)
        x = self.x_embedder(x)
        for block in self.blocks:
            x = block(x, c)
        return self.final_layer(x)


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.self_attention = nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs)
        self.modulation = nnx.Linear(D, 4 * D, rngs=rngs)
        self.mlp_fc1, self.mlp_fc2 = (
            nnx.Linear(D, 4 * D, rngs=rngs),
            nnx.Linear(4 * D, D, rngs=rngs),
        )

    def __call__(self, x, c):
        a, b, d, e = jnp.split(self.modulation(jax.nn.silu(c))[:, None], 4, -1)
        x = x + self.self_attention(norm(x) * (1 + a) + b)
        y = self.mlp_fc1(norm(x) * (1 + d) + e)
        return x + self.mlp_fc2(jax.nn.gelu(y, approximate=False))


class DiT(nnx.Module):
    def __init__(self, rngs):
        self.input_proj = nnx.Linear(C, D, rngs=rngs)
        self.time_fc1, self.time_fc2 = nnx.Linear(10, D, rngs=rngs), nnx.Linear(D, D, rngs=rngs)
        self.label_embed = nnx.Embed(9, D, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.output_proj = nnx.Linear(D, C, rngs=rngs)

    def __call__(self, x, t, y):
        c = self.time_fc2(jax.nn.silu(self.time_fc1(t))) + self.label_embed(y)
        x = self.input_proj(x)
        for layer in self.layers:
            x = layer(x, c)
        return self.output_proj(x)


def inputs(rng):
    x, t = rng.normal(size=(2, 7, C)), rng.normal(size=(2, 10))
    return x.astype("float32"), t.astype("float32"), rng.integers(0, 9, 2)


PAIR = Pair(TorchDiT, lambda: DiT(nnx.Rngs(0)), inputs)
