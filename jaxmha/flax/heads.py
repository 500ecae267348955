"""Attention over heads, and of a layer that rotates queries and keys before attention."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha import bias_kv, checks, sharding
from jaxmha.arrays import are_arrays
from jaxmha.attention import attend, hashable
from jaxmha.implementations import forward_mode
from jaxmha.kv_cache import Rotate
from jaxmha.layer import combine, live_features, multi_head_attention, project_live
from jaxmha.mask import Mask
from jaxmha.params import MHAParams, check
from jaxmha.semantics import ReturnWeights, Semantics

Implementation: TypeAlias = str | Sequence[str] | None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["semantics", "dropout_key"],
    meta_fields=["return_weights", "implementation"],
)
@dataclass(frozen=True)
class How:
    """The settings of a call, apart from its arrays; `dropout_key` None: no dropout."""

    semantics: Semantics
    dropout_key: Any = None
    return_weights: bool = False  # before dropout
    implementation: Implementation = None


def attend_heads(
    query: Any, key: Any, value: Any, bias: Any, mask: Mask, how: How
) -> tuple[jax.Array, Any]:
    """Attention over `*B T N H`, `*B S K H` and `*B S K h`: out `*B T N h`, and the weights."""
    with forward_mode():
        out, weights = _attend_heads(query, key, value, bias, mask, fixed(how))
    return out, weights


def attend_layer(
    params: MHAParams,
    inputs: tuple[Any, Any, Any],
    bias: Any,
    mask: Mask,
    rotate: Rotate | None,
    how: How,
    positions: Any = None,
) -> tuple[jax.Array, Any]:
    """A layer over query, key and value features, with `rotate(heads, positions)` before attention.

    `positions`: of queries and keys, default 0, 1, ...
    """
    check_positions(positions, rotate, *inputs[:2])
    if rotate is None:
        result: Any = multi_head_attention(
            params,
            *inputs,
            bias=bias,
            mask=mask,
            semantics=how.semantics,
            dropout_key=how.dropout_key,
            return_weights=how.return_weights,
            implementation=how.implementation,
        )
        return result if how.return_weights else (result, None)
    check_arrays(params, inputs, bias)
    with forward_mode():
        out, weights = _attend_layer(
            params, inputs, bias, mask, fixed(how), positions, rotate=rotate
        )
    return out, weights


def fixed(how: How) -> How:
    """Makes the settings hashable for jit: a list of implementations becomes a tuple."""
    return replace(how, implementation=hashable(how.implementation))


def check_arrays(params: MHAParams, inputs: tuple[Any, Any, Any], bias: Any) -> None:
    """Raises TypeError for an input that is not an array, or that JAX would silently round."""
    names = dict(zip(("query", "key", "value"), inputs, strict=True))
    are_arrays(bias=bias, **names)
    checks.no_silent_rounding(params=params, bias=bias, **names)


def _places_of_heads(query: Any, *_: Any) -> Any:
    spread = sharding.of_heads(query)
    return spread and (spread.axes, (spread.heads, spread.pairs))


@jax.jit
@sharding.by_types(_places_of_heads)
def _attend_heads(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Mask,
    how: How,
) -> tuple[Any, Any]:
    batch, sizes = query.shape[:-3], sizes_of(query, key)
    wide = widen(None, bias, mask, batch, sizes, how.semantics)
    return between(None, query, key, value, wide, how)


def _places(params: MHAParams, inputs: Any, *_: Any, **__: Any) -> Any:
    spread = sharding.of_features(inputs[0], params.query.kernel)
    return spread and (spread.axes, (spread.features, spread.pairs))


@partial(jax.jit, static_argnames="rotate")
@sharding.by_types(_places)
def _attend_layer(
    params: MHAParams,
    inputs: tuple[Any, Any, Any],
    bias: Any,
    mask: Mask,
    how: How,
    positions: Any,
    *,
    rotate: Rotate,
) -> tuple[Any, Any]:
    batch = inputs[0].shape[:-2]
    T, S = inputs[0].shape[-2], inputs[1].shape[-2]
    sizes = {**check(params), "T": T, "S": S}
    wide = widen(params, bias, mask, batch, sizes, how.semantics)
    extra = bias_kv.count(params, how.semantics)
    live = live_features(math.prod(batch), *wide, sizes, extra, how.semantics.fully_masked)
    query, key, value = project_live(params, *inputs, how.semantics, live)
    query = rotate(query, _positions(batch, T) if positions is None else positions)
    key = rotate(key, _positions(batch, S) if positions is None else positions)
    out, weights = between(params, query, key, value, wide, how)
    return combine(params, out, semantics=how.semantics), weights


def check_positions(
    positions: Any, rotate: Rotate | None, queries: Any, keys: Any, *, features: int = 1
) -> None:
    """Checks positions against queries `*B T ...` and keys `*B S ...` with `features` more axes."""
    if positions is None:
        return
    if rotate is None:
        raise ValueError(
            "input_positions: nothing is rotated; give rotate, such as jaxmha.rope, as well"
        )
    are_arrays(input_positions=positions)
    expected, others = queries.shape[:-features], keys.shape[:-features]
    if positions.shape != expected or others != expected:
        raise ValueError(
            "input_positions: expected axes (*B, T) of queries and keys alike, got shape "
            f"{positions.shape} with queries (*B, T) {expected}, keys (*B, S) {others}"
        )


def rotated(query: Any, key: Any, rotate: Rotate | None, positions: Any = None) -> tuple[Any, Any]:
    """Rotates heads `*B T N H` and `*B S K H` at their positions, default 0, 1, ..."""
    check_positions(positions, rotate, query, key, features=2)
    if rotate is None:
        return query, key
    *batch, T, _, _ = query.shape
    if key.shape[-3] != T:
        raise ValueError(
            f"rotate: which positions T={T} queries have among S={key.shape[-3]} keys is not known "
            "here; rotate in jaxmha.flax.linen or jaxmha.flax.nnx instead, which hold the cache"
        )
    places = _positions(batch, T) if positions is None else positions
    return rotate(query, places), rotate(key, places)


def _positions(batch: Sequence[int], size: int) -> Any:
    """True positions 0, 1, ..., in zig-zag order if the features are."""
    places = sharding.in_order(np.arange(size, dtype=np.int32).reshape(1, size), 1)
    return jnp.broadcast_to(places[0], (*batch, size))


def sizes_of(query: Any, key: Any) -> dict[str, int]:
    """The sizes T, N and S of heads `*B T N H`, `*B S K H`, for masks and biases."""
    return {"T": query.shape[-3], "N": query.shape[-2], "S": key.shape[-3]}


def widen(
    params: MHAParams | None,
    bias: Any,
    mask: Mask,
    batch: Sequence[int],
    sizes: dict[str, int],
    semantics: Semantics,
) -> tuple[Any, Mask]:
    """Flattens bias and mask to one batch axis and extends them to the extra positions."""
    extra = 0 if params is None else bias_kv.count(params, semantics)
    return (
        bias_kv.widen_bias(bias, extra, batch, sizes),
        bias_kv.widen_mask(mask, extra, batch, sizes),
    )


def between(
    params: MHAParams | None, query: Any, key: Any, value: Any, wide: tuple[Any, Mask], how: How
) -> tuple[Any, Any]:
    """Attention over heads with any batch axes; appends the extra positions of `params`."""
    batch = query.shape[:-3]
    dtype = checks.promoted(query=query, key=key, value=value)
    query, key, value = (
        x.astype(dtype).reshape(math.prod(batch), *x.shape[-3:]) for x in (query, key, value)
    )
    if params is not None:
        key = bias_kv.append(key, params.bias_k, how.semantics)
        value = bias_kv.append(value, params.bias_v, how.semantics)
    kind: ReturnWeights = "before_dropout" if how.return_weights else False
    result = attend(
        query, key, value, *wide, how.semantics, how.dropout_key, kind, how.implementation
    )
    out, weights = result.out, result.weights
    if weights is not None:
        weights = weights.reshape(*batch, *weights.shape[1:])
    return out.reshape(*batch, *out.shape[1:]), weights
