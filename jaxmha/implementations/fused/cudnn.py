"""cuDNN's fused attention: NVIDIA GPUs, half precision, through JAX.

Source: `jax.nn.dot_product_attention(implementation="cudnn")` and, for the log-sum-exp in float32,
the private function that it calls, whose signature is the same in JAX 0.10 to 0.12.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxmha.implementations import platforms
from jaxmha.implementations.base import Request, Result
from jaxmha.implementations.fused import adapter
from jaxmha.implementations.fused.adapter import Kernel, KernelInputs, Others, OutAndLse, fill

# With a bias, T and S are padded to a multiple of this: at other sizes cuDNN's backward pass is
# wrong or missing (NaN at 64 modulo 128).
BIAS_MULTIPLE = 128
# cuDNN does not preserve -inf in a bias: masked pairs get EXCLUDED, and finite entries of a bias
# are clipped to at least LOWEST.
EXCLUDED, LOWEST = -(2.0**41), -(2.0**40)
# One more feature, +-BARRIER in queries and -BARRIER in masked keys, excludes masked keys: it adds
# -abs(scale) * BARRIER**2 to their logits. BARRIER fits float16.
BARRIER = 2.0**15


class Settings(NamedTuple):
    """Static configuration of one call."""

    scale: float
    causal: bool
    left: int | None


def unsupported_reason(request: Request) -> str | None:
    """Returns None if this implementation supports the request, else the reason why not."""
    reason = adapter.unsupported(request, name="cuDNN", dtypes=("bfloat16", "float16"))
    if reason:
        return reason
    platform = platforms.current()
    if platform.capability is None or platform.capability < (8, 0):
        return f"cuDNN's fused attention needs a GPU of compute capability 8.0 or higher, got {platform.device}"
    mask, semantics = request.mask, request.semantics
    (_, T, _, H), (_, S, _, h) = request.query.shape, request.value.shape
    scale = H**-0.5 if semantics.scale is None else semantics.scale
    most = 256 if (9, 0) <= platform.capability < (10, 0) else 128
    left, above = adapter.diagonals(mask, T, S)
    dense, padded = adapter.is_dense(request), mask.key_value_padding is not None
    barrier = padded and not dense and (left, above) != (None, None)
    if semantics.logits_soft_cap is not None:
        return "cuDNN has no soft cap"
    if max(H + barrier, h) > most:
        column = " (one more for padding of keys together with causality or a window)" * barrier
        return f"heads must have at most {most} features on {platform.device}, got {H}, {h}{column}"
    if mask.query_segments is not None:
        return "cuDNN takes packed sequences as offsets, which segment ids do not give"
    if mask.causal_offset is not None and not isinstance(mask.causal_offset, int):
        return "the causal offset must be a Python integer"
    if left is not None and above is None:
        return "a window must have a right side (or be causal)"
    if barrier and abs(scale) * BARRIER**2 < 2.0**14:
        return (
            f"padding of keys together with causality or a window needs a larger scale, got {scale}"
        )
    if dense and request.query.dtype != jnp.bfloat16:
        return f"{request.query.dtype} has no number far below every bias"
    if request.bias is not None and request.return_lse:
        return "cuDNN has no gradient from the log-sum-exp to a bias"
    return None


def traceable() -> str | None:
    """The reason why JAX cannot trace a call of cuDNN on this machine, or None."""
    from jax._src.cudnn import fused_attention_stablehlo as private

    try:
        private.check_cudnn_version()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return f"JAX reads the version of cuDNN on this machine while it traces: {error}"
    return None


def attend(request: Request) -> Result:
    """Computes the request in its own dtype; softmax and sums are float32."""
    return adapter.attend(request, lambda inputs: _run(inputs, lse=request.return_lse))


def _run(inputs: KernelInputs, *, lse: bool) -> OutAndLse:
    """Shifts the queries by `above` rows, so that the causal mask is aligned top-left."""
    above, left = inputs.above, inputs.left
    if not above:
        return _top_left(inputs, lse=lse)
    query, lengths = inputs.query, inputs.query_lengths
    (B, T, N, _), h = query.shape, inputs.value.shape[3]
    left = None if left is None else left + above
    if T + above <= 0 or (left is not None and left < 0):  # every row is fully masked
        return jnp.zeros((B, T, N, h), query.dtype), jnp.zeros((B, N, T), np.float32)
    bias = inputs.bias
    conditions = inputs.conditions
    array = conditions.array

    def shifted(x: jax.Array, axis: int) -> jax.Array:
        if axis == 2 and x.shape[axis] == 1:  # a bias or mask that broadcasts over queries
            return x
        if above < 0:
            return jax.lax.slice_in_dim(x, -above, None, axis=axis)
        return fill(x, axis, x.shape[axis] + above, front=True)

    out, found = _top_left(
        inputs._replace(
            query=shifted(query, 1),
            bias=None if bias is None else shifted(bias, 2),
            conditions=conditions._replace(array=None if array is None else shifted(array, 2)),
            query_lengths=None if lengths is None else jnp.maximum(lengths + above, 0),
            left=left,
            above=0,
        ),
        lse=lse,
    )
    if above < 0:
        out = fill(out, 1, T, front=True)
        return out, None if found is None else fill(found, 2, T, front=True)
    return out[:, above:], None if found is None else found[:, :, above:]


def _top_left(inputs: KernelInputs, *, lse: bool) -> OutAndLse:
    """Calls the kernel; `above` is 0 or None, and each row within its length attends some key."""
    query, key, value, _, _, query_lengths, key_lengths, left, above, scale = inputs
    (B, T, _, _), (_, S, _, h) = query.shape, value.shape
    bias, valid = _added(inputs), None if _dense(inputs) else inputs.conditions.keys
    causal = above is not None
    if causal and S > T:  # causality masks all keys from position T on
        key, value = key[:, :T], value[:, :T]
        bias = None if bias is None else bias[..., :T]
        valid = None if valid is None else valid[:, :T]
        key_lengths = None if key_lengths is None else jnp.minimum(key_lengths, T)
        S = T
    causal = causal and T > 1
    left = left if causal else None
    if valid is not None:
        valid = jnp.broadcast_to(valid, (B, S))
        if causal:
            query, key = _barrier(query, key, valid, scale)
        else:  # without causality, keys can be sorted: valid keys first, so a length suffices
            order = jnp.argsort(~valid, axis=1, stable=True)[..., None, None]
            key, value = (jnp.take_along_axis(x, order, 1) for x in (key, value))
            key_lengths = valid.sum(1, dtype=np.int32)
    if bias is not None:
        rows, columns = (-(-size // BIAS_MULTIPLE) * BIAS_MULTIPLE for size in (T, S))
        bias = jnp.pad(
            bias, ((0, 0), (0, 0), (0, rows - T), (0, columns - S)), constant_values=EXCLUDED
        )
    else:
        # JAX rejects gradients at odd sizes; cuDNN rejects gradients with a single key, and windows
        # with more queries than keys.
        rows, columns = T + T % 2, S + S % 2
        if left is not None:
            columns = max(columns, rows)
    query = fill(query, 1, rows)
    key, value = fill(key, 1, columns), fill(value, 1, columns)
    # Some releases of cuDNN return NaN at sizes that are not multiples of 64, unless lengths are
    # given.
    if (T % 64 or S % 64 or columns > S) and key_lengths is None:
        key_lengths = jnp.full(B, S, np.int32)
    lengths: Others = None
    if key_lengths is not None or query_lengths is not None:
        key_lengths = jnp.full(B, S, np.int32) if key_lengths is None else key_lengths
        key_lengths = jnp.maximum(key_lengths, 1)
        query_lengths = jnp.full(B, T, np.int32) if query_lengths is None else query_lengths
        if left is not None:  # rows from key_lengths + left on attend no valid key
            query_lengths = jnp.minimum(query_lengths, key_lengths + left)
        lengths = query_lengths, key_lengths
    width = -(-max(query.shape[3], h) // 8) * 8
    query, key, value = (fill(x, 3, width) for x in (query, key, value))
    kernel = Kernel(_out, _out_and_lse, True, scale, Settings(scale, causal, left))
    out, found = adapter.call(kernel, query, key, value, bias, lengths, lse=lse)
    return out[:, :T, :, :h], None if found is None else found[:, :, :T]


def _barrier(
    query: Float[jax.Array, "B T N H"],
    key: Float[jax.Array, "B S K H"],
    valid: Bool[jax.Array, "B S"],
    scale: float,
) -> tuple[Float[jax.Array, "B T N H1"], Float[jax.Array, "B S K H1"]]:
    """Appends a feature that pushes the logits of padded keys far below all others."""
    ones = jnp.full((*query.shape[:3], 1), BARRIER if scale > 0 else -BARRIER, query.dtype)
    heights = jnp.where(valid, 0, -BARRIER).astype(key.dtype)[..., None, None]
    heights = jnp.broadcast_to(heights, (*key.shape[:3], 1))
    return jnp.concatenate([query, ones], 3), jnp.concatenate([key, heights], 3)


def _dense(inputs: KernelInputs) -> bool:
    return inputs.bias is not None or inputs.conditions.array is not None


def _added(inputs: KernelInputs) -> Float[jax.Array, "b n T S"] | None:
    """The bias `b n T S` with EXCLUDED in masked pairs; cuDNN broadcasts only b and n."""
    if not _dense(inputs):
        return None
    (_, T, _, _), (_, S, _, _) = inputs.query.shape, inputs.key.shape
    array, valid = inputs.conditions.array, inputs.conditions.keys
    added = jnp.zeros((1, 1, 1, 1), inputs.query.dtype)
    if inputs.bias is not None:
        added = inputs.bias.astype(np.float32)
        held = added - jax.lax.stop_gradient(added) + LOWEST  # value LOWEST, gradient 1
        finite = added != -jnp.inf
        added = jnp.where(added < LOWEST, jnp.where(finite, held, EXCLUDED), added)
        added = added.astype(inputs.query.dtype)
    excluded = jnp.asarray(EXCLUDED, added.dtype)
    for allowed in (array, None if valid is None else valid[:, None, None]):
        if allowed is not None:
            allowed, added = _together(allowed, added)
            added = jnp.where(allowed, added, excluded)
    return jnp.broadcast_to(added, (*added.shape[:2], T, S))


def _together(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = jnp.broadcast_shapes(a.shape, b.shape)
    return jnp.broadcast_to(a, shape), jnp.broadcast_to(b, shape)


def _out(
    settings: Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    lengths: Others,
) -> jax.Array:
    query_lengths, key_lengths = lengths or (None, None)
    out: jax.Array = jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias,
        scale=settings.scale,
        is_causal=settings.causal,
        query_seq_lengths=query_lengths,
        key_value_seq_lengths=key_lengths,
        local_window_size=None if settings.left is None else (settings.left, 0),
        implementation="cudnn",
    )
    return out


def _out_and_lse(
    settings: Settings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    lengths: Others,
) -> tuple[jax.Array, jax.Array]:
    from jax._src.cudnn import fused_attention_stablehlo as private

    query_lengths, key_lengths = lengths or (None, None)
    kinds = private.MaskType
    plain, causal = (
        (kinds.NO_MASK, kinds.CAUSAL) if lengths is None else (kinds.PADDING, kinds.PADDING_CAUSAL)
    )
    out, lse = private.dot_product_attention(
        query,
        key,
        value,
        bias,
        None,
        query_lengths,
        key_lengths,
        scale=settings.scale,
        mask_type=causal if settings.causal else plain,
        sliding_window_length=None if settings.left is None else settings.left + 1,
        return_residual=True,
    )
    return out, lse
