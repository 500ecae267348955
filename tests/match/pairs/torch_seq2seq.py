"""torch.nn.Transformer, and nnx modules with attention of their own."""

# mypy: ignore-errors
import jax
import torch
from flax import nnx

from tests.match.pairs.base import Pair

D, N = 24, 3


class Enc(nnx.Module):
    def __init__(self, rngs):
        self.att = nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs)
        self.lin1 = nnx.Linear(D, 40, rngs=rngs)
        self.lin2 = nnx.Linear(40, D, rngs=rngs)
        self.ln1 = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.ln2 = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)

    def __call__(self, x):
        x = self.ln1(x + self.att(x))
        return self.ln2(x + self.lin2(jax.nn.relu(self.lin1(x))))


class Dec(nnx.Module):
    def __init__(self, rngs):
        self.att = nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs)
        self.cross = nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs)
        self.lin1 = nnx.Linear(D, 40, rngs=rngs)
        self.lin2 = nnx.Linear(40, D, rngs=rngs)
        self.ln1 = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.ln2 = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.ln3 = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)

    def __call__(self, x, y):
        x = self.ln1(x + self.att(x))
        x = self.ln2(x + self.cross(x, y))
        return self.ln3(x + self.lin2(jax.nn.relu(self.lin1(x))))


class Seq2Seq(nnx.Module):
    def __init__(self, rngs):
        self.enc = nnx.List([Enc(rngs) for _ in range(2)])
        self.dec = nnx.List([Dec(rngs) for _ in range(2)])
        self.enc_ln = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.dec_ln = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)

    def __call__(self, x, y):
        for layer in self.enc:
            x = layer(x)
        x = self.enc_ln(x)
        for layer in self.dec:
            y = layer(y, x)
        return self.dec_ln(y)


def inputs(rng):
    return tuple(rng.normal(size=(2, t, D)).astype("float32") for t in (5, 7))


def source():
    return torch.nn.Transformer(D, N, 2, 2, 40, batch_first=True)


PAIR = Pair(source, lambda: Seq2Seq(nnx.Rngs(0)), inputs)
