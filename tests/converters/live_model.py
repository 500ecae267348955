"""A small nnx model with two attention layers, as MODULE:FUNCTION of a command builds it."""

import jax
from flax import nnx

from jaxmha.flax.nnx import MultiHeadAttention


class Model(nnx.Module):  # type: ignore[misc]
    """Called with ids `(1, T)` from 0 to 3."""

    def __init__(self, kind: type[nnx.Module]) -> None:
        self.embedding = nnx.Embed(4, 8, rngs=nnx.Rngs(0))
        self.first, self.second = (kind(2, 8, decode=False, rngs=nnx.Rngs(n)) for n in (1, 2))

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embedding(ids)
        out: jax.Array = self.second(x + self.first(x))
        return out


def ours() -> Model:
    """With jaxmha's layers."""
    return Model(MultiHeadAttention)


def theirs() -> Model:
    """With Flax's layers."""
    return Model(nnx.MultiHeadAttention)
