"""Multi-head attention for JAX: exact, and the same in every framework."""

from jaxmha import latent as latent
from jaxmha import mods as mods
from jaxmha import sharding as sharding
from jaxmha._checkout import find_rooms as _find_rooms
from jaxmha.attention import dot_product_attention as dot_product_attention
from jaxmha.decoding import decode_step as decode_step
from jaxmha.decoding import extend as extend
from jaxmha.decoding import prefill as prefill
from jaxmha.explain import explain as explain
from jaxmha.explain import explain_layer as explain_layer
from jaxmha.exported import register as _register
from jaxmha.extend_heads import extend_heads as extend_heads
from jaxmha.implementations.platforms import lowering_for as lowering_for
from jaxmha.initializers import init_params as init_params
from jaxmha.kv_cache import KVCache as KVCache
from jaxmha.latent import LatentParams as LatentParams
from jaxmha.latent import latent_attention as latent_attention
from jaxmha.layer import multi_head_attention as multi_head_attention
from jaxmha.mask import Mask as Mask
from jaxmha.page_pool import PagePool as PagePool
from jaxmha.paged_cache import PagedKVCache as PagedKVCache
from jaxmha.params import MHAParams as MHAParams
from jaxmha.params import Projection as Projection
from jaxmha.projections import combine as combine
from jaxmha.projections import project as project
from jaxmha.rotary import rope as rope
from jaxmha.rotary_frequencies import rope_frequencies as rope_frequencies
from jaxmha.semantics import Semantics as Semantics

__version__ = "0.1.0"

__all__ = [
    "KVCache",
    "LatentParams",
    "MHAParams",
    "Mask",
    "PagePool",
    "PagedKVCache",
    "Projection",
    "Semantics",
    "__version__",
    "combine",
    "decode_step",
    "dot_product_attention",
    "explain",
    "explain_layer",
    "extend",
    "extend_heads",
    "init_params",
    "latent",
    "latent_attention",
    "lowering_for",
    "mods",
    "multi_head_attention",
    "prefill",
    "project",
    "rope",
    "rope_frequencies",
    "sharding",
]

_find_rooms()
_register()
