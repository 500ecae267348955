"""Whisper in flax.nnx: load a folder of transformers, train, transcribe with a cache.

    model = load("whisper-folder")  # of a WhisperForConditionalGeneration that save_pretrained wrote
    tokens = generate(model, mel, prompt, steps=20)  # mel: B, frames, bins

Source: Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmha import KVCache, Mask
from jaxmha.converters import config_of
from jaxmha.converters import flax as convert
from jaxmha.flax.nnx import MultiHeadAttention

# Key of config.json -> the values of it that this file computes; all others are refused.
ACCEPTED = {"activation_function": ("gelu",), "tie_word_embeddings": (True,)}


@dataclass(frozen=True)
class Config:
    """Sizes, as `config.json` of transformers names them."""

    vocab_size: int
    num_mel_bins: int
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    decoder_layers: int
    decoder_attention_heads: int
    decoder_ffn_dim: int
    max_source_positions: int
    max_target_positions: int

    @classmethod
    def read(cls, folder: str | Path) -> "Config":
        """The config of a folder that `save_pretrained` wrote."""
        found = config_of(folder, "whisper", accepted=ACCEPTED)
        return cls(**{name: x for name, x in found.items() if name in cls.__dataclass_fields__})


def check_length(positions: nnx.Embed, length: int) -> None:
    """Raises ValueError for positions beyond the table, of which nnx.Embed would return NaN."""
    count = positions.num_embeddings
    if length > count:
        raise ValueError(f"the model has {count} positions, and the tokens need {length}")


class Block(nnx.Module):
    """Self-attention, cross-attention (only in the decoder) and an MLP, each behind a LayerNorm."""

    def __init__(
        self, size: int, heads: int, inner: int, rngs: nnx.Rngs, *, decoder: bool = False
    ) -> None:
        norm = partial(nnx.LayerNorm, size, epsilon=1e-5, rngs=rngs)
        biases = ("query", "value", "out")  # softmax weights do not depend on a bias of keys
        attention = partial(MultiHeadAttention, heads, size, use_bias=biases, rngs=rngs)
        self.attention, self.attention_norm = attention(), norm()
        self.cross: MultiHeadAttention | None = attention() if decoder else None
        self.cross_norm = norm() if decoder else None
        self.up, self.down = nnx.Linear(size, inner, rngs=rngs), nnx.Linear(inner, size, rngs=rngs)
        self.mlp_norm = norm()

    def rest(
        self, x: Float[Array, "B T D"], source: Float[Array, "B S D"] | None
    ) -> Float[Array, "B T D"]:
        """Everything after self-attention."""
        if self.cross is not None and self.cross_norm is not None:
            x += self.cross(self.cross_norm(x), source)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x)), approximate=False))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        mask: Mask,
        source: Float[Array, "B S D"] | None = None,
    ) -> Float[Array, "B T D"]:
        return self.rest(x + self.attention(self.attention_norm(x), mask=mask), source)

    def extend(
        self, x: Float[Array, "B T D"], cache: KVCache, source: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Applies the block to new tokens, and appends their keys and values to the cache."""
        attended, cache = self.attention.extend(self.attention_norm(x), cache)
        return self.rest(x + attended, source), cache


