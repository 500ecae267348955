"""A value of every public type that is a pytree, and of every kind of mask."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmha
from jaxmha import Mask, Semantics, latent, mods
from jaxmha.converters.torch import Imported
from tests import drawn

B, T, S = 2, 3, 5
PARAMS: Any = jax.tree.map(
    np.asarray,
    drawn.params(num_heads=2, features=6, num_kv_heads=1),
)
LATENT: Any = jax.tree.map(
    np.asarray,
    drawn.latent_params(num_heads=3, features=7, latent_dim=5, rotary_dim=2, head_dim=4),
)
IDS = np.asarray([[0, 0, 1], [0, 1, 1]], np.int32)
LENGTHS = np.asarray([3, 1], np.int32)
PAGES: dict[str, Any] = {"pages": 7, "page_size": 4}

MASKS: dict[str, Mask] = {
    "nothing": Mask(),
    "static": Mask.causal(1) & Mask.window(2, None),
    "offsets": Mask.causal(np.asarray([0, 1], np.int32)),
    "lengths": Mask.causal() & Mask.lengths(query=LENGTHS, key_value=LENGTHS),
    "padding": Mask.window(1, 1) & Mask.padding(key_value=np.ones((B, S), bool)),
    "segments": Mask.segments(query_ids=IDS, key_value_ids=IDS, max_segments=2),
    "dense": Mask.dense(np.ones((T, S), bool)),
}
SEMANTICS: dict[str, Semantics] = {
    "default": Semantics(),
    "changed": Semantics(
        scale=0.1, softmax_dtype=np.float32, dropout_broadcast=("B",), local_window_size=(2, None),
        attention_axes=(1, 2), precision=("high", "default"),
    ),
    "preset": Semantics(precision=jax.lax.DotAlgorithmPreset.F32_F32_F32, softmax_dtype=jnp.bfloat16),
    "algorithm": Semantics(precision=jax.lax.DotAlgorithm(np.float16, np.float16, np.float32)),
}  # fmt: skip
RECORDS: dict[str, Any] = {
    "projection": PARAMS.query,
    "params": PARAMS,
    "latent_params": LATENT,
    "cache": jaxmha.KVCache.empty(PARAMS, B, S),
    "paged": jaxmha.PagedKVCache.empty(PARAMS, B, S, **PAGES, dtype=jnp.int8),
    "latent_cache": latent.LatentCache.empty(LATENT, B, S),
    "latent_paged": latent.paged_cache(LATENT, B, S, **PAGES),
}
BLOCKS = {"blocks": mods.block_mask(mods.document(np.asarray([0, 0, 1, 1, 1])), 5, block=2)}
EXPORTED: dict[str, Any] = {**MASKS, **SEMANTICS, **RECORDS}
IMPORTED = {"imported": Imported(PARAMS, Semantics(), batch_first=False)}
TREES: dict[str, Any] = {**EXPORTED, **BLOCKS, **IMPORTED}
