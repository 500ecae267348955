"""cuDNN's fused attention in bfloat16 and float16 on NVIDIA GPUs, called through JAX."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int32

from jaxmha.implementations import platforms, probe, probe_cases
from jaxmha.implementations.base import EVERYTHING_LEAKS, Leaks, Request, Result
from jaxmha.implementations.fused import (
    adapter,
    cudnn_chunk,
    cudnn_kernel,
    cudnn_packed,
    cudnn_padding,
)
from jaxmha.implementations.fused.adapter import (
    SEGMENTS,
    Kernel,
    KernelInputs,
    Others,
    OutAndLse,
    fill,
)
from jaxmha.implementations.fused.cudnn_chunk import Chunk
from jaxmha.implementations.fused.cudnn_kernel import EXCLUDED, Settings

# Unequal features (H, h) of query and value heads, as in latent attention, that need no padding to
# one size on Hopper and later GPUs with cuDNN 9.10 or later.
UNEQUAL = ((192, 128),)
# With 2 to FEW_QUERIES queries, without bounds, bias and dense mask, the query heads of a group
# become rows of their key head (`_grouped`). On an H100 that takes 0.57 of the time without it for
# 2 to 16 queries over 8192 keys, 0.86 for 64, and 1.23 for 127 (N = 64, K = 8).
FEW_QUERIES = 64
# Finite entries of a bias are clipped to at least LOWEST, which is far above EXCLUDED, the entry of
# excluded pairs. cuDNN computes in base 2: in a row whose entries are all the lowest bfloat16,
# float32 overflows and the output is wrong (by 0.12 of the largest value on an H100, cuDNN 9.19).
LOWEST = -(2.0**40)
# Under key padding with bounds, one more feature excludes invalid keys where `_has_barrier` allows
# it. It is BARRIER in queries (-BARRIER if the scale is not positive), -BARRIER in invalid keys and
# 0 in valid ones, and so adds -abs(scale) * BARRIER**2 to the logits of invalid keys. BARRIER fits
# float16.
BARRIER = 2.0**15


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
    most = _most_features()
    left, above = adapter.diagonals(mask, T, S)
    barrier = mask.key_value_padding is not None and (left, above) != (None, None)
    dense = adapter.is_dense(request) or (barrier and not _has_barrier(H, request.scale))
    if semantics.logits_soft_cap is not None:
        return "cuDNN has no soft cap"
    if max(H, h) > most:
        return f"heads must have at most {most} features on {platform.device}, got {H}, {h}"
    if mask.causal_offset is not None and not isinstance(mask.causal_offset, int):
        return "the causal offset must be a Python integer"
    if mask.query_segments is not None:
        return _packed_reason(request)
    if left is not None and above is None:
        return "a window must have a right side (or be causal)"
    if dense and request.query.dtype != jnp.bfloat16:
        return f"{request.query.dtype} has no number far below every bias"
    if request.bias is not None and request.return_lse:
        return "cuDNN has no gradient from the log-sum-exp to a bias"
    return None


def _packed_reason(request: Request) -> str | None:
    """The reason why cuDNN cannot compute a request whose mask has segments; None: it can."""
    mask, (B, T, N, H) = request.mask, request.query.shape
    capability = platforms.current().capability
    given = replace(mask, **dict.fromkeys(SEGMENTS), causal_offset=None, window_size=None)
    if mask.packed_ends is None:
        return (
            "cuDNN takes packed sequences as offsets: give Mask.packed, NumPy ids, or max_segments to "
            "Mask.segments"
        )
    if capability is None or capability < (9, 0):
        return "cuDNN takes packed sequences on Hopper and later only"
    if not given.empty or request.bias is not None or request.return_lse:
        return "cuDNN takes packed sequences without other masks, bias and log-sum-exp"
    if adapter.diagonals(mask, T, T) not in ((None, None), (None, 0)):
        return "cuDNN takes packed sequences without a window, full or causal"
    if request.key.shape[1] != T or request.value.shape[3] != H or H % 8:
        return "cuDNN takes packed sequences where T is S, and heads have h = H, a multiple of 8"
    if B * T * N * H >= 2**31:
        return "the offsets of packed sequences must be below 2**31"
    return cudnn_packed.unknown()


def _most_features() -> int:
    capability = platforms.current().capability
    return 256 if capability is not None and capability >= (9, 0) else 128


def _takes_unequal_heads(H: int, h: int) -> bool:
    """True if H and h differ and cuDNN takes them so, without padding. False if H = h."""
    from jax._src.cudnn import fused_attention_stablehlo as private

    capability = platforms.current().capability
    if (H, h) not in UNEQUAL or capability is None or capability < (9, 0):
        return False
    return bool(private.check_cudnn_version() >= 91000)  # type: ignore[no-untyped-call]


def _has_barrier(H: int, scale: float) -> bool:
    """True if one more feature of BARRIER can exclude padded keys: H + 1 features are possible, and
    it lowers logits by at least 2**14. Otherwise a bias must exclude them."""
    return _most_features() > H and abs(scale) * BARRIER**2 >= 2.0**14


def traceable() -> str | None:
    """The reason why JAX cannot trace a call of cuDNN on this machine, or None."""
    from jax._src.cudnn import fused_attention_stablehlo as private

    try:
        private.check_cudnn_version()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return f"JAX reads the version of cuDNN on this machine while it traces: {error}"
    return None


def attend(request: Request, *, leaks: Leaks = Leaks(), in_place: bool | None = None) -> Result:
    """Computes the request in its own dtype; softmax and sums are float32.

    `leaks`: which keys and values beyond the lengths affect the results in this release of cuDNN.
    `in_place`: True to read the valid keys of key padding without bounds in place, False to copy
    them to the front. None: True if `_leaks_in_place` returns leaks, which then replace `leaks`.
    """
    ends = request.mask.packed_ends
    if ends is not None:
        B, T = request.query.shape[:2]
        causal = adapter.diagonals(request.mask, T, T) == (None, 0)
        ends = jnp.broadcast_to(jnp.asarray(ends, np.int32), (B, ends.shape[-1]))
        settings = Settings(request.scale, causal, None)
        heads = request.query, request.key, request.value
        return Result(cudnn_packed.out(settings, *heads, ends), None, None)
    if in_place is None:
        leaks_in_place = _leaks_in_place(request)
        in_place = leaks_in_place is not None
        leaks = leaks if leaks_in_place is None else leaks_in_place
    # The gradient of lse calls the kernel with keys in place of values, so that if NaN in values
    # reaches gradients, NaN in keys does too.
    if request.return_lse and leaks.gradients:
        leaks = leaks._replace(gradients=EVERYTHING_LEAKS.gradients)
    run = partial(_run, lse=request.return_lse, in_place=in_place)
    # `leaks` holds only where lengths and bounds alone exclude keys. A bias or BARRIER may exclude
    # them elsewhere, and NaN plus either is NaN, so that all unattended keys and values are zeroed.
    return adapter.attend(request, run, beyond_lengths=leaks)


def _leaks_in_place(request: Request) -> Leaks | None:
    """The leaks of the kernel that reads valid keys in place, none of which affect the output.

    They are those that its probe found, or `Leaks()` without a device to probe. Returns None, so
    that valid keys are copied to the front, if the kernel cannot compute the request, fails its
    probe, or lets invalid keys or values affect the output.
    """
    if cudnn_padding.unsupported_reason(request):
        return None
    kind = probe_cases.kind_of(request)._replace(padded=True, queries=probe_cases.MANY)
    if platforms.current().present:
        alone = partial(attend, in_place=True)
        if probe.failure(cudnn_padding.NAME, alone, unsupported_reason, kind) is not None:
            return None
    found = probe.leaks(cudnn_padding.NAME, kind)
    return None if found.output else found


def _run(inputs: KernelInputs, *, lse: bool, in_place: bool) -> OutAndLse:
    """Output and lse (None if `lse` is False) of a call with any bound `above`, although cuDNN's
    causal mask has the offset 0. `in_place`: as in `attend`, not None."""
    above, left = inputs.above, inputs.left
    (T, N), K = inputs.query.shape[1:3], inputs.key.shape[2]
    if above is left is None and 1 < T <= FEW_QUERIES and K < N and not _dense(inputs):
        return _grouped(inputs, lse=lse, in_place=in_place)
    if not above:
        return _top_left(inputs, lse=lse, in_place=in_place)
    by_lengths = left is None and inputs.conditions.keys is None and not _dense(inputs)
    if above >= T and by_lengths and not lse:
        chunk = Chunk(above, inputs.scale, _out_and_lse, _out_of_shifted)
        lengths = inputs.query_lengths, inputs.key_lengths
        return cudnn_chunk.out(chunk, *inputs[:3], lengths), None
    return _shifted(inputs, lse=lse, in_place=in_place)


def _shifted(inputs: KernelInputs, *, lse: bool, in_place: bool) -> OutAndLse:
    """Computes a call whose `above` is not 0 as one with `above` = 0: pads `above` queries in front
    if it is positive, else drops the first -`above` queries, which attend no key."""
    above, left = inputs.above, inputs.left
    assert above is not None
    query, lengths = inputs.query, inputs.query_lengths
    (B, T, N, _), h = query.shape, inputs.value.shape[3]
    left = None if left is None else left + above
    # Every row is fully masked: `adapter.attend` replaces the lse of such rows by -inf.
    if T + above <= 0 or (left is not None and left < 0):
        found = jnp.zeros((B, N, T), np.float32) if lse else None
        return jnp.zeros((B, T, N, h), query.dtype), found
    bias = inputs.bias
    conditions = inputs.conditions
    array = conditions.array

    def shifted(x: jax.Array, axis: int) -> jax.Array:
        if axis == 2 and x.shape[axis] == 1:  # a bias or mask that is the same for all queries
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
        in_place=in_place,
    )
    if above < 0:
        out = fill(out, 1, T, front=True)
        return out, None if found is None else fill(found, 2, T, front=True)
    return out[:, above:], None if found is None else found[:, :, above:]


def _out_of_shifted(inputs: KernelInputs) -> Float[jax.Array, "B T N h"]:
    return _shifted(inputs, lse=False, in_place=False)[0]


def _out_and_lse(inputs: KernelInputs) -> OutAndLse:
    return _run(inputs, lse=True, in_place=False)


def _grouped(inputs: KernelInputs, *, lse: bool, in_place: bool) -> OutAndLse:
    """Computes the G query heads of each key head as one head of T * G queries, which is right
    since without bounds all queries attend the same keys.

    With few queries, separate heads would fill only a part of a tile each, and read all keys again.
    """
    query, lengths = inputs.query, inputs.query_lengths
    (B, T, N, H), K = query.shape, inputs.key.shape[2]
    G = N // K
    rows = jnp.swapaxes(query.reshape(B, T, K, G, H), 2, 3).reshape(B, T * G, K, H)
    lengths = None if lengths is None else lengths * G
    given = inputs._replace(query=rows, query_lengths=lengths)
    out, found = _top_left(given, lse=lse, in_place=in_place)
    out = jnp.swapaxes(out.reshape(B, T, G, K, -1), 2, 3).reshape(B, T, N, -1)
    if found is not None:
        found = jnp.moveaxis(found.reshape(B, K, T, G), 3, 2).reshape(B, N, T)
    return out, found


def _top_left(inputs: KernelInputs, *, lse: bool, in_place: bool) -> OutAndLse:
    """Computes a call whose `above` is 0 or None: changes keys, lengths, key padding and features
    to such as cuDNN takes, and drops the features that it has added from the output."""
    query, key, value, _, _, query_lengths, key_lengths, left, above, scale = inputs
    (B, T, _, _), (_, S, _, h) = query.shape, value.shape
    dense = _dense(inputs)
    bias, valid = (_added(inputs), None) if dense else (None, inputs.conditions.keys)
    causal = above is not None
    if causal and S > T:  # drops keys from position T on, all of which causality masks
        key, value = key[:, :T], value[:, :T]
        bias = None if bias is None else bias[..., :T]
        valid = None if valid is None else valid[:, :T]
        key_lengths = None if key_lengths is None else jnp.minimum(key_lengths, T)
        S = T
    causal = causal and T > 1
    left = left if causal else None
    if left is not None and T > S:  # pads keys: cuDNN rejects windows with more queries than keys
        key_lengths = jnp.full(B, S, np.int32) if key_lengths is None else key_lengths
        key, value = fill(key, 1, T), fill(value, 1, T)
        valid = None if valid is None else fill(valid, 1, T)
    lengths: Others = None
    if query_lengths is not None or key_lengths is not None:
        lengths = _nonempty(query_lengths, key_lengths, (B, T, S), causal=causal, left=left)
    if valid is not None and causal:
        query, key = _barrier(query, key, valid, scale)
    elif valid is not None:  # not causal: valid keys may move to the front, where a length suffices
        valid = jnp.broadcast_to(valid, (B, S))
        lengths = cudnn_padding.counts(valid, query_lengths, T)
        if in_place:
            full = Settings(scale, False, None)
            return cudnn_padding.in_place(full, query, key, value, valid, lengths), None
        key, value = cudnn_padding.valid_first((key, value), valid)
    width = -(-max(query.shape[3], h) // 8) * 8
    if not _takes_unequal_heads(query.shape[3], h):
        query, key, value = (fill(x, 3, width) for x in (query, key, value))
    settings = Settings(scale, causal, left, inputs.bias is not None)
    kernel = Kernel(cudnn_kernel.out, cudnn_kernel.out_and_lse, True, scale, settings)
    out, found = adapter.call(kernel, query, key, value, bias, lengths, lse=lse)
    return out[..., :h], found


def _nonempty(
    queries: Int32[jax.Array, "B"] | None,
    keys: Int32[jax.Array, "B"] | None,
    sizes: tuple[int, int, int],
    *,
    causal: bool,
    left: int | None,
) -> tuple[Int32[jax.Array, "B"], Int32[jax.Array, "B"]]:
    """Lengths of queries and keys, shortened until every query within them attends a key and every
    key within them is attended: cuDNN's output is undefined in rows without keys, but 0 beyond the
    length. `queries`, `keys`: the lengths before, or None: T or S. `sizes`: B, T and S."""
    B, T, S = sizes
    queries = jnp.full(B, T, np.int32) if queries is None else queries
    if keys is None:
        keys = jnp.full(B, S, np.int32)
    else:
        queries = jnp.where(keys > 0, queries, 0)
    if left is not None:  # row i attends no valid key if i >= (number of valid keys) + left
        queries = jnp.minimum(queries, keys + left)
    if causal:
        keys = jnp.minimum(keys, queries)
    return queries, jnp.where(queries > 0, keys, 0)


def _barrier(
    query: Float[jax.Array, "B T N H"],
    key: Float[jax.Array, "B S K H"],
    valid: Bool[jax.Array, "#B S"],
    scale: float,
) -> tuple[Float[jax.Array, "B T N H1"], Float[jax.Array, "B S K H1"]]:
    """Appends to queries and keys a feature that adds -abs(scale) * BARRIER**2 to the logits of
    keys where `valid` is False, and 0 to all others."""
    ones = jnp.full((*query.shape[:3], 1), BARRIER if scale > 0 else -BARRIER, query.dtype)
    heights = jnp.where(valid, 0, -BARRIER).astype(key.dtype)[..., None, None]
    heights = jnp.broadcast_to(heights, (*key.shape[:3], 1))
    return jnp.concatenate([query, ones], 3), jnp.concatenate([key, heights], 3)


def _dense(inputs: KernelInputs) -> bool:
    """True if cuDNN gets a bias: that of the request, or one for a dense mask, or one for key
    padding with bounds where no feature of BARRIER is possible."""
    bounded = (inputs.left, inputs.above) != (None, None)
    excludes = inputs.conditions.keys is not None and bounded
    return (
        inputs.bias is not None
        or inputs.conditions.array is not None
        or (excludes and not _has_barrier(inputs.query.shape[3], inputs.scale))
    )


def _added(inputs: KernelInputs) -> Float[jax.Array, "b n T S"]:
    """The bias (zeros if there is none), at least LOWEST, but EXCLUDED where it is -inf and in
    pairs that dense mask or key padding mask. cuDNN masks by lengths and bounds itself. The result
    has full axes T and S, since cuDNN broadcasts only b and n."""
    (_, T, _, _), (_, S, _, _) = inputs.query.shape, inputs.key.shape
    array, valid = inputs.conditions.array, inputs.conditions.keys
    added = jnp.zeros((1, 1, 1, 1), inputs.query.dtype)
    if inputs.bias is not None:
        added = inputs.bias.astype(np.float32)
        # Clipped entries have the value LOWEST and still the gradient 1.
        held = added - jax.lax.stop_gradient(added) + LOWEST
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
