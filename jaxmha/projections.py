"""Projections of a layer: features to heads, and heads to features."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmha import checks, sharding
from jaxmha.arrays import Array, require_arrays
from jaxmha.dims import bind
from jaxmha.explicit_sharding import by_types, sharding_of_features, sharding_of_heads
from jaxmha.implementations import SupportQuery, platforms, shard_map
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.implementations.native import matmul as native
from jaxmha.matmul import matmul, resolved
from jaxmha.params import MHAParams, Projection, check, leaves
from jaxmha.semantics import Precision, Semantics

X = TypeVar("X")
Three: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]


def distinct(query: X, key: X, value: X) -> tuple[X, X | None, X | None]:
    """Returns query, key and value, with None for an input that is the same array as the one before.

    jit would treat it as another array, and project it again.
    """
    return query, None if key is query else key, None if value is key else value


def all_three(query: X, key: X | None, value: X | None) -> tuple[X, X, X]:
    """Undoes `distinct`: a None key becomes the query, and a None value becomes the key."""
    key = query if key is None else key
    return query, key, key if value is None else value


def project(
    params: MHAParams,
    query: Float[Array, "*B T Dq"],
    key: Float[Array, "*B S Dk"] | None = None,
    value: Float[Array, "*B S Dv"] | None = None,
    *,
    semantics: Semantics = Semantics(),
) -> tuple[
    Float[jax.Array, "*B T N H"], Float[jax.Array, "*B S K H"], Float[jax.Array, "*B S K h"]
]:
    """Projects features to heads, and normalises queries and keys if `semantics.qk_norm` is set.

    Returns:
      query `(*B, T, N, H)`, key `(*B, S, K, H)` and value `(*B, S, K, h)`, in the promoted dtype
      of inputs and parameters, without extra positions.

    >>> import jax.numpy as jnp
    >>> params = MHAParams(*[Projection(jnp.ones((6, 2, 3)))] * 3)
    >>> [x.shape for x in project(params, jnp.ones((4, 5, 6)))]
    [(4, 5, 2, 3), (4, 5, 2, 3), (4, 5, 2, 3)]
    """
    key = query if key is None else key
    value = key if value is None else value
    checks.require_type(MHAParams, params=params)
    checks.require_type(Semantics, semantics=semantics)
    require_arrays(query=query, key=key, value=value)
    checks.reject_rounding(params=params, query=query, key=key, value=value)
    q, k, v = _project(params, *distinct(query, key, value), semantics)
    return q, k, v


class Checked(NamedTuple):
    """Sizes by letter, and the promoted dtype of inputs and parameters."""

    sizes: dict[str, int]
    dtype: np.dtype[np.floating]


def check_inputs(
    params: MHAParams, query: jax.Array, key: jax.Array | None, value: jax.Array | None
) -> Checked:
    """Checks shapes and dtypes of parameters and of inputs that `distinct` returned."""
    sizes = check(params)
    inputs = dict(zip(("query", "key", "value"), all_three(query, key, value), strict=True))
    for (name, x), axes in zip(inputs.items(), ("T Dq", "S Dk", "S Dv"), strict=True):
        bind(name, x.shape, f"*B {axes}", sizes)
    return Checked(sizes, compute_dtype(params, **inputs))


def _specs_of_heads(
    params: MHAParams,
    query: jax.Array,
    key: jax.Array | None,
    value: jax.Array | None,
    *_: object,
) -> tuple[sharding.Axes, object] | None:
    found = [
        sharding_of_features(x, projection)
        for projection, x in zip(params[:3], all_three(query, key, value), strict=True)
    ]
    if found[0] is None:
        return None
    return found[0].axes, tuple(sharding.spec() if x is None else x.heads for x in found)


@jax.jit
@by_types(_specs_of_heads)
def _project(
    params: MHAParams,
    query: jax.Array,
    key: jax.Array | None,
    value: jax.Array | None,
    semantics: Semantics,
) -> Three:
    _, dtype = check_inputs(params, query, key, value)
    return project_checked(params, query, key, value, semantics, dtype)


def project_checked(
    params: MHAParams,
    query: jax.Array,
    key: jax.Array | None,
    value: jax.Array | None,
    semantics: Semantics,
    dtype: np.dtype[np.floating],
    attended: tuple[jax.Array | None, jax.Array | None, jax.Array | None] = (None, None, None),
    implementation: str | Sequence[str] | None = None,
) -> Three:
    """Projects inputs that `check_inputs` accepted, and zeroes unattended positions first.

    A key of None stands for the query, and a value of None for the key, as `distinct` returns them.
    `attended`: masks of the query, key and value positions to keep, `b T`, `b S` and `b S`; None
    keeps all.
    """

    def affine(
        projections: Sequence[Projection],
        inputs: Sequence[jax.Array],
        attended: Sequence[jax.Array | None],
    ) -> list[jax.Array]:
        return [
            affine_map(x, 1, projection, dtype, precision, implementation, mask, at_once)
            for x, mask, projection, at_once in zip(
                inputs, attended, projections, rounded, strict=True
            )
        ]

    precision = semantics.precision
    unclipped = semantics.clip_qkv is None
    unchanged = unclipped and semantics.qk_norm is None
    rounded = unchanged, unchanged, unclipped
    projections = params.query, params.key, params.value
    heads = shard_map.project(affine, projections, all_three(query, key, value), attended)
    heads[:2] = _normalised(params, heads[0], heads[1], semantics)
    if semantics.clip_qkv is not None:
        heads = [jnp.clip(x, -semantics.clip_qkv, semantics.clip_qkv) for x in heads]
    q, k, v = (x.astype(dtype) for x in heads)
    return q, k, v


def combine(
    params: MHAParams,
    heads: Float[Array, "*B T N h"],
    *,
    semantics: Semantics = Semantics(),
    query: Float[Array, "*B T Dq"] | None = None,
) -> Float[jax.Array, "*B T Do"]:
    """Combines heads with the output projection, or concatenates them if `params.out` is None.

    `query`: the query features, as given to `project`; required if `params.gate` is given.

    Raises:
      ValueError: a shape does not fit, or only one of `params.gate` and `query` is given.

    >>> import jax.numpy as jnp
    >>> params = MHAParams(*[Projection(jnp.ones((6, 2, 3)))] * 3)
    >>> combine(params, jnp.ones((4, 5, 2, 3))).shape
    (4, 5, 6)
    """
    checks.require_type(MHAParams, params=params)
    checks.require_type(Semantics, semantics=semantics)
    require_arrays(heads=heads)
    require_arrays(optional=True, query=query)
    checks.reject_rounding(params=params, heads=heads, query=query)
    if (params.gate is None) != (query is None):
        raise ValueError(
            "combine: params.gate needs the query features that it projects, combine(..., query=x), "
            f"got query={'None' if query is None else 'an array'} and "
            f"{'no ' if params.gate is None else 'a '}params.gate"
        )
    out: jax.Array = _combine(params, heads, semantics, query)
    return out


def _specs_of_features(
    _: MHAParams, heads: jax.Array, *__: object
) -> tuple[sharding.Axes, object] | None:
    found = sharding_of_heads(heads)
    return found and (found.axes, found.features)


@jax.jit
@by_types(_specs_of_features)
def _combine(
    params: MHAParams, heads: jax.Array, semantics: Semantics, query: jax.Array | None
) -> jax.Array:
    sizes = check(params)
    bind("heads", heads.shape, "*B T N h", sizes)
    given = {"heads": heads}
    if query is not None:
        bind("query", query.shape, "*B T Dq", sizes)
        given["query"] = query
    return combine_checked(params, heads, semantics, compute_dtype(params, **given), query)


def combine_checked(
    params: MHAParams,
    heads: jax.Array,
    semantics: Semantics,
    dtype: np.dtype[np.floating],
    query: jax.Array | None,
    attended: jax.Array | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """Combines heads whose shape and dtype are already checked.

    `query`: the query features, input of `params.gate`. `attended`: a mask `b T` of the query
    positions that the gate reads; other positions count as zeros. None: all positions.
    """
    if params.gate is not None:
        assert query is not None
        gate = _gate(params.gate, query, dtype, semantics.precision, implementation, attended)
        heads = (heads.astype(gate.dtype) * gate).astype(heads.dtype)
    if params.out is None:
        *batch, N, h = heads.shape
        return jnp.reshape(heads, (*batch, N * h)).astype(dtype)
    out = affine_map(heads, 2, params.out, dtype, semantics.precision, implementation, rounded=True)
    return out.astype(dtype)


def _gate(
    gate: Projection,
    query: jax.Array,
    dtype: np.dtype[np.floating],
    precision: Precision,
    implementation: str | Sequence[str] | None,
    attended: jax.Array | None,
) -> jax.Array:
    """The factors of the output of the heads: `*B T N h`, or `*B T N 1` for one gate per head."""
    own = Projection(gate.kernel)
    logits = affine_map(query, 1, own, dtype, precision, implementation, attended)
    logits = logits.astype(accumulation_dtype(dtype))
    if gate.kernel.ndim == 2:
        logits = logits[..., None]
    if gate.bias is not None:
        bias = jnp.asarray(gate.bias).astype(logits.dtype)
        bias = bias[:, None] if bias.ndim == 1 else bias
        logits += bias.reshape((1,) * (logits.ndim - 2) + bias.shape)
    return jax.nn.sigmoid(logits)


def compute_dtype(params: MHAParams, **inputs: Array) -> np.dtype[np.floating]:
    """The promoted dtype of inputs and parameters; TypeError unless all are floating."""
    return checks.promoted(**inputs, **{f"params.{k}": x for k, x in leaves(params).items()})


def affine_map(
    x: jax.Array,
    contracted: int,
    projection: Projection,
    dtype: np.dtype[np.floating],
    precision: Precision,
    implementation: str | Sequence[str] | None = None,
    attended: jax.Array | None = None,
    rounded: bool = False,
) -> jax.Array:
    """Contracts the last `contracted` axes of x with the first of the kernel, in one matmul.

    `attended`: a mask of the rows of x to read; other rows count as zeros. None: all rows.
    `rounded`: the caller rounds the result to `dtype` at once, so that a kernel may round it.

    On CPU, product and bias are in the accumulation dtype, so that their sum is rounded once. On
    GPUs and TPUs, the product is rounded to `dtype` before the bias is added: a product in the
    accumulation dtype would have to be written and read once more.
    """
    accumulate = accumulation_dtype(dtype)
    written = accumulate if platforms.current().name == "cpu" else dtype
    kernel = jnp.asarray(projection.kernel).astype(dtype)
    inside, outside = kernel.shape[:contracted], kernel.shape[contracted:]
    lead = x.shape[: x.ndim - contracted]
    bias = projection.bias
    if sharding.current() is not None:  # a sharded axis cannot be merged with others
        last = tuple(range(x.ndim - contracted, x.ndim)), tuple(range(contracted))
        y = jax.lax.dot_general(
            jnp.asarray(_zero_outside(x, attended), dtype),
            kernel,
            (last, ((), ())),
            precision=resolved(precision),
            preferred_element_type=written,
        )
        return _plus(y, bias, accumulate, (1,) * len(lead) + outside)
    rows = jnp.asarray(x, dtype).reshape(math.prod(lead), math.prod(inside))
    columns = kernel.reshape(math.prod(inside), math.prod(outside))
    m, (k, n) = rows.shape[0], columns.shape
    kept = None if attended is None else attended.reshape(m)
    reason = native.unsupported_reason(m, k, n, dtype, implementation)
    if isinstance(implementation, SupportQuery):
        implementation.matmuls.append(reason)
    if reason is None:
        own = None if bias is None else jnp.asarray(bias).astype(dtype).reshape(-1)
        return native.affine(rows, columns, own, kept, rounded).reshape(*lead, *outside)
    rows = _zero_outside(rows, kept)
    if written == accumulate:
        y = matmul(rows, columns, precision=precision, dtype=accumulate)
    else:
        # XLA:GPU multiplies one row elementwise and writes all products, as many as the kernel has
        # entries. Two rows give a matmul.
        alone = isinstance(m, int) and m == 1 and platforms.current().name in ("cuda", "rocm")
        rows = jnp.broadcast_to(rows, (2, k)) if alone else rows
        y = jnp.matmul(rows, columns, precision=resolved(precision), preferred_element_type=written)
        y = y[:1] if alone else y
    return _plus(y, bias, accumulate, (1, math.prod(outside))).reshape(*lead, *outside)


def _plus(
    y: jax.Array, bias: Array | None, accumulate: np.dtype[np.floating], shape: tuple[int, ...]
) -> jax.Array:
    """Adds a bias; its gradient is summed in the accumulation dtype."""
    if bias is None:
        return y
    wide = jnp.asarray(bias).astype(accumulate).reshape(shape)
    return y + (wide if y.dtype == accumulate else jnp.broadcast_to(wide, y.shape).astype(y.dtype))


def check_norms(params: MHAParams, semantics: Semantics) -> None:
    """Raises ValueError unless params have scales of norms if and only if semantics needs them."""
    learned = semantics.qk_norm is not None and semantics.qk_norm_learned
    if learned != (params.query_norm is not None):
        raise ValueError(
            f"semantics.qk_norm is {semantics.qk_norm!r} with qk_norm_learned="
            f"{semantics.qk_norm_learned}, and params has "
            f"{'no ' if params.query_norm is None else ''}query_norm and key_norm: one needs the "
            "other (qk_norm_learned=False: norms without scales)"
        )


def _normalised(
    params: MHAParams, query: jax.Array, key: jax.Array, semantics: Semantics
) -> tuple[jax.Array, jax.Array]:
    """Normalises queries and keys as `semantics.qk_norm` defines."""
    check_norms(params, semantics)
    if semantics.qk_norm is None:
        return query, key
    return (
        _normalise(query, params.query_norm, params.query_norm_bias, semantics),
        _normalise(key, params.key_norm, params.key_norm_bias, semantics),
    )


def _normalise(
    x: jax.Array, scale: Array | None, bias: Array | None, semantics: Semantics
) -> jax.Array:
    """Normalises heads. Sources: Ba et al., "Layer Normalization" (2016); Zhang and Sennrich,
    "Root Mean Square Layer Normalization" (2019)."""
    axes = (-2, -1) if semantics.qk_norm_scope == "heads" else (-1,)
    x = x.astype(accumulation_dtype(x.dtype))
    if semantics.qk_norm == "layer":
        x = x - x.mean(axes, keepdims=True)
    x = x * inverse_rms(x, axes, semantics.qk_norm_epsilon)
    if scale is not None:
        scale = _last_axes(scale, x)
        x = x * (scale + semantics.qk_norm_offset if semantics.qk_norm_offset else scale)
    return x if bias is None else x + _last_axes(bias, x)


def inverse_rms(x: jax.Array, axes: int | tuple[int, ...], epsilon: float) -> jax.Array:
    """`1 / sqrt(mean(x ** 2) + epsilon)`; 1 where x is all zeros, if epsilon is tiny."""
    square = jnp.square(x).mean(axes, keepdims=True)
    # Unattended positions are zeroed. If epsilon ** -1.5 overflows, as for epsilon 0, gradients of
    # these positions would be 0 * inf, and gradients of kernels NaN.
    if epsilon < 64 * float(np.finfo(x.dtype).max) ** (-2 / 3):
        return jax.lax.rsqrt(square + jnp.where((x == 0).all(axes, keepdims=True), 1.0, epsilon))
    return jax.lax.rsqrt(square + epsilon)


def _last_axes(array: Array, x: jax.Array) -> jax.Array:
    """The array in the dtype of `x`, with leading axes of size 1 up to the rank of `x`."""
    array = jnp.asarray(array).astype(x.dtype)
    return array.reshape((1,) * (x.ndim - array.ndim) + array.shape)


def _zero_outside(x: jax.Array, mask: jax.Array | None) -> jax.Array:
    return x if mask is None else jnp.where(mask.reshape(*x.shape[:-1], 1), x, 0.0)
