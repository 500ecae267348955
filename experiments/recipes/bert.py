"""BERT in flax.nnx: load a folder of transformers, train, classify padded batches.

    model = load("bert-folder")  # of a BertModel or BertForMaskedLM that save_pretrained wrote
    states = model(tokens, lengths=lengths)

Source: Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers" (2019).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmha import Mask
from jaxmha.converters import config_of
from jaxmha.converters import flax as convert
from jaxmha.flax.nnx import MultiHeadAttention

# Key of config.json -> the values of it that this file computes; all others are refused.
ACCEPTED = {
    "hidden_act": ("gelu",),
    "is_decoder": (False,),
    "position_embedding_type": ("absolute",),
}


@dataclass(frozen=True)
class Config:
    """Sizes, as `config.json` of transformers names them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12

    @classmethod
    def read(cls, folder: str | Path) -> "Config":
        """The config of a folder that `save_pretrained` wrote."""
        found = config_of(folder, "bert", accepted=ACCEPTED)
        return cls(**{name: x for name, x in found.items() if name in cls.__dataclass_fields__})


class Embeddings(nnx.Module):
    """Sums the embeddings of words, positions and token types, and normalises the sum."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        size = config.hidden_size
        self.words = nnx.Embed(config.vocab_size, size, rngs=rngs)
        self.positions = nnx.Embed(config.max_position_embeddings, size, rngs=rngs)
        self.token_types = nnx.Embed(config.type_vocab_size, size, rngs=rngs)
        self.norm = nnx.LayerNorm(size, epsilon=config.layer_norm_eps, rngs=rngs)

    def __call__(
        self, tokens: Int[Array, "B T"], token_types: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        count, length = self.positions.num_embeddings, tokens.shape[1]
        if length > count:  # nnx.Embed would return NaN
            raise ValueError(f"the model has {count} positions, and the tokens need {length}")
        at = jnp.arange(length)[None]
        return self.norm(self.words(tokens) + self.positions(at) + self.token_types(token_types))


class Block(nnx.Module):
    """Attention and an MLP, each followed by a residual and a LayerNorm."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        norm = partial(nnx.LayerNorm, size, epsilon=config.layer_norm_eps, rngs=rngs)
        self.attention = MultiHeadAttention(config.num_attention_heads, size, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.up, self.down = nnx.Linear(size, inner, rngs=rngs), nnx.Linear(inner, size, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], mask: Mask) -> Float[Array, "B T D"]:
        x = self.attention_norm(x + self.attention(x, mask=mask))
        return self.mlp_norm(x + self.down(nnx.gelu(self.up(x), approximate=False)))


class BERT(nnx.Module):
    """An encoder. `model(tokens, lengths=lengths)` gives the last hidden states.

    Padding beyond the lengths influences no other position.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.embeddings = Embeddings(config, rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_hidden_layers)])

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        lengths: Int[Array, "B"] | None = None,
        token_types: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        mask = Mask() if lengths is None else Mask.lengths(key_value=lengths)
        x = self.embeddings(tokens, jnp.zeros_like(tokens) if token_types is None else token_types)
        for block in self.blocks:
            x = block(x, mask)
        return x


class Classifier(nnx.Module):
    """A classifier on the encoder's first token; `nnx.Optimizer` trains encoder and head."""

    def __init__(self, encoder: BERT, classes: int, rngs: nnx.Rngs) -> None:
        self.encoder = encoder
        self.head = nnx.Linear(encoder.embeddings.words.features, classes, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]) -> Float[Array, "B C"]:
        return self.head(self.encoder(tokens, lengths=lengths)[:, 0])


def load(folder: str | Path) -> BERT:
    """The encoder of a folder that `save_pretrained` wrote; heads in the file are left out."""
    return convert.load_into(BERT(Config.read(folder), nnx.Rngs(0)), folder, unused="keep")
