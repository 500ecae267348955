"""A contrastive two-tower model in torch, and in linen."""

# mypy: ignore-errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import torch

from tests.match.pairs.base import Pair

D = 16


class TorchTowers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = lambda: torch.nn.TransformerEncoderLayer(
            D, 2, 32, batch_first=True, norm_first=True
        )
        self.token_embedding = torch.nn.Embedding(50, D)
        self.positional_embedding = torch.nn.Parameter(torch.randn(6, D))
        self.text_model = torch.nn.ModuleList([layer() for _ in range(2)])
        self.visual_conv = torch.nn.Conv2d(3, D, 4, 4)
        self.vision_model = torch.nn.ModuleList([layer() for _ in range(2)])
        self.text_projection = torch.nn.Linear(D, 12, bias=False)
        self.visual_projection = torch.nn.Linear(D, 12, bias=False)
        self.logit_scale = torch.nn.Parameter(torch.tensor(1.3))

    def forward(self, ids, x):
        t = self.token_embedding(ids) + self.positional_embedding
        for layer in self.text_model:
            t = layer(t)
        v = self.visual_conv(x.movedim(-1, 1)).flatten(2).transpose(1, 2)
        for layer in self.vision_model:
            v = layer(v)
        a, b = self.text_projection(t.mean(1)), self.visual_projection(v.mean(1))
        return self.logit_scale.exp() * a @ b.T


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm(1e-5, name="ln_1")(x)
        x = x + nn.MultiHeadDotProductAttention(2, name="attn")(y, y)
        y = nn.LayerNorm(1e-5, name="ln_2")(x)
        y = nn.Dense(32, name="mlp_up")(y)
        return x + nn.Dense(D, name="mlp_down")(nn.relu(y))


class Towers(nn.Module):
    @nn.compact
    def __call__(self, ids, x):
        t = nn.Embed(50, D, name="text_embed")(ids)
        t = t + self.param("text_pos", nn.initializers.zeros, (6, D))
        for i in range(2):
            t = Layer(name=f"text_layer_{i}")(t)
        v = nn.Conv(D, (4, 4), 4, "VALID", name="image_patches")(x)
        v = v.reshape(len(v), -1, D)
        for i in range(2):
            v = Layer(name=f"image_layer_{i}")(v)
        a = nn.Dense(12, use_bias=False, name="text_head")(t.mean(1))
        b = nn.Dense(12, use_bias=False, name="image_head")(v.mean(1))
        scale = self.param("temperature", nn.initializers.zeros, ())
        return jnp.exp(scale) * a @ b.T


def inputs(rng):
    return rng.integers(0, 50, (3, 6)), rng.normal(size=(3, 8, 8, 3)).astype("float32")


def target():
    model = Towers()
    return model, model.init(jax.random.key(0), jnp.zeros((1, 6), int), jnp.zeros((1, 8, 8, 3)))


PAIR = Pair(TorchTowers, target, inputs, run_target=lambda m, i, x: m[0].apply(m[1], i, x))
