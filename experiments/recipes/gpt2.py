"""GPT-2 in flax.nnx: load a folder of transformers, train, decode with a cache.

    model = load("gpt2-folder")  # a folder that save_pretrained wrote
    tokens = generate(model, prompt, steps=20)

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
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
ACCEPTED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "add_cross_attention": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "tie_word_embeddings": (True,),
}


@dataclass(frozen=True)
class Config:
    """Sizes, as `config.json` of transformers names them."""

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    layer_norm_epsilon: float = 1e-5
    n_inner: int | None = None

    @classmethod
    def read(cls, folder: str | Path) -> "Config":
        """The config of a folder that `save_pretrained` wrote."""
        found = config_of(folder, "gpt2", accepted=ACCEPTED)
        return cls(**{name: x for name, x in found.items() if name in cls.__dataclass_fields__})


def check_length(positions: nnx.Embed, length: int) -> None:
    """Raises ValueError for positions beyond the table, of which nnx.Embed would return NaN."""
    count = positions.num_embeddings
    if length > count:
        raise ValueError(f"the model has {count} positions, and the tokens need {length}")


class Block(nnx.Module):
    """Attention and an MLP, each behind a LayerNorm and with a residual."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        size, inner = config.n_embd, config.n_inner or 4 * config.n_embd
        norm = partial(nnx.LayerNorm, size, epsilon=config.layer_norm_epsilon, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = MultiHeadAttention(config.n_head, size, rngs=rngs)
        self.up, self.down = nnx.Linear(size, inner, rngs=rngs), nnx.Linear(inner, size, rngs=rngs)

    def mlp(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(nnx.gelu(self.up(x), approximate=True))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x += self.attention(self.attention_norm(x), mask=Mask.causal())
        return x + self.mlp(self.mlp_norm(x))

    def extend(
        self, x: Float[Array, "B T D"], cache: KVCache
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Applies the block to new tokens, and appends their keys and values to the cache."""
        attended, cache = self.attention.extend(self.attention_norm(x), cache)
        x += attended
        return x + self.mlp(self.mlp_norm(x)), cache


class GPT2(nnx.Module):
    """A decoder. `model(tokens)` gives the logits of every next token."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(config.vocab_size, config.n_embd, rngs=rngs)
        self.positions = nnx.Embed(config.n_positions, config.n_embd, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.n_layer)])
        self.norm = nnx.LayerNorm(config.n_embd, epsilon=config.layer_norm_epsilon, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T vocab"]:
        check_length(self.positions, tokens.shape[1])
        x = self.embedding(tokens) + self.positions(jnp.arange(tokens.shape[1]))[None]
        for block in self.blocks:
            x = block(x)
        return self.embedding.attend(self.norm(x))

    def caches(self, batch: int, length: int) -> list[KVCache]:
        """Empty caches of every layer for up to `length` tokens."""
        return [
            KVCache.empty(block.attention.to_params()[0], batch, length) for block in self.blocks
        ]

    def extend(
        self, tokens: Int[Array, "B T"], caches: list[KVCache]
    ) -> tuple[Float[Array, "B vocab"], list[KVCache]]:
        """Logits after the last of the new tokens, and the caches that hold them."""
        check_length(self.positions, caches[0].slots)
        at = caches[0].lengths[:, None] + jnp.arange(tokens.shape[1])
        x, kept = self.embedding(tokens) + self.positions(at), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block.extend(x, cache)
            kept.append(cache)
        return self.embedding.attend(self.norm(x[:, -1])), kept


def load(folder: str | Path) -> GPT2:
    """The model of a folder that `save_pretrained` wrote."""
    return convert.load_into(GPT2(Config.read(folder), nnx.Rngs(0)), folder)


def loss(model: GPT2, tokens: Int[Array, "B T"]) -> Float[Array, ""]:
    """Mean cross-entropy of the next token, for `nnx.value_and_grad`."""
    log_p = jax.nn.log_softmax(model(tokens[:, :-1]))
    return -jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean()


@nnx.jit
def _extend(
    model: GPT2, tokens: Int[Array, "B T"], caches: list[KVCache]
) -> tuple[Int[Array, "B 1"], list[KVCache]]:
    logits, caches = model.extend(tokens, caches)
    return logits.argmax(-1, keepdims=True).astype(tokens.dtype), caches


def generate(model: GPT2, prompt: Int[Array, "B T"], steps: int) -> Int[Array, "B steps"]:
    """Greedy decoding: the most probable next tokens after the prompts, which have one length."""
    batch, length = prompt.shape
    caches = model.caches(batch, length + steps - 1)  # the last token is never a query
    tokens, found = prompt, [prompt[:, :0]]
    for _ in range(steps):
        tokens, caches = _extend(model, tokens, caches)
        found.append(tokens)
    return jnp.concatenate(found, 1)
