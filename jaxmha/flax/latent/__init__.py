"""Multi-head latent attention (MLA) in flax: `linen.LatentAttention`, `nnx.LatentAttention`."""

from jaxmha.flax.latent import linen as linen
from jaxmha.flax.latent import nnx as nnx

__all__ = ["linen", "nnx"]
