"""Attention by the native kernels: online softmax over blocks of keys, and its gradients.

Logits, row max and row sum are stored as float32. The backward pass recomputes weights from row max
and row sum, by matmuls that round like those of the forward pass: exp magnifies a difference of
logits.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

from jaxmha import sharding
from jaxmha.implementations import fully_masked, platforms, varying
from jaxmha.implementations.base import Request, Result
from jaxmha.implementations.mods import bias_of_distances
from jaxmha.implementations.native import library, masked, operands, primitives
from jaxmha.implementations.native.operands import Problem, Residuals, Settings, absent
from jaxmha.implementations.tiled import block_mask

DTYPES = ("float32", "bfloat16", "float16")
# The reasons why native kernels cannot compute a request, also listed in docs/pages/how_to/native.md;
# `{}` stands for the value that came.
DECLINED: dict[str, str] = {
    "platform": "it runs on CPU, not on {}",
    "processes": "jaxmha-cpu may be missing in another process of this program",
    "devices": "XLA may partition the call: name the mesh axes with jaxmha.sharding.use",
    "sizes": "sizes must be known",
    "dtype": f"it takes {', '.join(DTYPES)}, got {{}}",
    "return_weights": "weights are never materialised: return_weights must be False",
    "dropout": "it has no dropout",
    "score_mod": "of functions of scores, it takes those that add a function of n and j - i",
    "several": "it takes one of a bias, a score_mod and a mask_mod",
    "softmax_dtype": "softmax is in float32: softmax_dtype must be None or float32",
    "segments": "segment ids must fit int32, got {}",
}


def unsupported_reason(request: Request) -> str | None:
    """Returns None if this implementation supports the request, else the reason why not."""
    return unavailable() or _declined(request)


def unavailable() -> str | None:
    """Returns None if native kernels can run in this process, on the current platform and mesh, else
    the reason why not; a request may still be declined."""
    platform = platforms.current()
    if platform.name != "cpu":
        return DECLINED["platform"].format(platform.device)
    if jax.process_count() > 1:
        return DECLINED["processes"]
    if jax.device_count() > 1 and not in_shard_map():
        return DECLINED["devices"]
    return library.unavailable()


def in_shard_map() -> bool:
    """True within a `shard_map`, and under `jaxmha.sharding.use`, which adds one. Where XLA may still
    partition a call, over mesh axes that are not mapped, plain XLA replaces the kernels at lowering
    (`registration.may_move`)."""
    manual = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
    return manual or sharding.current() is not None


def _declined(request: Request) -> str | None:
    semantics, dtype = request.semantics, request.query.dtype
    shapes = (*request.query.shape, *request.key.shape, *request.value.shape)
    if not all(isinstance(size, int) for size in shapes):
        return DECLINED["sizes"]
    if dtype.name not in DTYPES:
        return DECLINED["dtype"].format(dtype.name)
    if request.return_weights:
        return DECLINED["return_weights"]
    if request.drops:
        return DECLINED["dropout"]
    if request.score_mod is not None and not request.score_mod.program.adds_bias:
        return DECLINED["score_mod"]
    biases = [request.bias, request.score_mod]
    if sum(x is not None for x in [*biases, request.mask_mod]) > 1:
        return DECLINED["several"]
    if semantics.softmax_dtype not in (None, np.dtype(np.float32)):
        return DECLINED["softmax_dtype"]
    ids = request.mask.query_segments
    if ids is not None and ids.dtype != np.int32:
        return DECLINED["segments"].format(ids.dtype)
    return None


def attend(request: Request) -> Result:
    """Computes the request; sums are at least float32."""
    query, key, value = request[:3]
    semantics = request.semantics
    (B, T, N, _), (_, S, _, h) = query.shape, value.shape
    reads_lse = request.return_lse or semantics.fully_masked != "zero"
    out: jax.Array
    lse: jax.Array | None
    if 0 in (B, N, T, S, h):
        out, lse = jnp.zeros((B, T, N, h), query.dtype), jnp.full((B, N, T), -jnp.inf, np.float32)
    else:
        conditions = block_mask.from_mask(request.mask, T, S, request.mask_mod)
        settings = Settings(
            request.scale,
            semantics.logits_soft_cap,
            *operands.bounds(conditions),
            np.dtype(query.dtype),
        )
        if conditions.mod is not None:
            out, lse = masked.attend(settings, query, key, value, conditions)
        else:
            bias = None if request.bias is None else request.bias.astype(np.float32)
            if request.score_mod is not None:
                bias = bias_of_distances(request.score_mod, (B, N, T, S), np.dtype(np.float32))
            problem = operands.problem(query, key, value, bias, conditions)
            out, lse = core(settings, reads_lse, *varying.alike(tuple(problem)))
    if semantics.fully_masked != "zero":
        assert lse is not None
        out = fully_masked.apply(request, out, jnp.swapaxes(lse == -jnp.inf, 1, 2))
    return Result(out, None, lse)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def core(settings: Settings, reads_lse: bool, *problem: Any) -> tuple[jax.Array, Any]:
    """Output `B T N h`, and lse `B N T`, which is -inf on fully masked rows (None unless
    `reads_lse`). `problem`: the fields of `Problem`, with one batch axis."""
    out, *row = primitives.attend(settings, Problem(*problem))
    return out, operands.lse(settings, Problem(*problem), *row) if reads_lse else None


def _forward(settings: Settings, reads_lse: bool, *problem: Any) -> Any:
    # Saved in float32 for the backward pass, which may compute delta from the output (the row sum
    # of out * d_out): an error of delta is an error of the gradients of all logits of the row.
    wide = settings._replace(out=np.dtype(np.float32), gradient=True)
    out, *row = primitives.attend(wide, Problem(*problem))
    out = checkpoint_name(out, "attention_out")  # type: ignore[no-untyped-call]
    row = [checkpoint_name(x, "attention_lse") for x in row]  # type: ignore[no-untyped-call]
    lse = operands.lse(settings, Problem(*problem), *row) if reads_lse else None
    return (out.astype(settings.out), lse), (problem, out, row)


def _backward(settings: Settings, reads_lse: bool, saved: Any, cotangents: Any) -> Any:
    arrays, out, row = saved
    d_out, d_lse = cotangents
    problem = Problem(*arrays)
    row_max, row_sum = row
    d_lse = d_lse if reads_lse else absent(np.float32)
    residuals = Residuals(row_max, row_sum, d_out, d_lse)
    *heads, delta = primitives.attend_backward(settings, problem, residuals, out)
    d_bias = None
    if problem.bias.size:
        d_bias = primitives.bias_gradient(settings, problem, residuals, delta)
    return *heads, d_bias, *[None] * (len(arrays) - 4)


core.defvjp(_forward, _backward)
