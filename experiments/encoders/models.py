"""Whole encoders in Flax nnx around `jaxmha.flax.nnx.MultiHeadAttention`.

Attributes have the names of the tensors in a migrated file, so that loading is by path. Shapes:
B batch, T length, D features.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmha import Mask
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.flax.nnx import MultiHeadAttention

Array = jax.Array


class EncoderLayer(nnx.Module):  # type: ignore[misc]
    """`torch.nn.TransformerEncoderLayer` as it is by default: norms after, ReLU."""

    def __init__(self, D: int, hidden: int, num_heads: int, epsilon: float, dtype: Any) -> None:
        rngs = nnx.Rngs(0)
        settings: dict[str, Any] = {"param_dtype": dtype, "rngs": rngs}
        self.self_attn = MultiHeadAttention(num_heads, D, **settings)
        self.linear1 = nnx.Linear(D, hidden, **settings)
        self.linear2 = nnx.Linear(hidden, D, **settings)
        self.norm1 = nnx.LayerNorm(D, epsilon=epsilon, **settings)
        self.norm2 = nnx.LayerNorm(D, epsilon=epsilon, **settings)

    def __call__(self, x: Array, mask: Mask) -> Array:
        """`(B, T, D)` to `(B, T, D)`."""
        x = self.norm1(x + self.self_attn(x, mask=mask))
        out: Array = self.norm2(x + self.linear2(jax.nn.relu(self.linear1(x))))
        return out


class Encoder(nnx.Module):  # type: ignore[misc]
    """`torch.nn.TransformerEncoder`."""

    def __init__(
        self,
        D: int,
        num_heads: int,
        num_layers: int,
        hidden: int | None = None,
        *,
        epsilon: float = 1e-5,
        dtype: Any = jnp.float32,
    ) -> None:
        sizes = (D, hidden or 4 * D, num_heads, epsilon, dtype)
        self.layers = nnx.List([EncoderLayer(*sizes) for _ in range(num_layers)])

    def __call__(self, x: Array, mask: Mask, last: int | None = None) -> Array:
        """`(B, T, D)` to `(B, T, D)` through the layers before `last`."""
        for layer in self.layers[:last]:
            x = layer(x, mask)
        return x


class BertAttention(MultiHeadAttention):
    """Attention with the norm that BERT keeps under it."""

    def __init__(self, D: int, num_heads: int, epsilon: float, dtype: Any) -> None:
        super().__init__(num_heads, D, param_dtype=dtype, rngs=nnx.Rngs(0))
        norm = nnx.LayerNorm(D, epsilon=epsilon, param_dtype=dtype, rngs=nnx.Rngs(0))
        self.output = nnx.Dict(LayerNorm=norm)


class BertLayer(nnx.Module):  # type: ignore[misc]
    """One layer of BERT: norms after, exact GELU."""

    def __init__(self, D: int, hidden: int, num_heads: int, epsilon: float, dtype: Any) -> None:
        settings: dict[str, Any] = {"param_dtype": dtype, "rngs": nnx.Rngs(0)}
        self.attention = BertAttention(D, num_heads, epsilon, dtype)
        self.intermediate = nnx.Dict(dense=nnx.Linear(D, hidden, **settings))
        self.output = nnx.Dict(
            dense=nnx.Linear(hidden, D, **settings),
            LayerNorm=nnx.LayerNorm(D, epsilon=epsilon, **settings),
        )

    def __call__(self, x: Array, mask: Mask) -> Array:
        """`(B, T, D)` to `(B, T, D)`."""
        x = self.attention.output["LayerNorm"](x + self.attention(x, mask=mask))
        inner = jax.nn.gelu(self.intermediate["dense"](x), approximate=False)
        out: Array = self.output["LayerNorm"](x + self.output["dense"](inner))
        return out


class Bert(nnx.Module):  # type: ignore[misc]
    """BERT by the config.json of a checkpoint."""

    def __init__(self, config: Mapping[str, Any], dtype: Any = jnp.float32) -> None:
        D, epsilon = config["hidden_size"], config["layer_norm_eps"]
        settings: dict[str, Any] = {"param_dtype": dtype, "rngs": nnx.Rngs(0)}
        self.embeddings = nnx.Dict(
            word_embeddings=nnx.Embed(config["vocab_size"], D, **settings),
            position_embeddings=nnx.Embed(config["max_position_embeddings"], D, **settings),
            token_type_embeddings=nnx.Embed(config["type_vocab_size"], D, **settings),
            LayerNorm=nnx.LayerNorm(D, epsilon=epsilon, **settings),
        )
        sizes = (D, config["intermediate_size"], config["num_attention_heads"], epsilon, dtype)
        layers = [BertLayer(*sizes) for _ in range(config["num_hidden_layers"])]
        self.encoder = nnx.Dict(layer=nnx.List(layers))
        self.pooler = nnx.Dict(dense=nnx.Linear(D, D, **settings))

    def embed(self, tokens: Array) -> Array:
        """Token ids `(B, T)` to the input of the first layer, `(B, T, D)`."""
        tables = self.embeddings
        x = tables["word_embeddings"](tokens)
        x = x + tables["token_type_embeddings"](jnp.zeros_like(tokens))
        x = x + tables["position_embeddings"](jnp.arange(tokens.shape[1]))[None]
        out: Array = tables["LayerNorm"](x)
        return out

    def __call__(self, tokens: Array, lengths: Array) -> tuple[Array, Array]:
        """Token ids `(B, T)` and lengths `(B,)` to all states `(B, T, D)` and the pooled `(B, D)`."""
        x, mask = self.embed(tokens), Mask.lengths(key_value=lengths)
        for layer in self.encoder["layer"]:
            x = layer(x, mask)
        return x, jnp.tanh(self.pooler["dense"](x[:, 0]))


def sentence_embeddings(states: Array, lengths: Array) -> Array:
    """The mean over real tokens, of length one: `(B, T, D)` to `(B, D)`."""
    real = jnp.arange(states.shape[1])[None] < lengths[:, None]
    there = real[..., None].astype(states.dtype)
    mean: Array = (states * there).sum(1) / there.sum(1)
    length: Array = jnp.linalg.norm(mean, axis=-1, keepdims=True)
    return mean / length


def load(model: nnx.Module, tensors: Mapping[str, NDArray]) -> list[str]:
    """Puts tensors by path into a model, strictly; returns the names that it has no place for.

    Raises:
      ValueError: a variable without a tensor, or of another shape or dtype.
    """
    state = {"/".join(map(str, path)): (path, v) for path, v in nnx.to_flat_state(nnx.state(model))}
    for name, (_, variable) in state.items():
        old, new = variable.get_value(), tensors.get(name)
        if new is None:
            raise ValueError(f"the file has no {name}")
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(f"{name}: {new.dtype} {new.shape} for {old.dtype} {old.shape}")
    loaded = [(path, v.replace(jnp.asarray(tensors[name]))) for name, (path, v) in state.items()]
    nnx.update(model, nnx.from_flat_state(loaded))
    return [name for name in tensors if name not in state]


def flat(model: nnx.Module) -> dict[str, Array]:
    """The variables of a model by path, as `load` takes them."""
    state = nnx.to_flat_state(nnx.state(model))
    return {"/".join(map(str, path)): variable.get_value() for path, variable in state}
