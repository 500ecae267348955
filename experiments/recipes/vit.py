"""ViT in flax.nnx: load a folder of transformers, classify, fine-tune.

    model = load("vit-folder")  # of a ViTForImageClassification that save_pretrained wrote
    logits = model(images)  # B, height, width, channels

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmha.converters import config_of
from jaxmha.converters import flax as convert
from jaxmha.flax.nnx import MultiHeadAttention

# Key of config.json -> the values of it that this file computes; all others are refused.
ACCEPTED = {"hidden_act": ("gelu",)}


@dataclass(frozen=True)
class Config:
    """Sizes, as `config.json` of transformers names them."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    num_channels: int = 3
    qkv_bias: bool = True
    layer_norm_eps: float = 1e-12
    num_labels: int = 2

    @classmethod
    def read(cls, folder: str | Path) -> "Config":
        """The config of a folder that `save_pretrained` wrote."""
        found = config_of(folder, "vit", accepted=ACCEPTED)
        found = {"num_labels": len(found.get("id2label", "ab")), **found}
        for name in ("image_size", "patch_size"):
            side = found[name]
            found[name] = (side, side) if isinstance(side, int) else tuple(side)
        return cls(**{name: x for name, x in found.items() if name in cls.__dataclass_fields__})


class Block(nnx.Module):
    """Attention and an MLP, each behind a LayerNorm and with a residual."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        size, inner = config.hidden_size, config.intermediate_size
        norm = partial(nnx.LayerNorm, size, epsilon=config.layer_norm_eps, rngs=rngs)
        self.norm_before, self.norm_after = norm(), norm()
        biases = True if config.qkv_bias else ("out",)
        self.attention = MultiHeadAttention(
            config.num_attention_heads, size, use_bias=biases, rngs=rngs
        )
        self.up, self.down = nnx.Linear(size, inner, rngs=rngs), nnx.Linear(inner, size, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x += self.attention(self.norm_before(x))
        return x + self.down(nnx.gelu(self.up(self.norm_after(x)), approximate=False))


class ViT(nnx.Module):
    """An image classifier. `model(images)` gives the logits of the classes."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        size, patch = config.hidden_size, config.patch_size
        self.patches = nnx.Conv(
            config.num_channels, size, patch, strides=patch, padding="VALID", rngs=rngs
        )
        count = (config.image_size[0] // patch[0]) * (config.image_size[1] // patch[1])
        self.class_token = nnx.Param(jnp.zeros((1, 1, size)))
        self.positions = nnx.Param(jnp.zeros((1, count + 1, size)))
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = nnx.LayerNorm(size, epsilon=config.layer_norm_eps, rngs=rngs)
        self.head = nnx.Linear(size, config.num_labels, rngs=rngs)

    def features(self, images: Float[Array, "B height width C"]) -> Float[Array, "B T D"]:
        """The class token and the patches after all blocks."""
        patches = self.patches(images)
        batch, size = patches.shape[0], patches.shape[-1]
        first = jnp.broadcast_to(self.class_token[...], (batch, 1, size))
        x = jnp.concatenate([first, patches.reshape(batch, -1, size)], 1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def __call__(self, images: Float[Array, "B height width C"]) -> Float[Array, "B classes"]:
        return self.head(self.features(images)[:, 0])


def load(folder: str | Path) -> ViT:
    """The model of a folder that `save_pretrained` wrote."""
    return convert.load_into(ViT(Config.read(folder), nnx.Rngs(0)), folder)
