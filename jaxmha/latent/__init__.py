"""Multi-head latent attention (MLA, DeepSeek-V2): one latent per token holds keys and values."""

from jaxmha.latent.cache import LatentCache as LatentCache
from jaxmha.latent.cache import paged_cache as paged_cache
from jaxmha.latent.decoding import decode_step as decode_step
from jaxmha.latent.decoding import extend as extend
from jaxmha.latent.decoding import prefill as prefill
from jaxmha.latent.heads import absorb as absorb
from jaxmha.latent.heads import combine as combine
from jaxmha.latent.heads import project as project
from jaxmha.latent.initializers import init_latent_params as init_latent_params
from jaxmha.latent.layer import latent_attention as latent_attention
from jaxmha.latent.params import LatentParams as LatentParams
from jaxmha.latent.rotation import ScaledQueries as ScaledQueries

__all__ = [
    "LatentCache",
    "LatentParams",
    "ScaledQueries",
    "absorb",
    "combine",
    "decode_step",
    "extend",
    "init_latent_params",
    "latent_attention",
    "paged_cache",
    "prefill",
    "project",
]
