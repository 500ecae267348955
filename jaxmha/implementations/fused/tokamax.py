"""tokamax's Mosaic and Triton kernels: NVIDIA GPUs, where the package is installed.

They read biases and masks by tiles, without broadcasting these to B N T S, and h may differ from H.
Source: `tokamax.dot_product_attention` 0.0.17, whose public function returns no log-sum-exp.
"""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmha.implementations import platforms
from jaxmha.implementations.base import EVERYTHING_LEAKS, Leaks, Request, Result
from jaxmha.implementations.fused import adapter
from jaxmha.implementations.fused.adapter import SEGMENTS, KernelInputs

# tokamax's backends in order of preference; it runs the first that supports the call.
BACKENDS: tuple[str, ...] = ("mosaic", "triton")
# The backends on GPUs older than Hopper, where Mosaic kernels have no gradient.
BEFORE_HOPPER: tuple[str, ...] = ("triton",)
# Maximum number of pairs of a dense mask that is computed from segment ids: 1 GiB.
MOST_PAIRS = 2**30
# Mosaic kernels load only whole tiles of TILE rows and columns of a bias or mask that has both
# axes, so that T and S are padded to multiples of it then.
TILE = 64
# Replaces -inf in a bias, because -inf gives NaN in fully masked rows. It excludes a pair only if
# another entry of the row is far above it.
EXCLUDED = -(2.0**41)


def unsupported_reason(request: Request) -> str | None:
    """Returns None if this implementation supports the request, else the reason why not."""
    if find_spec("tokamax") is None:
        return "tokamax is not installed"
    reason = adapter.unsupported(request, name="tokamax", dtypes=("bfloat16", "float16"))
    if reason:
        return reason
    platform = platforms.current()
    if platform.capability is None or platform.capability < (8, 0):
        return f"tokamax needs a GPU of compute capability 8.0 or higher, got {platform.device}"
    mask, semantics = request.mask, request.semantics
    if jax.config.jax_numpy_dtype_promotion == "strict":  # type: ignore[attr-defined]
        return "tokamax relies on the promotion of dtypes, which jax_numpy_dtype_promotion forbids"
    if request.return_lse:
        return "tokamax returns no log-sum-exp"
    if semantics.logits_soft_cap is not None and request.bias is not None:
        return "tokamax caps logits after the bias"
    (B, T, _, _), S = request.query.shape, request.key.shape[1]
    if mask.query_segments is not None and B * T * S > MOST_PAIRS:
        return f"tokamax takes segments as a dense mask, of at most {MOST_PAIRS} pairs"
    if mask.causal_offset is not None and not isinstance(mask.causal_offset, int):
        return "the causal offset must be a Python integer"
    return None


def traceable() -> str | None:
    """The reason why this machine cannot trace tokamax, or None."""
    if jax.default_backend() != "gpu":
        return "tokamax reads the GPU of this machine while it traces, and there is none"
    return None


def attend(request: Request, *, leaks: Leaks = EVERYTHING_LEAKS) -> Result:
    """Computes the request in its own dtype; softmax and sums are float32.

    `leaks`: which unattended keys and values affect the results in this release of tokamax, because
    it multiplies them by weights of 0, and 0 * NaN is NaN. With a bias, key padding or segments,
    all unattended keys and values are zeroed instead.
    """
    cap, mask = request.semantics.logits_soft_cap, request.mask
    # `leaks` is what the probe measured, mostly in calls without a dense mask. It is not known to hold
    # with a bias (NaN plus a bias is NaN), nor with key padding or segments, which become a dense
    # mask here. All unattended keys and values are zeroed then.
    unknown = request.bias, mask.key_value_padding, mask.query_segments
    if any(x is not None for x in unknown):
        leaks = EVERYTHING_LEAKS
    if mask.query_segments is not None and mask.key_value_segments is not None:
        queries, keys = (jnp.asarray(x) for x in (mask.query_segments, mask.key_value_segments))
        rest = replace(mask, **dict.fromkeys(SEGMENTS))
        request = request._replace(mask=rest & (queries[:, None, :, None] == keys[:, None, None]))
    return adapter.attend(request, lambda inputs: (_run(inputs, cap), None), leaks=leaks)


def _backends() -> tuple[str, ...]:
    capability = platforms.current().capability
    return BEFORE_HOPPER if capability is not None and capability < (9, 0) else BACKENDS


def _run(inputs: KernelInputs, soft_cap: float | None) -> jax.Array:
    import tokamax  # type: ignore[import-not-found,unused-ignore]

    (B, T, _, _), (_, S, _, _) = inputs.query.shape, inputs.key.shape
    left, above = inputs.left, inputs.above
    mask = inputs.conditions.array
    if inputs.conditions.keys is not None:
        keys = inputs.conditions.keys[:, None, None]
        mask = keys if mask is None else mask & keys
    # Next to a mask, causality is given as a window: with `is_causal`, tokamax subtracts the row
    # max from -inf before masking, and so has NaN gradients in rows that the mask and causality
    # together mask fully.
    is_causal = above == 0 and left is None and mask is None
    window = None
    if not is_causal and (left, above) != (None, None):
        window = (T if left is None else left, S if above is None else above)
    bias, lengths = None if inputs.bias is None else _finite(inputs.bias), inputs.key_lengths
    query, key, value = inputs.query, inputs.key, inputs.value
    if any(x is not None and x.shape[2] > 1 and x.shape[3] > 1 for x in (bias, mask)):
        query, bias, mask = (_whole(query, 1), _whole(bias, 2), _whole(mask, 2))
        key, value, bias, mask = (
            _whole(x, a) for x, a in ((key, 1), (value, 1), (bias, 3), (mask, 3))
        )
        if key.shape[1] > S and lengths is None:
            lengths = jnp.full(B, S, np.int32)
    out: jax.Array = tokamax.dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        scale=inputs.scale,
        is_causal=is_causal,
        key_value_seq_lengths=lengths,
        local_window_size=window,
        logits_soft_cap=soft_cap,
        implementation=_backends(),
    )
    return out[:, :T]


def _whole(x: jax.Array | None, axis: int) -> Any:
    """Pads an axis with zeros to a multiple of TILE, unless it has size 1 or `x` is None."""
    if x is None or x.shape[axis] == 1:
        return x
    return adapter.fill(x, axis, -(-x.shape[axis] // TILE) * TILE)


def _finite(bias: Float[jax.Array, "b n t s"]) -> Float[jax.Array, "b n t s"]:
    wide = bias.astype(np.float32) if bias.dtype == np.float16 else bias
    return jnp.where(wide == -jnp.inf, jnp.asarray(EXCLUDED, wide.dtype), wide)
