"""transformers' Llama with grouped queries, and an nnx decoder."""

# mypy: ignore-errors
import jax
import jax.numpy as jnp
import torch
import transformers
from flax import nnx

from tests.match.pairs.base import Pair, tokens

D, N, K, H, F = 32, 4, 2, 8, 56


def rotate(x):
    freqs = 10000.0 ** (-jnp.arange(0, H, 2) / H)
    angles = jnp.arange(x.shape[1])[:, None] * freqs
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.wq = nnx.LinearGeneral(D, (N, H), use_bias=False, rngs=rngs)
        self.wk = nnx.LinearGeneral(D, (K, H), use_bias=False, rngs=rngs)
        self.wv = nnx.LinearGeneral(D, (K, H), use_bias=False, rngs=rngs)
        self.wo = nnx.LinearGeneral((N, H), D, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x):
        q, k = rotate(self.wq(x)), rotate(self.wk(x))
        return self.wo(jax.nn.dot_product_attention(q, k, self.wv(x), is_causal=True))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention_norm = nnx.RMSNorm(D, rngs=rngs)
        self.attention = Attention(rngs)
        self.ffn_norm = nnx.RMSNorm(D, rngs=rngs)
        self.w1 = nnx.Linear(D, F, use_bias=False, rngs=rngs)
        self.w2 = nnx.Linear(F, D, use_bias=False, rngs=rngs)
        self.w3 = nnx.Linear(D, F, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        y = self.ffn_norm(x)
        return x + self.w2(jax.nn.silu(self.w1(y)) * self.w3(y))


class Llama(nnx.Module):
    def __init__(self, rngs):
        self.tok_embeddings = nnx.Embed(67, D, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.output = nnx.Linear(D, 67, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def source():
    config = transformers.LlamaConfig(
        vocab_size=67, hidden_size=D, intermediate_size=F, num_hidden_layers=2,
        num_attention_heads=N, num_key_value_heads=K, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def run_source(model, ids):
    with torch.no_grad():
        return model.eval()(torch.as_tensor(ids)).logits.numpy()


def target():
    return nnx.eval_shape(lambda: Llama(nnx.Rngs(0)))


PAIR = Pair(source, target, tokens(67, 2, 9), run_source)
