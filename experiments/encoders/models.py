"""torch's encoder in Flax nnx around `jaxmha.flax.nnx.MultiHeadAttention`.

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
