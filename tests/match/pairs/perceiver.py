"""A Perceiver with learned latents in torch, and in nnx."""

# mypy: ignore-errors
import jax
import jax.numpy as jnp
import torch
from flax import nnx

from tests.match.pairs.base import Pair, floats

D, C, N = 16, 10, 2


class Attend(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        self.to_q = torch.nn.Linear(D, D, bias=False)
        self.to_kv = torch.nn.Linear(c, 2 * D, bias=False)
        self.to_out = torch.nn.Linear(D, D)

    def forward(self, x, y):
        b, t, _ = x.shape
        k, v = self.to_kv(y).chunk(2, -1)
        q, k, v = (z.reshape(b, -1, N, D // N).transpose(1, 2) for z in (self.to_q(x), k, v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.to_out(o.transpose(1, 2).reshape(b, t, D))


class TorchPerceiver(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.latents = torch.nn.Parameter(torch.randn(5, D))
        self.cross_attend = Attend(C)
        self.self_attends = torch.nn.ModuleList([Attend(D) for _ in range(2)])
        self.to_logits = torch.nn.Linear(D, 4)

    def forward(self, x):
        h = self.latents.expand(len(x), -1, -1)
        h = h + self.cross_attend(h, x)
        for layer in self.self_attends:
            h = h + layer(h, h)
        return self.to_logits(h.mean(1))


class MHA(nnx.Module):
    def __init__(self, c, rngs):
        self.q_proj = nnx.Linear(D, D, use_bias=False, rngs=rngs)
        self.k_proj = nnx.Linear(c, D, use_bias=False, rngs=rngs)
        self.v_proj = nnx.Linear(c, D, use_bias=False, rngs=rngs)
        self.o_proj = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x, y):
        q, k, v = (
            z.reshape(len(x), -1, N, D // N)
            for z in (self.q_proj(x), self.k_proj(y), self.v_proj(y))
        )
        return self.o_proj(jax.nn.dot_product_attention(q, k, v).reshape(x.shape))


class Perceiver(nnx.Module):
    def __init__(self, rngs):
        self.latent_array = nnx.Param(jnp.zeros((5, D)))
        self.input_attention = MHA(C, rngs)
        self.latent_layers = nnx.List([MHA(D, rngs) for _ in range(2)])
        self.classifier = nnx.Linear(D, 4, rngs=rngs)

    def __call__(self, x):
        h = jnp.broadcast_to(self.latent_array[...], (len(x), 5, D))
        h = h + self.input_attention(h, x)
        for layer in self.latent_layers:
            h = h + layer(h, h)
        return self.classifier(h.mean(1))


PAIR = Pair(TorchPerceiver, lambda: Perceiver(nnx.Rngs(0)), floats(2, 8, C))
