"""Adapter from requests to the inputs of fused kernels, and from kernel outputs to results.

Kernels may return anything in fully masked rows, and let NaN in unattended keys and values reach
attended rows. `attend` masks such rows and zeroes such keys and values, unless the kernel is known
to need neither. Each kernel's module pads sizes itself.
"""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int32, Integer

from jaxmha.arrays import Array
from jaxmha.implementations import fully_masked
from jaxmha.implementations.base import EVERYTHING_LEAKS, Leaks, Request, Result
from jaxmha.implementations.tiled import attended, block_mask
from jaxmha.implementations.tiled.block_mask import Conditions
from jaxmha.mask import Mask

# Fields of `Mask` that separate the sequences of one batch row.
SEGMENTS = ("query_segments", "key_value_segments", "packed_ends")


class KernelInputs(NamedTuple):
    """A request with its mask as lengths, diagonals and padding, as kernels take it.

    Unattended keys and values are zero if they would affect results. Fully masked queries are zero
    if a gradient is computed, unless lengths express the mask and such queries do not affect the
    kernel's gradients.

    Attributes:
      query, key, value: of one dtype.
      bias: each axis of full size or 1; -inf excludes a pair.
      conditions: the whole mask, except that `rows` is None, since `attend` masks these rows or
        `query_lengths` has them, and that `keys` is None without key padding, since `key_lengths`
        has them. With key padding, `keys` is True for keys valid by padding and length.
      query_lengths: numbers of valid queries, clipped to [0, T]; None: no lengths.
      key_lengths: numbers of valid keys, clipped to [0, S]; None: no lengths, or `conditions.keys`
        has them.
      left, above: static bounds `i - left <= j <= i + above`; None: no bound, or it masks nothing.
      scale: the factor of the products of queries and keys.
    """

    query: Float[jax.Array, "B T N H"]
    key: Float[jax.Array, "B S K H"]
    value: Float[jax.Array, "B S K h"]
    bias: Float[jax.Array, "b n t s"] | None
    conditions: Conditions
    query_lengths: Int32[jax.Array, "B"] | None
    key_lengths: Int32[jax.Array, "B"] | None
    left: int | None
    above: int | None
    scale: float


def unsupported(request: Request, *, name: str, dtypes: tuple[str, ...]) -> str | None:
    """The reason why the kernel called `name`, which takes `dtypes`, cannot compute a request, by
    the limits that cuDNN, tokamax and splash attention share; None: the request is within these.
    Further limits are in the `unsupported_reason` of each kernel."""
    dtype = request.query.dtype
    if dtype.name not in dtypes:
        return f"{name} takes {' and '.join(dtypes)}, got {dtype.name}"
    shapes = (*request.query.shape, *request.value.shape)
    if not all(isinstance(size, int) for size in shapes):
        return "sizes must be known"
    if 0 in shapes:
        return f"every size must be at least 1, got {request.query.shape}, {request.value.shape}"
    if request.return_weights:
        return "weights are never materialised: return_weights must be False"
    if request.drops:
        return f"{name} does not draw the same dropout mask as the other implementations"
    if request.score_mod is not None or request.mask_mod is not None:
        kind = "score_mod" if request.score_mod is not None else "mask_mod"
        return f"{name} takes no function, got a {kind}"
    if request.semantics.softmax_dtype not in (None, np.dtype(np.float32)):
        return "softmax is in float32: softmax_dtype must be None or float32"
    return None


def is_dense(request: Request) -> bool:
    """True if the request has a bias or a dense mask. Dense masks of keys alone or of queries alone
    have become padding before (`base.simplified`)."""
    return request.bias is not None or request.mask.array is not None


OutAndLse: TypeAlias = tuple[Float[jax.Array, "B T N h"], Float[jax.Array, "B N T"] | None]