class Encoder(nnx.Module):
    """Two convolutions over time, of which the second halves the number of frames, then blocks."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        size = config.d_model
        conv = partial(nnx.Conv, kernel_size=(3,), padding=((1, 1),), rngs=rngs)
        self.conv1 = conv(config.num_mel_bins, size)
        self.conv2 = conv(size, size, strides=(2,))
        self.positions = nnx.Embed(config.max_source_positions, size, rngs=rngs)
        sizes = size, config.encoder_attention_heads, config.encoder_ffn_dim
        self.blocks = nnx.List([Block(*sizes, rngs) for _ in range(config.encoder_layers)])
        self.norm = nnx.LayerNorm(size, epsilon=1e-5, rngs=rngs)

    def __call__(self, mel: Float[Array, "B frames bins"]) -> Float[Array, "B S D"]:
        x = nnx.gelu(self.conv1(mel), approximate=False)
        x = nnx.gelu(self.conv2(x), approximate=False)
        check_length(self.positions, x.shape[1])
        x += self.positions(jnp.arange(x.shape[1]))[None]
        for block in self.blocks:
            x = block(x, Mask())
        return self.norm(x)


class Decoder(nnx.Module):
    """A decoder of tokens: causal self-attention, and cross-attention to the encoded sound."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        size = config.d_model
        self.embedding = nnx.Embed(config.vocab_size, size, rngs=rngs)
        self.positions = nnx.Embed(config.max_target_positions, size, rngs=rngs)
        sizes = size, config.decoder_attention_heads, config.decoder_ffn_dim
        self.blocks = nnx.List(
            [Block(*sizes, rngs, decoder=True) for _ in range(config.decoder_layers)]
        )
        self.norm = nnx.LayerNorm(size, epsilon=1e-5, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "B T"], source: Float[Array, "B S D"]
    ) -> Float[Array, "B T vocab"]:
        check_length(self.positions, tokens.shape[1])
        x = self.embedding(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        for block in self.blocks:
            x = block(x, Mask.causal(), source)
        return self.embedding.attend(self.norm(x))

    def extend(
        self, tokens: Int[Array, "B T"], caches: list[KVCache], source: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B vocab"], list[KVCache]]:
        """Logits after the last of the new tokens, and the caches that hold them."""
        check_length(self.positions, caches[0].slots)
        at = caches[0].lengths[:, None] + jnp.arange(tokens.shape[1])
        x, kept = self.embedding(tokens) + self.positions(at), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block.extend(x, cache, source)
            kept.append(cache)
        return self.embedding.attend(self.norm(x[:, -1])), kept


class Whisper(nnx.Module):
    """An encoder of sound and a decoder. `model(mel, tokens)` gives the logits of next tokens."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.encoder, self.decoder = Encoder(config, rngs), Decoder(config, rngs)

    def __call__(
        self, mel: Float[Array, "B frames bins"], tokens: Int[Array, "B T"]
    ) -> Float[Array, "B T vocab"]:
        return self.decoder(tokens, self.encoder(mel))


def load(folder: str | Path) -> Whisper:
    """The model of a folder that `save_pretrained` wrote."""
    return convert.load_into(Whisper(Config.read(folder), nnx.Rngs(0)), folder)


def loss(
    model: Whisper, mel: Float[Array, "B frames bins"], tokens: Int[Array, "B T"]
) -> Float[Array, ""]:
    """Mean cross-entropy of the next token, for `nnx.value_and_grad`."""
    log_p = jax.nn.log_softmax(model(mel, tokens[:, :-1]))
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()


@nnx.jit
def _extend(
    model: Whisper,
    tokens: Int[Array, "B T"],
    caches: list[KVCache],
    source: Float[Array, "B S D"],
) -> tuple[Int[Array, "B 1"], list[KVCache]]:
    logits, caches = model.decoder.extend(tokens, caches, source)
    return logits.argmax(-1, keepdims=True).astype(tokens.dtype), caches


def generate(
    model: Whisper, mel: Float[Array, "B frames bins"], prompt: Int[Array, "B T"], steps: int
) -> Int[Array, "B steps"]:
    """Greedy decoding after the prompts, which name language and task."""
    batch, length = prompt.shape
    source = model.encoder(mel)
    caches = [
        KVCache.empty(block.attention.to_params()[0], batch, length + steps - 1)
        for block in model.decoder.blocks
    ]
    tokens, found = prompt, [prompt[:, :0]]
    for _ in range(steps):
        tokens, caches = _extend(model, tokens, caches, source)
        found.append(tokens)
    return jnp.concatenate(found, 1)
