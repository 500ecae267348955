"""Llama 3, Qwen 3 and Mistral in flax.nnx: load a folder of transformers, train, decode with a cache.

    model = load("llama-folder")  # a folder that save_pretrained wrote, or hf://org/model
    tokens = generate(model, prompt, steps=20)

Sources: Grattafiori et al., "The Llama 3 Herd of Models" (2024); Qwen Team, "Qwen3 Technical
Report" (2025); Jiang et al., "Mistral 7B" (2023).
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
from jaxmha.flax.nnx import MultiHeadAttention
from jaxmha.rotary_frequencies import Frequencies

# Key of config.json -> the values of it that this file computes; all others are refused.
ACCEPTED = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1.0,),
}
# Model type -> its keys of biases; it ignores the others.
BIASES = {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",), "mistral": ()}


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
    rotary: Frequencies
    windows: tuple[int | None, ...]  # of the layers; None: the layer attends all earlier tokens
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False
    normalised_heads: bool = False  # Qwen 3: RMS norms of queries and keys
    tie_word_embeddings: bool = False

    @classmethod
    def read(cls, folder: str | Path) -> "Config":
        """The config of a folder that `save_pretrained` wrote."""
        found = config_of(folder, *BIASES, accepted=ACCEPTED)
        windows = _windows(found)
        heads = found["num_attention_heads"]
        defaults = {"head_dim": found["hidden_size"] // heads, "num_key_value_heads": heads}
        found = defaults | {name: x for name, x in found.items() if x is not None}
        known = {name: x for name, x in found.items() if name in cls.__dataclass_fields__}
        kind, rotary = found["model_type"], rope_frequencies(found, found["head_dim"])
        if rotary != rope_frequencies(found, found["head_dim"], length=2**30):
            raise ValueError("rotary frequencies that depend on the length are not computed here")
        known |= {key: False for key in BIASES["llama"] if key not in BIASES[kind]}
        return cls(**known, normalised_heads=kind == "qwen3", rotary=rotary, windows=windows)


def _windows(found: dict[str, Any]) -> tuple[int | None, ...]:
    """The windows of the layers: Llama has none, and ignores the key of the others."""
    layers, size = found["num_hidden_layers"], found.get("sliding_window", 4096)
    if found["model_type"] == "mistral":
        return (size,) * layers
    if found["model_type"] == "llama" or not found.get("use_sliding_window"):
        return (None,) * layers
    first = found.get("max_window_layers", 28)
    local = [kind == "sliding_attention" for kind in found.get("layer_types") or ()]
    return tuple(size if x else None for x in local or [i >= first for i in range(layers)])


class Block(nnx.Module):
    """Attention and a gated MLP, each behind an RMS norm and with a residual."""

    def __init__(self, config: Config, window: int | None, rngs: nnx.Rngs) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        norm = partial(nnx.RMSNorm, size, epsilon=config.rms_norm_eps, rngs=rngs)
        linear = partial(nnx.Linear, use_bias=config.mlp_bias, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = MultiHeadAttention(
            config.num_attention_heads,
            size,
            qkv_features=config.num_attention_heads * config.head_dim,
            num_kv_heads=config.num_key_value_heads,
            use_bias=config.attention_bias,
            semantics=Semantics(
                qk_norm="rms" if config.normalised_heads else None,
                qk_norm_epsilon=config.rms_norm_eps,
            ),
            local_window_size=None if window is None else (window - 1, 0),
            rotate=partial(rope, frequencies=config.rotary),
            rngs=rngs,
        )
        self.gate, self.up = linear(size, inner), linear(size, inner)
        self.down = linear(inner, size)

    def mlp(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x += self.attention(self.attention_norm(x), mask=Mask.causal())
        return x + self.mlp(self.mlp_norm(x))

    def cache(self, batch: int, length: int, spare: int = 0) -> KVCache:
        """An empty cache for up to `length` tokens, of which a ring buffer holds the last ones."""
        left, _ = self.attention.local_window_size or (length, 0)
        return KVCache.empty(self.attention.to_params()[0], batch, min(length, left + 1 + spare))

    def extend(
        self, x: Float[Array, "B T D"], cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Applies the block to new tokens, and appends their keys and values to the cache."""
        attended, cache = self.attention.extend(self.attention_norm(x), cache)
        x += attended
        return x + self.mlp(self.mlp_norm(x)), cache


class Llama(nnx.Module):
    """A decoder. `model(tokens)` gives the logits of every next token."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedding = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.blocks = nnx.List([Block(config, window, rngs) for window in config.windows])
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)
        tied = config.tie_word_embeddings
        size = config.hidden_size, config.vocab_size
        self.head = None if tied else nnx.Linear(*size, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T vocab"]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T vocab"]:
        x = self.norm(x)
        return self.embedding.attend(x) if self.head is None else self.head(x)

    def caches(self, batch: int, length: int, spare: int = 0) -> list[KVCache]:
        """Empty caches of every layer for up to `length` tokens.

        `spare`: the number of tokens that may be taken back, such as drafts, by smaller `lengths`.
        """
        return [block.cache(batch, length, spare) for block in self.blocks]

    def extend(
        self, tokens: Int[Array, "B T"], caches: list[KVCache]
    ) -> tuple[Float[Array, "B vocab"], list[KVCache]]:
        """Logits after the last of the new tokens, and the caches that hold them."""
        x, kept = self.embedding(tokens), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block.extend(x, cache)
            kept.append(cache)
        return self.logits(x[:, -1:])[:, 0], kept


def load(folder: str | Path) -> Llama:
    """The model of a folder that `save_pretrained` wrote."""
    model = Llama(Config.read(folder), nnx.Rngs(0))
    return convert.load_into(model, folder)


def loss(model: Llama, tokens: Int[Array, "B T"]) -> Float[Array, ""]:
    """Mean cross-entropy of the next token, for `nnx.value_and_grad`."""
    log_p = jax.nn.log_softmax(model(tokens[:, :-1]))
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()


@nnx.jit
def _extend(
    model: Llama, tokens: Int[Array, "B T"], caches: list[KVCache]
) -> tuple[Int[Array, "B 1"], list[KVCache]]:
    logits, caches = model.extend(tokens, caches)
    return logits.argmax(-1, keepdims=True).astype(tokens.dtype), caches


def generate(model: Llama, prompt: Int[Array, "B T"], steps: int) -> Int[Array, "B steps"]:
    """Greedy decoding: the most probable next tokens after the prompts, which have one length."""
    batch, length = prompt.shape
    caches = model.caches(batch, length + steps - 1)  # the last token is never a query
    tokens, found = prompt, [prompt[:, :0]]
    for _ in range(steps):
        tokens, caches = _extend(model, tokens, caches)
        found.append(tokens)
    return jnp.concatenate(found, 1)