def attend(
    request: Request,
    run: Callable[[KernelInputs], OutAndLse],
    *,
    beyond_lengths: Leaks = EVERYTHING_LEAKS,
    leaks: Leaks = EVERYTHING_LEAKS,
) -> Result:
    """Computes the request with a kernel.

    Args:
      request: has passed `unsupported` and the `unsupported_reason` of the kernel.
      run: returns output and lse (None if not requested). It may return any values in fully masked
        rows, but its gradients must not be NaN where the cotangents of these rows are 0.
      beyond_lengths: replaces `leaks`, if its `output` is below 2, for masks made of lengths with
        static bounds, or of key padding with lengths and without bounds. The output of `run` must
        then be 0 in fully masked rows, which are not masked once more.
      leaks: the unattended keys and values that affect the results of the kernel. They are zeroed,
        or zeroed only if a gradient is computed, if they affect only gradients.
    """
    (B, T, N, _), (_, S, K, _) = request.query.shape, request.value.shape
    if is_dense(request):
        # The barrier keeps XLA from reducing a constant bias or mask at compile time, which took 38 s
        # for 2048 x 2048 pairs.
        bias, array = jax.lax.optimization_barrier((request.bias, request.mask.array))  # type: ignore[no-untyped-call]
        request = request._replace(bias=bias, mask=replace(request.mask, array=array))
    mask = request.mask
    conditions = block_mask.from_mask(mask, T, S)
    left, above = diagonals(mask, T, S)
    padded = mask.key_value_padding is not None
    by_lengths = beyond_lengths.output < EVERYTHING_LEAKS.output
    by_lengths &= not is_dense(request) and mask.query_padding is None
    by_lengths &= mask.query_segments is None and not (padded and (left, above) != (None, None))
    rows, keys = attended.attended(conditions, request.bias, B, N, T, S)
    query, key, value = request.query, request.key, request.value
    leaks = beyond_lengths if by_lengths else leaks
    if rows is not None and not (by_lengths and leaks.gradients < EVERYTHING_LEAKS.gradients):
        query = _zeroed_in_gradients(query, jnp.moveaxis(rows, 1, 2)[..., None])
    if keys is not None and leaks != Leaks():
        each = keys if keys.shape[1] == 1 else keys.reshape(-1, K, N // K, S).any(2)
        valid = jnp.moveaxis(each, 1, 2)[..., None]
        value, key = (_zeroed(x, valid, leaks, least) for x, least in ((value, 1), (key, 2)))
    out, lse = run(
        KernelInputs(
            query,
            key,
            value,
            request.bias,
            conditions._replace(rows=None, keys=conditions.keys if padded else None),
            _lengths(mask.query_lengths, B, T),
            None if padded else _lengths(mask.key_value_lengths, B, S),
            left,
            above,
            request.scale,
        )
    )
    if rows is not None:
        if not by_lengths:
            out = jnp.where(jnp.moveaxis(rows, 1, 2)[..., None], out, 0)
        if lse is not None:
            lse = jnp.where(rows, lse, -jnp.inf)
        masked = jnp.broadcast_to(~jnp.moveaxis(rows, 1, 2), out.shape[:3])
        out = fully_masked.apply(request, out, masked)
    return Result(out, None, lse)


def _zeroed(
    x: Float[jax.Array, "B S K _"], valid: Bool[jax.Array, "#B #S #K 1"], leaks: Leaks, least: int
) -> jax.Array:
    """Zeroes keys or values `x` where `valid` (attended) is False, if they leak; if they leak only
    into gradients, only when a gradient is computed.

    `least`: the level in `leaks` from which they leak, 1 for values and 2 for keys.
    """
    if leaks.output >= least:
        return jnp.where(valid, x, 0)
    return _zeroed_in_gradients(x, valid) if leaks.gradients >= least else x


@jax.custom_vjp
def _zeroed_in_gradients(
    x: Float[jax.Array, "B T N H"], valid: Bool[jax.Array, "#B #T #N 1"]
) -> jax.Array:
    """Returns `x`. If a gradient is computed, `x` and its gradient are 0 where `valid` is False:
    NaN there would reach the gradients of other positions, though not their outputs."""
    del valid
    return x


_zeroed_in_gradients.defvjp(
    lambda x, valid: (jnp.where(valid, x, 0), valid),
    lambda valid, cotangent: (jnp.where(valid, cotangent, 0), None),
)


def diagonals(mask: Mask, T: int, S: int) -> tuple[int | None, int | None]:
    """Left and above: the static bounds `i - left <= j <= i + above` of a mask over T queries and S
    keys, by its window and a static causal offset. None: no such bound, or it masks nothing."""
    left, above = mask.window_size or (None, None)
    if isinstance(mask.causal_offset, int):
        above = mask.causal_offset if above is None else min(above, mask.causal_offset)
    if left is not None and left >= T - 1:
        left = None
    if above is not None and above >= S - 1:
        above = None
    return left, above


def _lengths(
    lengths: Integer[Array, "b"] | None, B: int, most: int
) -> Int32[jax.Array, "{B}"] | None:
    if lengths is None:
        return None
    return jnp.broadcast_to(jnp.clip(jnp.asarray(lengths), 0, most).astype(np.int32), B)


def fill(x: jax.Array, axis: int, size: int, *, front: bool = False) -> jax.Array:
    """Pads an axis with zeros to `size`, at its end or, if `front` is set, in front."""
    missing = size - x.shape[axis]
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (missing, 0) if front else (0, missing)
    return jnp.pad(x, widths)


# Lengths of queries and keys (`B` and `B`), or segment ids of both (`b T` and `b S`), whichever a
# kernel takes; None: the call has neither.
Others: TypeAlias = tuple[jax.Array, jax.Array] | None


class Kernel(NamedTuple):
    """A kernel with its static configuration; hashable.

    Attributes:
      out: `(settings, query, key, value, bias, others) -> out`, with gradients of query, key, value
        and bias. It also takes keys in place of values: that gives the gradient of lse.
      out_and_lse: takes the same arguments and returns output and lse.
      has_gradient: True if `out_and_lse` has gradients, which ignore the cotangent of lse; False:
        the gradients of `out` are used.
      scale: the factor by which the kernel multiplies products of queries and keys; 1 if the caller
        has scaled the queries.
      settings: the first argument of `out` and `out_and_lse`.
    """

    out: Callable[..., jax.Array]
    out_and_lse: Callable[..., tuple[jax.Array, jax.Array]]
    has_gradient: bool
    scale: float
    settings: Hashable


def call(
    kernel: Kernel,
    query: Float[jax.Array, "B T N H"],
    key: Float[jax.Array, "B S K H"],
    value: Float[jax.Array, "B S K h"],
    bias: Float[jax.Array, "b n t s"] | None,
    others: Others,
    *,
    lse: bool,
) -> OutAndLse:
    """Runs a kernel: returns output and lse (None if `lse` is False), both differentiable."""
    if lse:
        return out_and_lse(kernel, query, key, value, bias, others)
    return kernel.out(kernel.settings, query, key, value, bias, others), None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def out_and_lse(
    kernel: Kernel,
    query: Float[jax.Array, "B T N H"],
    key: Float[jax.Array, "B S K H"],
    value: Float[jax.Array, "B S K h"],
    bias: Float[jax.Array, "b n t s"] | None,
    others: Others,
) -> tuple[Float[jax.Array, "B T N h"], Float[jax.Array, "B N T"]]:
    """Output and lse of a kernel that itself has no gradient of lse. Here query, key and value have
    the gradients of both; the bias has only that of the output."""
    return kernel.out_and_lse(kernel.settings, query, key, value, bias, others)


Operands: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]
Saved: TypeAlias = tuple[Callable[..., tuple[jax.Array, ...]], Operands, Others]


