"""transformers' T5, and an nnx encoder-decoder with the relative bias at the top."""

# mypy: ignore-errors
import jax
import jax.numpy as jnp
import torch
import transformers
from flax import nnx

from tests.match.pairs.base import Pair

D, N, H, F, V = 32, 4, 8, 48, 71


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.query = nnx.Linear(D, N * H, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(D, N * H, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(D, N * H, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(N * H, D, use_bias=False, rngs=rngs)

    def __call__(self, x, y, bias=0.0):
        q, k, v = (
            f(z).reshape(*z.shape[:2], N, H)
            for f, z in ((self.query, x), (self.key, y), (self.value, y))
        )
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) + bias
        o = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)
        return self.out(o.reshape(*x.shape[:2], N * H))


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.wi = nnx.Linear(D, F, use_bias=False, rngs=rngs)
        self.wo = nnx.Linear(F, D, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.wo(jax.nn.relu(self.wi(x)))


class EncoderLayer(nnx.Module):
    def __init__(self, rngs):
        self.self_attn, self.mlp = Attention(rngs), MLP(rngs)
        self.norm_attn = nnx.RMSNorm(D, rngs=rngs)
        self.norm_mlp = nnx.RMSNorm(D, rngs=rngs)

    def __call__(self, x, bias):
        h = self.norm_attn(x)
        x = x + self.self_attn(h, h, bias)
        return x + self.mlp(self.norm_mlp(x))


class DecoderLayer(nnx.Module):
    def __init__(self, rngs):
        self.self_attn, self.cross_attn, self.mlp = Attention(rngs), Attention(rngs), MLP(rngs)
        self.norm_self = nnx.RMSNorm(D, rngs=rngs)
        self.norm_cross = nnx.RMSNorm(D, rngs=rngs)
        self.norm_mlp = nnx.RMSNorm(D, rngs=rngs)

    def __call__(self, x, memory, bias):
        h = self.norm_self(x)
        x = x + self.self_attn(h, h, bias)
        x = x + self.cross_attn(self.norm_cross(x), memory)
        return x + self.mlp(self.norm_mlp(x))


def buckets(t, bidirectional):
    relative = jnp.arange(t)[None, :] - jnp.arange(t)[:, None]
    n, out = 32, 0
    if bidirectional:
        n //= 2
        out = jnp.where(relative > 0, n, 0)
        relative = jnp.abs(relative)
    else:
        relative = -jnp.minimum(relative, 0)
    big = n // 2
    large = big + (jnp.log(jnp.maximum(relative, 1) / big) / jnp.log(128 / big) * (n - big)).astype(
        int
    )
    return out + jnp.where(relative < big, relative, jnp.minimum(large, n - 1))


class T5(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.enc_rel_bias = nnx.Embed(32, N, rngs=rngs)
        self.dec_rel_bias = nnx.Embed(32, N, rngs=rngs)
        self.encoder_layers = nnx.List([EncoderLayer(rngs) for _ in range(2)])
        self.encoder_norm = nnx.RMSNorm(D, rngs=rngs)
        self.decoder_layers = nnx.List([DecoderLayer(rngs) for _ in range(2)])
        self.decoder_norm = nnx.RMSNorm(D, rngs=rngs)

    def __call__(self, ids, labels):
        x, y = self.embed(ids), self.embed(labels)
        bias = self.enc_rel_bias(buckets(ids.shape[1], True)).transpose(2, 0, 1)[None]
        for layer in self.encoder_layers:
            x = layer(x, bias)
        x, t = self.encoder_norm(x), labels.shape[1]
        bias = self.dec_rel_bias(buckets(t, False)).transpose(2, 0, 1)[None]
        bias = jnp.where(jnp.tri(t, dtype=bool), bias, -1e30)
        for layer in self.decoder_layers:
            y = layer(y, x, bias)
        return self.embed.attend(self.decoder_norm(y) * D**-0.5)


def source():
    config = transformers.T5Config(
        vocab_size=V, d_model=D, d_kv=H, d_ff=F, num_layers=2, num_heads=N,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def run_source(model, ids, labels):
    with torch.no_grad():
        out = model.eval()(
            input_ids=torch.as_tensor(ids), decoder_input_ids=torch.as_tensor(labels)
        )
    return out.logits.numpy()


def inputs(rng):
    return rng.integers(0, V, (2, 11)), rng.integers(0, V, (2, 6))


PAIR = Pair(source, lambda: T5(nnx.Rngs(0)), inputs, run_source)
