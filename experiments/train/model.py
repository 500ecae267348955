"""A transformer that reads bytes and names one of a few labels. One line chooses its attention."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxmha.flax.nnx
from jaxmha import Mask

# The same arguments, parameters and names; jaxmha's takes lengths as lengths.
ATTENTION: dict[str, Any] = {
    "jaxmha": jaxmha.flax.nnx.MultiHeadAttention,
    "flax": nnx.MultiHeadAttention,
}


@dataclass(frozen=True)
class Settings:
    """Everything that a curve depends on, besides machine and versions."""

    attention: str = "jaxmha"
    seed: int = 0
    steps: int = 400
    dropout: float = 0.1
    batch: int = 16
    T: int = 256
    D: int = 64
    N: int = 4
    blocks: int = 2
    rate: float = 3e-3
    every: int = 100  # steps between checkpoints, each with an evaluation


def padding_mask(attention: str, lengths: jax.Array, T: int) -> Any:
    """Keys beyond a row's length are not attended: a `Mask`, or an array `B 1 1 T`."""
    if attention == "jaxmha":
        return Mask.lengths(key_value=lengths)
    return (jnp.arange(T) < lengths[:, None])[:, None, None]


class Block(nnx.Module):  # type: ignore[misc]
    """Attention and two dense layers, each after a norm and added to what came in."""

    def __init__(self, settings: Settings, rngs: nnx.Rngs) -> None:
        D, dropout = settings.D, settings.dropout
        self.attention_norm = nnx.LayerNorm(D, rngs=rngs)
        self.attention = ATTENTION[settings.attention](
            num_heads=settings.N, in_features=D, dropout_rate=dropout, decode=False, rngs=rngs
        )
        self.dense_norm = nnx.LayerNorm(D, rngs=rngs)
        self.up = nnx.Linear(D, 4 * D, rngs=rngs)
        self.down = nnx.Linear(4 * D, D, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array, mask: Any) -> Any:
        """`B T D` to `B T D`."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.dense_norm(x)))))


class Classifier(nnx.Module):  # type: ignore[misc]
    """Bytes `B T` and lengths `B` to logits `B labels`, from the mean over what is there."""

    def __init__(self, settings: Settings, labels: int) -> None:
        D, rngs = settings.D, nnx.Rngs(settings.seed)
        self.kind = settings.attention
        self.bytes = nnx.Embed(256, D, rngs=rngs)
        self.places = nnx.Embed(settings.T, D, rngs=rngs)
        self.blocks = nnx.List([Block(settings, rngs) for _ in range(settings.blocks)])
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.head = nnx.Linear(D, labels, rngs=rngs)

    def __call__(self, texts: jax.Array, lengths: jax.Array) -> Any:
        """Logits."""
        T = texts.shape[1]
        x = self.bytes(texts.astype(jnp.int32)) + self.places(jnp.arange(T))[None]
        mask = padding_mask(self.kind, lengths, T)
        for block in self.blocks:
            x = block(x, mask)
        valid = (jnp.arange(T)[None] < lengths[:, None])[..., None]
        mean = jnp.where(valid, self.norm(x), 0.0).sum(1) / lengths[:, None].astype(x.dtype)
        return self.head(mean)
