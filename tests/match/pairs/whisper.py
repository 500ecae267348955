"""transformers' Whisper, and an nnx model whose attention has no bias on keys."""

# mypy: ignore-errors
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from tests.match.pairs.base import Pair

D, N, V = 32, 4, 83
gelu = lambda x: jax.nn.gelu(x, approximate=False)


class MHA(nnx.Module):
    def __init__(self, rngs):
        self.query = nnx.Linear(D, D, rngs=rngs)
        self.key = nnx.Linear(D, D, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(D, D, rngs=rngs)
        self.out = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x, y, causal=False):
        q, k, v = (
            f(z).reshape(*z.shape[:2], N, D // N)
            for f, z in ((self.query, x), (self.key, y), (self.value, y))
        )
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=causal).reshape(x.shape))


class ResidualBlock(nnx.Module):
    def __init__(self, rngs, cross):
        self.attn = MHA(rngs)
        self.attn_ln = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        if cross:
            self.cross_attn = MHA(rngs)
            self.cross_attn_ln = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.mlp_in = nnx.Linear(D, 4 * D, rngs=rngs)
        self.mlp_out = nnx.Linear(4 * D, D, rngs=rngs)
        self.mlp_ln = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)
        self.cross = cross

    def __call__(self, x, memory=None):
        h = self.attn_ln(x)
        x = x + self.attn(h, h, causal=self.cross)
        if self.cross:
            x = x + self.cross_attn(self.cross_attn_ln(x), memory)
        return x + self.mlp_out(gelu(self.mlp_in(self.mlp_ln(x))))


class AudioEncoder(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(8, D, (3,), padding=1, rngs=rngs)
        self.conv2 = nnx.Conv(D, D, (3,), 2, padding=1, rngs=rngs)
        self.positional_embedding = nnx.Param(jnp.zeros((20, D)))
        self.blocks = nnx.List([ResidualBlock(rngs, False) for _ in range(2)])
        self.ln_post = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)

    def __call__(self, mel):
        x = gelu(self.conv2(gelu(self.conv1(mel)))) + self.positional_embedding[...]
        for block in self.blocks:
            x = block(x)
        return self.ln_post(x)


class TextDecoder(nnx.Module):
    def __init__(self, rngs):
        self.token_embedding = nnx.Embed(V, D, rngs=rngs)
        self.positional_embedding = nnx.Param(jnp.zeros((30, D)))
        self.blocks = nnx.List([ResidualBlock(rngs, True) for _ in range(2)])
        self.ln = nnx.LayerNorm(D, epsilon=1e-5, rngs=rngs)

    def __call__(self, ids, memory):
        x = self.token_embedding(ids) + self.positional_embedding[...][: ids.shape[1]]
        for block in self.blocks:
            x = block(x, memory)
        return self.token_embedding.attend(self.ln(x))


class Whisper(nnx.Module):
    def __init__(self, rngs):
        self.encoder, self.decoder = AudioEncoder(rngs), TextDecoder(rngs)

    def __call__(self, mel, ids):
        return self.decoder(ids, self.encoder(mel))


def source():
    config = transformers.WhisperConfig(
        vocab_size=V, num_mel_bins=8, d_model=D, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=N, decoder_attention_heads=N, encoder_ffn_dim=4 * D,
        decoder_ffn_dim=4 * D, max_source_positions=20, max_target_positions=30,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def run_source(model, mel, ids):
    with torch.no_grad():
        out = model.eval()(
            torch.as_tensor(np.swapaxes(mel, 1, 2).copy()), decoder_input_ids=torch.as_tensor(ids)
        )
    return out.logits.numpy()


def inputs(rng):
    return rng.normal(size=(2, 40, 8)).astype("float32"), rng.integers(0, V, (2, 6))


PAIR = Pair(source, lambda: Whisper(nnx.Rngs(0)), inputs, run_source)
