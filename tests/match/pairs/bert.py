"""transformers' BERT, and an nnx encoder."""

# mypy: ignore-errors
import jax
import jax.numpy as jnp
import torch
import transformers
from flax import nnx

from tests.match.pairs.base import Pair, tokens

D, N = 32, 4


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.mha = nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs)
        self.ln_attn = nnx.LayerNorm(D, epsilon=1e-12, rngs=rngs)
        self.up = nnx.Linear(D, 64, rngs=rngs)
        self.down = nnx.Linear(64, D, rngs=rngs)
        self.ln_mlp = nnx.LayerNorm(D, epsilon=1e-12, rngs=rngs)

    def __call__(self, x):
        x = self.ln_attn(x + self.mha(x))
        return self.ln_mlp(x + self.down(jax.nn.gelu(self.up(x), approximate=False)))


class Encoder(nnx.Module):
    def __init__(self, rngs):
        self.tok = nnx.Embed(99, D, rngs=rngs)
        self.pos = nnx.Embed(40, D, rngs=rngs)
        self.seg = nnx.Embed(2, D, rngs=rngs)
        self.ln_emb = nnx.LayerNorm(D, epsilon=1e-12, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(3)])
        self.pooler = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, ids):
        x = self.tok(ids) + self.pos(jnp.arange(ids.shape[1])) + self.seg(jnp.zeros_like(ids))
        x = self.ln_emb(x)
        for layer in self.layers:
            x = layer(x)
        return jnp.tanh(self.pooler(x[:, 0]))


def source():
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=D, num_hidden_layers=3, num_attention_heads=N,
        intermediate_size=64, max_position_embeddings=40,
    )  # fmt: skip
    return transformers.BertModel(config)


def run_source(model, ids):
    with torch.no_grad():
        return model.eval()(torch.as_tensor(ids)).pooler_output.numpy()


PAIR = Pair(source, lambda: Encoder(nnx.Rngs(0)), tokens(99, 2, 7), run_source)
