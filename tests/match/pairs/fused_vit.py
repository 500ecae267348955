"""A timm-like ViT with one fused projection and layer scale, and nnx with three projections."""

# mypy: ignore-errors
import jax
import jax.numpy as jnp
import torch
from flax import nnx

from tests.match.pairs.base import Pair, floats

D, N = 24, 3


class TorchAttention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(D, 3 * D)
        self.proj = torch.nn.Linear(D, D)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, N, D // N).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, t, D))


class TorchBlock(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(D), torch.nn.LayerNorm(D)
        self.attn = TorchAttention()
        self.ls1, self.ls2 = (torch.nn.Parameter(torch.randn(D)) for _ in range(2))
        self.mlp = torch.nn.ModuleDict(
            {"fc1": torch.nn.Linear(D, 2 * D), "fc2": torch.nn.Linear(2 * D, D)}
        )

    def forward(self, x):
        x = x + self.ls1 * self.attn(self.norm1(x))
        y = self.mlp["fc2"](torch.nn.functional.gelu(self.mlp["fc1"](self.norm2(x))))
        return x + self.ls2 * y


class TorchViT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cls_token = torch.nn.Parameter(torch.randn(1, 1, D))
        self.pos_embed = torch.nn.Parameter(torch.randn(1, 10, D))
        self.patch_embed = torch.nn.ModuleDict({"proj": torch.nn.Conv2d(3, D, 4, 4)})
        self.blocks = torch.nn.ModuleList([TorchBlock() for _ in range(2)])
        self.norm = torch.nn.LayerNorm(D)
        self.head = torch.nn.Linear(D, 7)

    def forward(self, x):
        x = self.patch_embed["proj"](x.movedim(-1, 1)).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Block(nnx.Module):
    def __init__(self, rngs):
        self.pre_attn = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs)
        self.attn_scale = nnx.Param(jnp.ones(D))
        self.pre_mlp = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.dense_in = nnx.Linear(D, 2 * D, rngs=rngs)
        self.dense_out = nnx.Linear(2 * D, D, rngs=rngs)
        self.mlp_scale = nnx.Param(jnp.ones(D))

    def __call__(self, x):
        x = x + self.attn_scale * self.attention(self.pre_attn(x))
        y = self.dense_out(jax.nn.gelu(self.dense_in(self.pre_mlp(x)), approximate=False))
        return x + self.mlp_scale * y


class ViT(nnx.Module):
    def __init__(self, rngs):
        self.embedder = nnx.Conv(3, D, (4, 4), (4, 4), padding="VALID", rngs=rngs)
        self.class_token = nnx.Param(jnp.zeros(D))
        self.positions = nnx.Param(jnp.zeros((10, D)))
        self.stack = nnx.List([Block(rngs) for _ in range(2)])
        self.ln = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.classifier = nnx.Linear(D, 7, rngs=rngs)

    def __call__(self, x):
        x = self.embedder(x).reshape(len(x), 9, D)
        first = jnp.broadcast_to(self.class_token[...], (len(x), 1, D))
        x = jnp.concatenate([first, x], 1) + self.positions[...]
        for block in self.stack:
            x = block(x)
        return self.classifier(self.ln(x)[:, 0])


PAIR = Pair(TorchViT, lambda: ViT(nnx.Rngs(0)), floats(2, 12, 12, 3), packing="concatenated")
