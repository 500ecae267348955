"""transformers' GPT-2 language model, and an nnx decoder with a fused projection."""

# mypy: ignore-errors
import jax
import jax.numpy as jnp
import torch
import transformers
from flax import nnx

from tests.match.pairs.base import Pair, tokens

D, N = 32, 4


class SelfAttention(nnx.Module):
    def __init__(self, rngs):
        self.q = nnx.Linear(D, D, rngs=rngs)
        self.k = nnx.Linear(D, D, rngs=rngs)
        self.v = nnx.Linear(D, D, rngs=rngs)
        self.o = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x):
        q, k, v = (f(x).reshape(*x.shape[:2], N, D // N) for f in (self.q, self.k, self.v))
        return self.o(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.attn = SelfAttention(rngs)
        self.norm2 = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.fc1 = nnx.Linear(D, 4 * D, rngs=rngs)
        self.fc2 = nnx.Linear(4 * D, D, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(jax.nn.gelu(self.fc1(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.token_embedding = nnx.Embed(101, D, rngs=rngs)
        self.position_embedding = nnx.Embed(48, D, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm_f = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)

    def __call__(self, ids):
        x = self.token_embedding(ids) + self.position_embedding(jnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.token_embedding.attend(self.norm_f(x))


def source():
    config = transformers.GPT2Config(vocab_size=101, n_positions=48, n_embd=D, n_layer=2, n_head=N)
    return transformers.GPT2LMHeadModel(config)


def run_source(model, ids):
    with torch.no_grad():
        return model.eval()(torch.as_tensor(ids)).logits.numpy()


PAIR = Pair(source, lambda: GPT(nnx.Rngs(0)), tokens(101, 2, 9), run_source)
