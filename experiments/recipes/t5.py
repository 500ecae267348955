"""T5 in flax.nnx: load a folder of transformers, train, decode with a cache.

    model = load("t5-folder")  # of a T5ForConditionalGeneration that save_pretrained wrote
    tokens = generate(model, source, lengths, steps=20)

Sources: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer" (2020); Shazeer, "GLU Variants Improve Transformer" (2020).
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmha import KVCache, Mask, Semantics, checkpoint, extend, multi_head_attention
from jaxmha.converters import config_of
from jaxmha.converters import flax as convert
from jaxmha.flax.nnx import MultiHeadAttention
from jaxmha.mods import relative_bias, t5

# Key of config.json -> the values of it that this file computes; all others are refused.
ACCEPTED = {"feed_forward_proj": ("relu", "gated-gelu")}


@dataclass(frozen=True)
class Config:
    """Sizes, as `config.json` of transformers names them."""

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_decoder_layers: int
    num_heads: int
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    decoder_start_token_id: int = 0
    is_gated_act: bool = False
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool = True

    @classmethod
    def read(cls, folder: str | Path) -> "Config":
        """The config of a folder that `save_pretrained` wrote."""
        found = config_of(folder, "t5", "mt5", accepted=ACCEPTED)
        found, kind = {k: x for k, x in found.items() if x is not None}, found["model_type"]
        mlp = found.get("feed_forward_proj", "relu" if kind == "t5" else "gated-gelu")
        scaled = kind == "t5" and found.get("tie_word_embeddings", True)
        found = {"num_decoder_layers": found["num_layers"], "scale_decoder_outputs": scaled} | found
        found["is_gated_act"] = mlp == "gated-gelu"
        return cls(**{name: x for name, x in found.items() if name in cls.__dataclass_fields__})


class MLP(nnx.Module):
    """An MLP with ReLU, or with a gated GELU as in T5 1.1."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate = linear(config.d_model, config.d_ff) if config.is_gated_act else None
        self.up, self.down = (
            linear(config.d_model, config.d_ff),
            linear(config.d_ff, config.d_model),
        )

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        if self.gate is None:
            return self.down(nnx.relu(self.up(x)))
        return self.down(nnx.gelu(self.gate(x), approximate=True) * self.up(x))


class Block(nnx.Module):
    """Self-attention, cross-attention (only in the decoder) and an MLP, each behind an RMS norm."""

    def __init__(self, config: Config, decoder: bool, rngs: nnx.Rngs) -> None:
        norm = partial(nnx.RMSNorm, config.d_model, epsilon=config.layer_norm_epsilon, rngs=rngs)
        attention = partial(
            MultiHeadAttention,
            config.num_heads,
            config.d_model,
            qkv_features=config.num_heads * config.d_kv,
            use_bias=False,
            semantics=Semantics(scale=1.0),
            rngs=rngs,
        )
        self.attention, self.attention_norm = attention(), norm()
        self.cross: MultiHeadAttention | None = attention() if decoder else None
        self.cross_norm = norm() if decoder else None
        self.mlp, self.mlp_norm = MLP(config, rngs), norm()

    def rest(self, x: Float[Array, "B T D"], source: Any, mask: Mask) -> Float[Array, "B T D"]:
        """Everything after self-attention; `source`: the encoder's output, or None."""
        if self.cross is not None and self.cross_norm is not None:
            x += self.cross(self.cross_norm(x), source, mask=mask)
        return x + self.mlp(self.mlp_norm(x))


