"""Ready-made score and mask functions, for `score_mod` and `mask_mod`.

Each function is a pytree of its arrays, so that it can be an argument of a jitted function and its
floating arrays have gradients.
"""

from jaxmha.mods.block_mask import BlockMask as BlockMask
from jaxmha.mods.block_mask import block_mask as block_mask
from jaxmha.mods.buckets import swin as swin
from jaxmha.mods.buckets import t5 as t5
from jaxmha.mods.masks import all_of as all_of
from jaxmha.mods.masks import any_of as any_of
from jaxmha.mods.masks import block_sparse as block_sparse
from jaxmha.mods.masks import causal as causal
from jaxmha.mods.masks import dilated as dilated
from jaxmha.mods.masks import document as document
from jaxmha.mods.masks import prefix_lm as prefix_lm
from jaxmha.mods.masks import window as window
from jaxmha.mods.scores import alibi as alibi
from jaxmha.mods.scores import alibi_slopes as alibi_slopes
from jaxmha.mods.scores import relative_bias as relative_bias
from jaxmha.mods.scores import soft_cap as soft_cap

__all__ = [
    "BlockMask",
    "alibi",
    "alibi_slopes",
    "all_of",
    "any_of",
    "block_mask",
    "block_sparse",
    "causal",
    "dilated",
    "document",
    "prefix_lm",
    "relative_bias",
    "soft_cap",
    "swin",
    "t5",
    "window",
]
