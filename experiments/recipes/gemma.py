"""Gemma 3 (text) in flax.nnx: load a folder of transformers, train, decode with a cache.

    model = load("gemma-folder")  # of a Gemma3ForCausalLM that save_pretrained wrote
    tokens = generate(model, prompt, steps=20)

Source: Gemma Team, "Gemma 3 Technical Report" (2025).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmha import KVCache, Mask, Semantics, rope, rope_frequencies
from jaxmha.converters import config_of
from jaxmha.converters import flax as convert
from jaxmha.converters.discovery import layer_kinds, rotary_settings
from jaxmha.flax.nnx import MultiHeadAttention
from jaxmha.rotary_frequencies import Frequencies

# Key of config.json -> the values of it that this file computes; all others are refused.
ACCEPTED = {
    "hidden_activation": ("gelu_pytorch_tanh", "gelu_new"),
    "partial_rotary_factor": (1.0,),
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": (False,),
}


@dataclass(frozen=True)
class Config:
    """Sizes, as `config.json` of transformers names them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    query_pre_attn_scalar: float
    sliding_window: int
    layer_types: tuple[str, ...]
    rotary: tuple[tuple[str, Frequencies], ...]  # by kind of layer
    attention_bias: bool = False
    final_logit_softcapping: float | None = None

    @classmethod
    def read(cls, folder: str | Path) -> "Config":
        """The config of a folder that `save_pretrained` wrote."""
        found = config_of(folder, "gemma3_text", accepted=ACCEPTED)
        known = {name: x for name, x in found.items() if name in cls.__dataclass_fields__}
        layers = range(found["num_hidden_layers"])
        kinds = tuple(layer_kinds.of(found, "gemma3_text", i) for i in layers)
        rotary = tuple((kind, _rotary(found, kinds.index(kind))) for kind in sorted(set(kinds)))
        return cls(**known | {"layer_types": kinds, "rotary": rotary})


def _rotary(found: dict[str, Any], layer: int) -> Frequencies:
    """The frequencies of a layer, from the keys of any version of transformers."""
    rope = rotary_settings.of(found, "gemma3_text", layer)
    frequencies = rope_frequencies(rope, found["head_dim"])
    if frequencies != rope_frequencies(rope, found["head_dim"], length=2**30):
        raise ValueError(f"frequencies that depend on the length are not computed here: {rope}")
    return frequencies


class Norm(nnx.Module):
    """An RMS norm whose parameter is the scale minus 1."""

    def __init__(self, size: int, epsilon: float) -> None:
        self.scale, self.epsilon = nnx.Param(jnp.zeros(size)), epsilon

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        variance = jnp.square(x).mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(variance + self.epsilon) * (1 + self.scale[...])


class Block(nnx.Module):
    """Attention and a gated MLP, each between two norms and with a residual."""

    def __init__(self, config: Config, kind: str, rngs: nnx.Rngs) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        norm = partial(Norm, size, config.rms_norm_eps)
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.pre_attention_norm, self.post_attention_norm = norm(), norm()
        self.pre_mlp_norm, self.post_mlp_norm = norm(), norm()
        local = kind == "sliding_attention"
        self.attention = MultiHeadAttention(
            config.num_attention_heads,
            size,
            qkv_features=config.num_attention_heads * config.head_dim,
            num_kv_heads=config.num_key_value_heads,
            use_bias=config.attention_bias,
            semantics=Semantics(
                scale=config.query_pre_attn_scalar**-0.5,
                qk_norm="rms",
                qk_norm_epsilon=config.rms_norm_eps,
                qk_norm_offset=1.0,
            ),
            local_window_size=(config.sliding_window - 1, 0) if local else None,
            rotate=partial(rope, frequencies=dict(config.rotary)[kind]),
            rngs=rngs,
        )
        self.gate, self.up = linear(size, inner), linear(size, inner)
        self.down = linear(inner, size)

    def mlp(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = self.pre_mlp_norm(x)
        return self.post_mlp_norm(self.down(nnx.gelu(self.gate(x), approximate=True) * self.up(x)))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        attended = self.attention(self.pre_attention_norm(x), mask=Mask.causal())
        x += self.post_attention_norm(attended)
        return x + self.mlp(x)

    def cache(self, batch: int, length: int, spare: int = 0) -> KVCache:
        """An empty cache for up to `length` tokens, of which a ring buffer holds the last ones."""
        left, _ = self.attention.local_window_size or (length, 0)
        return KVCache.empty(self.attention.to_params()[0], batch, min(length, left + 1 + spare))

    def extend(
        self, x: Float[Array, "B T D"], cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Applies the block to new tokens, and appends their keys and values to the cache."""
        attended, cache = self.attention.extend(self.pre_attention_norm(x), cache)
        x += self.post_attention_norm(attended)
        return x + self.mlp(x), cache


class Gemma(nnx.Module):
    """A decoder. `model(tokens)` gives the logits of every next token."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.blocks = nnx.List([Block(config, kind, rngs) for kind in config.layer_types])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.logit_cap = config.final_logit_softcapping

    def embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.embedding(tokens) * self.embedding.features**0.5

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T vocab"]:
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def logits(self, x: Float[Array, "*B D"]) -> Float[Array, "*B vocab"]:
        x = self.embedding.attend(self.norm(x))
        return x if self.logit_cap is None else self.logit_cap * jnp.tanh(x / self.logit_cap)

    def caches(self, batch: int, length: int, spare: int = 0) -> list[KVCache]:
        """Empty caches of every layer for up to `length` tokens.

        `spare`: the number of tokens that may be taken back, such as drafts, by smaller `lengths`.
        """
        return [block.cache(batch, length, spare) for block in self.blocks]

    def extend(
        self, tokens: Int[Array, "B T"], caches: list[KVCache]
    ) -> tuple[Float[Array, "B vocab"], list[KVCache]]:
        """Logits after the last of the new tokens, and the caches that hold them."""
        x, kept = self.embedded(tokens), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block.extend(x, cache)
            kept.append(cache)
        return self.logits(x[:, -1]), kept


def load(folder: str | Path) -> Gemma:
    """The model of a folder that `save_pretrained` wrote."""
    return convert.load_into(Gemma(Config.read(folder), nnx.Rngs(0)), folder)


def loss(model: Gemma, tokens: Int[Array, "B T"]) -> Float[Array, ""]:
    """Mean cross-entropy of the next token, for `nnx.value_and_grad`."""
    log_p = jax.nn.log_softmax(model(tokens[:, :-1]))
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()


@nnx.jit
def _extend(
    model: Gemma, tokens: Int[Array, "B T"], caches: list[KVCache]
) -> tuple[Int[Array, "B 1"], list[KVCache]]:
    logits, caches = model.extend(tokens, caches)
    return logits.argmax(-1, keepdims=True).astype(tokens.dtype), caches


def generate(model: Gemma, prompt: Int[Array, "B T"], steps: int) -> Int[Array, "B steps"]:
    """Greedy decoding: the most probable next tokens after the prompts, which have one length."""
    batch, length = prompt.shape
    caches = model.caches(batch, length + steps - 1)  # the last token is never a query
    tokens, found = prompt, [prompt[:, :0]]
    for _ in range(steps):
        tokens, caches = _extend(model, tokens, caches)
        found.append(tokens)
    return jnp.concatenate(found, 1)