class Stack(nnx.Module):
    """The encoder or the decoder; all its blocks share one table of relative biases."""

    def __init__(self, config: Config, decoder: bool, rngs: nnx.Rngs) -> None:
        self.decoder, self.config = decoder, config
        count = config.num_decoder_layers if decoder else config.num_layers
        buckets = config.relative_attention_num_buckets
        self.relative_bias = nnx.Embed(buckets, config.num_heads, rngs=rngs)
        self.blocks = nnx.List([Block(config, decoder, rngs) for _ in range(count)])
        self.norm = nnx.RMSNorm(config.d_model, epsilon=config.layer_norm_epsilon, rngs=rngs)

    def score_mod(self) -> Any:
        """The score function that adds the relative bias of query and key."""
        bucket = t5(
            bidirectional=not self.decoder,
            num_buckets=self.config.relative_attention_num_buckets,
            max_distance=self.config.relative_attention_max_distance,
        )
        return relative_bias(self.relative_bias.embedding[...], bucket)

    def __call__(
        self, x: Float[Array, "B T D"], mask: Mask, source: Any = None, source_mask: Any = None
    ) -> Float[Array, "B T D"]:
        for block in self.blocks:
            params, semantics = block.attention.to_params()
            normed, mod = block.attention_norm(x), self.score_mod()
            x += multi_head_attention(params, normed, mask=mask, semantics=semantics, score_mod=mod)
            x = block.rest(x, source, source_mask)
        return self.norm(x)

    def extend(
        self, x: Float[Array, "B T D"], caches: list[KVCache], source: Any, source_mask: Mask
    ) -> tuple[Float[Array, "B T D"], list[KVCache]]:
        """Applies the decoder to new tokens, and appends their keys and values to the caches."""
        kept = []
        for block, cache in zip(self.blocks, caches, strict=True):
            params, semantics = block.attention.to_params()
            normed, mod = block.attention_norm(x), self.score_mod()
            attended, cache = extend(params, normed, cache, semantics=semantics, score_mod=mod)
            kept.append(cache)
            x = block.rest(x + attended, source, source_mask)
        return self.norm(x), kept


class T5(nnx.Module):
    """An encoder and a decoder. `model(source, target)` gives the logits of every next token."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedding = nnx.Embed(config.vocab_size, config.d_model, rngs=rngs)
        self.encoder, self.decoder = Stack(config, False, rngs), Stack(config, True, rngs)
        size = config.d_model, config.vocab_size
        tied = config.tie_word_embeddings
        self.head = None if tied else nnx.Linear(*size, use_bias=False, rngs=rngs)

    def encode(self, tokens: Int[Array, "B S"], mask: Mask) -> Float[Array, "B S D"]:
        return self.encoder(self.embedding(tokens), mask)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T vocab"]:
        if self.config.scale_decoder_outputs:
            x = x * self.config.d_model**-0.5
        return self.embedding.attend(x) if self.head is None else self.head(x)

    def __call__(
        self,
        source: Int[Array, "B S"],
        target: Int[Array, "B T"],
        lengths: Int[Array, "B"] | None = None,
    ) -> Float[Array, "B T vocab"]:
        """`target`: tokens that the decoder reads, from `decoder_start_token_id` on; `lengths`: of
        the sources."""
        mask = Mask() if lengths is None else Mask.lengths(key_value=lengths)
        encoded = self.encode(source, mask)
        return self.logits(self.decoder(self.embedding(target), Mask.causal(), encoded, mask))


def load(folder: str | Path) -> T5:
    """The model of a folder that `save_pretrained` wrote."""
    config, head, table = Config.read(folder), "lm_head.weight", "shared.weight"
    with checkpoint.open(folder) as file:  # transformers 5 writes that every T5 has them tied
        own = head in file.info and not np.array_equal(file[head], file[table])
    config = replace(config, tie_word_embeddings=not own)
    return convert.load_into(T5(config, nnx.Rngs(0)), folder)


def loss(
    model: T5, source: Int[Array, "B S"], target: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> Float[Array, ""]:
    """Mean cross-entropy of the target's tokens, for `nnx.value_and_grad`."""
    start = jnp.full_like(target[:, :1], model.config.decoder_start_token_id)
    log_p = jax.nn.log_softmax(model(source, jnp.hstack([start, target[:, :-1]]), lengths))
    return -jnp.take_along_axis(log_p, target[..., None], -1).mean()


@nnx.jit
def _extend(
    model: T5, tokens: Int[Array, "B 1"], caches: list[KVCache], source: Any, lengths: Any
) -> tuple[Int[Array, "B 1"], list[KVCache]]:
    mask = Mask.lengths(key_value=lengths)
    x, caches = model.decoder.extend(model.embedding(tokens), caches, source, mask)
    return model.logits(x).argmax(-1).astype(tokens.dtype), caches


def generate(
    model: T5, source: Int[Array, "B S"], lengths: Int[Array, "B"], steps: int
) -> Int[Array, "B steps"]:
    """Greedy decoding of `steps` tokens."""
    batch = source.shape[0]
    encoded = model.encode(source, Mask.lengths(key_value=lengths))
    caches = [
        KVCache.empty(block.attention.to_params()[0], batch, steps)
        for block in model.decoder.blocks
    ]
    tokens = jnp.full((batch, 1), model.config.decoder_start_token_id, source.dtype)
    found = [source[:, :0]]
    for _ in range(steps):
        tokens, caches = _extend(model, tokens, caches, encoded, lengths)
        found.append(tokens)
    return jnp.concatenate(found, 1)
