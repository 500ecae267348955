"""transformers' ViT classifier, and an nnx model with a learned class token."""

# mypy: ignore-errors
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from tests.match.pairs.base import Pair, floats

D, N = 24, 3


class Block(nnx.Module):
    def __init__(self, rngs):
        self.ln1 = nnx.LayerNorm(D, epsilon=1e-12, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs)
        self.ln2 = nnx.LayerNorm(D, epsilon=1e-12, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(D, 48, rngs=rngs),
            lambda x: jax.nn.gelu(x, approximate=False),
            nnx.Linear(48, D, rngs=rngs),
        )

    def __call__(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class VisionTransformer(nnx.Module):
    def __init__(self, rngs):
        self.cls = nnx.Param(jnp.zeros((1, 1, D)))
        self.pos_embed = nnx.Param(jnp.zeros((1, 17, D)))
        self.patchify = nnx.Conv(3, D, (4, 4), (4, 4), padding="VALID", rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(3)])
        self.final_norm = nnx.LayerNorm(D, epsilon=1e-12, rngs=rngs)
        self.head = nnx.Linear(D, 5, rngs=rngs)

    def __call__(self, x):
        x = self.patchify(x).reshape(x.shape[0], 16, D)
        cls = jnp.broadcast_to(self.cls[...], (x.shape[0], 1, D))
        x = jnp.concatenate([cls, x], 1) + self.pos_embed[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.final_norm(x)[:, 0])


def source():
    config = transformers.ViTConfig(
        hidden_size=D, num_hidden_layers=3, num_attention_heads=N, intermediate_size=48,
        image_size=16, patch_size=4, num_labels=5,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def run_source(model, x):
    with torch.no_grad():
        return model.eval()(torch.as_tensor(np.moveaxis(x, -1, 1).copy())).logits.numpy()


PAIR = Pair(source, lambda: VisionTransformer(nnx.Rngs(0)), floats(2, 16, 16, 3), run_source)
