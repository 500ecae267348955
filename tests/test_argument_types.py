"""A value of the wrong type is refused where it is given, in words that name the argument."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from keras import layers as keras_layers
from torch import nn

import jaxmha
from jaxmha import KVCache, Mask, PagedKVCache, Semantics, checks, latent, sharding
from jaxmha.arrays import mask_hint, params_hint
from jaxmha.converters import flax, keras, torch
from tests import drawn

PARAMS = drawn.params(num_heads=2, features=8)
CACHE = KVCache.empty(PARAMS, 1, 8)
HEADS = np.ones((1, 3, 2, 4), np.float32)
X = np.ones((1, 3, 8), np.float32)
AT = np.arange(3)
LATENT = drawn.latent_params(num_heads=2, features=8, latent_dim=4, rotary_dim=2, head_dim=3)
LATENTS = latent.LatentCache.empty(LATENT, 1, 8)


def attention(**options: Any) -> Any:
    return jaxmha.dot_product_attention(HEADS, HEADS, HEADS, **options)


def init(**options: Any) -> Any:
    given: dict[str, Any] = {"key": jax.random.key(0), "num_heads": 2, "features": 8}
    return jaxmha.init_params(**given | options)


# By the name of the argument in the message, and where there are several, by a word before it.
SIZES: dict[str, Callable[[Any], Any]] = {
    "num_heads": lambda x: init(num_heads=x),
    "features": lambda x: init(features=x),
    "batch_size": lambda x: KVCache.empty(PARAMS, x, 8),
    "length": lambda x: KVCache.empty(PARAMS, 1, x),
    "T": lambda x: Mask.causal().to_array(x, 3),
    "numpy S": lambda x: Mask.causal().to_array(3, x, np),
}
INTEGERS: dict[str, Callable[[Any], Any]] = {
    "offset": lambda x: Mask.causal(x),
    "cache.lengths": lambda x: jaxmha.decode_step(PARAMS, X[:, :1], CACHE._replace(lengths=x)),
    "positions": lambda x: jaxmha.rope(HEADS, x),
    "query_ids": lambda x: Mask.segments(query_ids=x, key_value_ids=x),
}
OPTIONAL: dict[str, Callable[[Any], Any]] = {
    "causal_offset": lambda x: Mask(causal_offset=x),
    "fields query_lengths": lambda x: Mask(query_lengths=x),
    "fields key_value_lengths": lambda x: Mask(key_value_lengths=x),
    "fields query_segments": lambda x: Mask(query_segments=x),
    "fields query_padding": lambda x: Mask(query_padding=x),
    "fields array": lambda x: Mask(array=x),
    "window_size": lambda x: Mask(window_size=x),
    "left window": lambda x: Mask(window_size=(x, None)),
    "right window": lambda x: Mask.window(1, x),
    "local_window_size": lambda x: attention(local_window_size=(1, x)),
    "query_seq_lengths": lambda x: attention(query_seq_lengths=x),
    "segment_ids": lambda x: attention(segment_ids=x),
    "num_kv_heads": lambda x: init(num_kv_heads=x),
    "head_dim": lambda x: init(head_dim=x),
    "key_value": lambda x: Mask.padding(key_value=x),
}
KEYS: dict[str, Callable[[Any], Any]] = {
    "dropout_key": lambda x: attention(dropout_key=x),
    "dropping dropout_key": lambda x: attention(dropout_key=x, dropout_rate=0.5),
    "layer dropout_key": lambda x: jaxmha.multi_head_attention(PARAMS, X, dropout_key=x),
}
FLAGS: dict[str, Callable[[Any], Any]] = {
    "interleaved": lambda x: jaxmha.rope(HEADS, AT, interleaved=x),
    "use_bias": lambda x: init(use_bias=x),
    "use_bias_kv": lambda x: init(use_bias_kv=x),
    "add_zero_attn": lambda x: Semantics(add_zero_attn=x),
    "is_causal": lambda x: attention(is_causal=x),
    "layer is_causal": lambda x: jaxmha.multi_head_attention(PARAMS, X, is_causal=x),
}
ARRAYS: dict[str, Callable[[Any], Any]] = {
    "query": lambda x: jaxmha.dot_product_attention(x, HEADS, HEADS),
    "layer query": lambda x: jaxmha.multi_head_attention(PARAMS, x),
    "x": lambda x: jaxmha.decode_step(PARAMS, x, CACHE),
    "rope x": lambda x: jaxmha.rope(x, AT),
    "cache.key": lambda x: jaxmha.prefill(PARAMS, X, CACHE._replace(key=x)),
    "latent x": lambda x: latent.latent_attention(LATENT, x),
    "latent project x": lambda x: latent.project(LATENT, x),
    "latent extend x": lambda x: latent.extend(LATENT, x, LATENTS),
    "latent heads": lambda x: latent.combine(LATENT, x),
}
CACHES: dict[str, Callable[[Any], Any]] = {
    "cache": lambda x: jaxmha.extend(PARAMS, X, x),
    "latent cache": lambda x: latent.extend(LATENT, X, x),
}
LAYERS: dict[str, Callable[[Any], Any]] = {
    "layer params": lambda x: jaxmha.multi_head_attention(x, X),
    "project params": lambda x: jaxmha.project(x, X),
    "step params": lambda x: jaxmha.decode_step(x, X[:, :1], CACHE),
    "cache params": lambda x: KVCache.empty(x, 1, 8),
    "pages params": lambda x: PagedKVCache.empty(x, 1, 8, pages=2),
    "latent params": lambda x: latent.latent_attention(x, X),
    "sharding params": lambda x: sharding.specs(x),
    "torch params": lambda x: torch.to_module(x),
    "keras params": lambda x: keras.to_module(x),
    "flax params": lambda x: flax.to_module(x),
}
WRONG: tuple[Any, ...] = (
    *(1.0, 1.5, float("nan"), 1j, "1", b"1", True, [1.0], {}, object()),
    *(np.float32(1), np.ones(1), np.array(["a"]), np.array([None])),
)
FIELDS: tuple[tuple[dict[str, Callable[[Any], Any]], tuple[Any, ...]], ...] = (
    (SIZES, (*WRONG, None, np.True_, 2**70, -1)),
    (INTEGERS, (*WRONG, None, np.True_)),
    (OPTIONAL, WRONG),
    (KEYS, (*WRONG, 3, np.ones((2, 2), np.uint32), np.ones(2, np.int32), 2**70)),
    ({"key": lambda x: init(key=x)}, (*WRONG, None, 3, np.ones(2, np.int32))),
    (FLAGS, (0, 1, 1.0, "yes", None, np.ones(1), np.asarray(True), [True])),
    (LAYERS, (None, {}, PARAMS.query, tuple(PARAMS), "1", object())),
    (ARRAYS, (None, 1.0, "1", [1.0], {})),
    (CACHES, (None, PARAMS, X, {}, "1", object())),
    ({"base": lambda x: jaxmha.rope(HEADS, AT, base=x)}, (True, "1", None, 1j, -1.0, np.ones(1))),
    ({"inv_freq": lambda x: jaxmha.rope(HEADS, AT, inv_freq=x)}, (1.0, [1.0], np.ones(1, bool))),
)


@pytest.mark.parametrize(
    ("name", "call", "wrong"),
    [(name, call, wrong) for table, wrong in FIELDS for name, call in table.items()],
    ids=[name for table, _ in FIELDS for name in table],
)
@pytest.mark.usefixtures("no_shape_hook")
def test_wrong_types_are_refused_by_name(
    name: str, call: Callable[[Any], Any], wrong: tuple[Any, ...]
) -> None:
    for value in wrong:
        if getattr(value, "dtype", None) == bool and name in ("key_value", "fields array"):
            continue
        with pytest.raises((TypeError, ValueError), match=rf"\b{name.split()[-1]}\b"):
            call(value)


@pytest.mark.usefixtures("no_shape_hook")
def test_right_types_are_taken() -> None:
    for key in (jax.random.key(0), jax.random.PRNGKey(0), np.zeros(2, np.uint32), None):
        attention(dropout_key=key)
    jax.vmap(lambda key: init(key=key))(jax.random.split(jax.random.key(0), 2))
    jaxmha.rope(HEADS, np.uint8([0, 1, 2]), base=np.float32(7), interleaved=np.True_)  # type: ignore[arg-type]
    Mask(causal_offset=np.int8(1), window_size=(np.int64(2), None))  # type: ignore[arg-type]
    assert Mask(window_size=(2, None)).window_size == (2, None)


INSTEAD: dict[str, Callable[[], Any]] = {
    "flax.from_module": lambda: nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)),
    "torch.from_module": lambda: nn.MultiheadAttention(8, 2),
    "keras.from_module": lambda: keras_layers.MultiHeadAttention(2, 4),
    "import_params": lambda: {"query": {"kernel": X}},
    "jaxmha.latent": lambda: LATENT,
}


@pytest.mark.parametrize("remedy", INSTEAD)
def test_a_layer_in_the_place_of_params_gets_its_converter(remedy: str) -> None:
    """Directly, because the tests check the types of public signatures before the functions do."""
    layer = INSTEAD[remedy]()
    with pytest.raises(TypeError, match=f"MHAParams, got {type(layer).__name__}: .*{remedy}"):
        checks.require_type(jaxmha.MHAParams, params=layer)
    assert remedy in params_hint(layer)


@pytest.mark.parametrize(
    ("mask", "remedy"),
    [
        (3, " 3: a number of keys goes to key_value_seq_lengths="),
        (0.5, " 0.5: a number"),
        ({"attention_mask": X}, " of 'attention_mask': give the array in it"),
        (Mask, " itself: call a constructor, such as Mask.causal()"),
        (lambda *_: True, ": give a function of positions as mask_mod="),
    ],
)
def test_wrong_masks_get_a_remedy(mask: Any, remedy: str) -> None:
    assert mask_hint(mask).startswith(remedy)