def _forward(
    kernel: Kernel,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    others: Others,
) -> tuple[tuple[jax.Array, jax.Array], Saved]:
    operands = query, key, value, bias
    if kernel.has_gradient:
        (out, lse), pull = jax.vjp(
            lambda *x: kernel.out_and_lse(kernel.settings, *x, others), *operands
        )
    else:
        out, pull = jax.vjp(lambda *x: kernel.out(kernel.settings, *x, others), *operands)
        lse = kernel.out_and_lse(kernel.settings, *operands, others)[1]
    return (out, lse), (pull, operands, others)


def _backward(
    kernel: Kernel, saved: Saved, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, None]:
    """Gradients of query, key, value and bias from the cotangents of output and lse.

    The kernel with keys in place of values gives the part of lse: d lse_i / d query_i is `scale`
    times row i of its output, and d lse_i / d key_j is `scale` times weight (i, j) times query_i,
    the gradient of its values with the queries as cotangent of its output. The gradient of the bias
    lacks this part, so that kernels decline a bias with lse.
    """
    pull, (query, key, _, bias), others = saved
    d_out, d_lse = cotangents
    zeros = jnp.zeros_like(d_lse)
    d_query, d_key, d_value, d_bias = pull((d_out, zeros) if kernel.has_gradient else d_out)
    means, pull_values = jax.vjp(
        lambda x: kernel.out(kernel.settings, query, key, x, bias, others), key
    )
    weight = kernel.scale * jnp.moveaxis(d_lse, 1, 2)[..., None]
    (more,) = pull_values((weight * query.astype(np.float32)).astype(means.dtype))
    d_query = _sum(d_query, weight * means.astype(np.float32))
    return d_query, _sum(d_key, more), d_value, d_bias, None


def _sum(a: jax.Array, b: jax.Array) -> jax.Array:
    return (a.astype(np.float32) + b.astype(np.float32)).astype(a.dtype)


out_and_lse.defvjp(_forward, _backward)
