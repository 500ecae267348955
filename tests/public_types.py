"""Types of the results of public functions: `make lint` checks this module, and no test runs it.

An ignored error that is none any more is an error of its own: strict mypy warns of it.
"""

from typing import assert_type

import jax

import jaxmha

Pair = tuple[jax.Array, jax.Array]


def results(params: jaxmha.MHAParams, x: jax.Array, cache: jaxmha.KVCache) -> None:
    """An array, and a tuple where weights or a log-sum-exp are asked for."""
    layer, attention = jaxmha.multi_head_attention, jaxmha.dot_product_attention
    assert_type(layer(params, x), jax.Array)
    assert_type(layer(params, x, return_weights=True), Pair)
    assert_type(layer(params, x, return_weights="after_dropout"), Pair)
    assert_type(attention(x, x, x), jax.Array)
    assert_type(attention(x, x, x, return_weights=True), Pair)
    assert_type(attention(x, x, x, return_lse=True), Pair)
    assert_type(attention(x, x, x, return_residual=True), Pair)
    both = attention(x, x, x, return_weights=True, return_lse=True)
    assert_type(both, tuple[jax.Array, jax.Array, jax.Array])
    assert_type(jaxmha.prefill(params, x, cache), tuple[jax.Array, jaxmha.KVCache])
    assert_type(jaxmha.decode_step(params, x, cache), tuple[jax.Array, jaxmha.KVCache])
    assert_type(jaxmha.extend(params, x, cache), tuple[jax.Array, jaxmha.KVCache])
    assert_type(jaxmha.project(params, x), tuple[jax.Array, jax.Array, jax.Array])
    assert_type(jaxmha.combine(params, x), jax.Array)
    assert_type(jaxmha.rope(x, x), jax.Array)


def wrong_attributes(params: jaxmha.MHAParams, x: jax.Array, cache: jaxmha.KVCache) -> list[object]:
    """None of these passes unnoticed, as it would if a result were `Any`."""
    return [
        jaxmha.multi_head_attention(params, x).nonsense,  # type: ignore[attr-defined]
        jaxmha.multi_head_attention(params, x, return_weights=True).shape,  # type: ignore[attr-defined]
        jaxmha.dot_product_attention(x, x, x).nonsense,  # type: ignore[attr-defined]
        jaxmha.decode_step(params, x, cache)[1].nonsense,  # type: ignore[attr-defined]
    ]
