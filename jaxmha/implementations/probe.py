"""Probes a kernel once per process: compiles it, runs it and compares its results with NumPy's."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxmha.implementations.base import Request, Result
from jaxmha.mask import Mask
from jaxmha.semantics import Semantics

# Largest error against float32, relative to the largest value; bfloat16 rounds to 2 ** -8.
ALLOWED = 0.03


_ONE_AT_A_TIME = Lock()


def failure(name: str, attend: Callable[[Request], Result], dtype: str, dense: bool) -> str | None:
    """The reason why a kernel does not work in this or another process, or None; warns once."""
    with _ONE_AT_A_TIME:
        return _failure(name, attend, dtype, dense)


def leaks(name: str, dtype: str) -> bool:
    return False


@cache
def _failure(name: str, attend: Callable[[Request], Result], dtype: str, dense: bool) -> str | None:
    """Probes in a separate thread, where the caller's trace and config contexts do not apply."""
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(_agreed, attend, dtype, dense).result()
    if found is not None:
        kind = f"{dtype}{' with a bias' * dense}"
        warnings.warn(
            f"{name} does not work here in {kind}, so the next implementation is used: {found}",
            RuntimeWarning,
            stacklevel=3,
        )
    return found


def _agreed(attend: Callable[[Request], Result], dtype: str, dense: bool) -> str | None:
    """The reason why the probe fails in this or another process, or None: all processes must run
    the same program, and therefore choose the same implementation."""
    found = _tried(attend, dtype, dense)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        works: Any = multihost_utils.process_allgather(np.asarray(found is None))
        if not np.all(works) and found is None:
            found = f"it fails in process {int(np.argmin(works))}"
    return found


def _tried(attend: Callable[[Request], Result], dtype: str, dense: bool) -> str | None:
    request, cotangent = _problem(dtype, dense)

    def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
        def out(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
            return attend(request._replace(query=query, key=key, value=value)).out

        *heads, d_out = operands
        found, pull = jax.vjp(out, *heads)
        return found, *pull(d_out)

    try:
        found = jax.jit(run)(*request[:3], cotangent)
        expected = _expected(request, cotangent)
        for what, x, y in zip(("output", "query", "key", "value"), found, expected, strict=True):
            error = np.abs(np.asarray(x, np.float32) - y).max() / np.abs(y).max()
            if not error <= ALLOWED:  # also true if error is NaN
                gradient = "" if what == "output" else "the gradient of "
                return f"{gradient}{what} is wrong by {error:.1e} of the largest value"
    except Exception as error:  # noqa: BLE001  drivers and compilers raise any
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
    return None


def _problem(dtype: str, dense: bool) -> tuple[Request, Float[jax.Array, "B T N H"]]:
    """A causal request with grouped heads and lengths (two batch rows of 128 positions), and an
    output cotangent."""
    rng = np.random.default_rng(0)
    B, T, N, K, H = 2, 128, 2, 1, 64

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    heads = normal(B, T, N, H), normal(B, T, K, H), normal(B, T, K, H)
    mask = Mask.causal() & Mask.lengths(key_value=jnp.asarray([T, T // 2], np.int32))
    bias = normal(1, N, T, T) if dense else None
    return Request(*heads, bias, mask, Semantics(), None, False), normal(B, T, N, H)


def _expected(
    request: Request, cotangent: Float[jax.Array, "B T N H"]
) -> tuple[np.ndarray[Any, np.dtype[np.float32]], ...]:
    """Output and gradients, computed in NumPy."""
    heads = (np.asarray(x, np.float32) for x in (*request[:3], cotangent))
    query, key, value, d_out = (np.moveaxis(x, 2, 1) for x in heads)
    scale = query.shape[3] ** -0.5
    logits = scale * query @ np.swapaxes(key, 2, 3)
    if request.bias is not None:
        logits += np.asarray(request.bias, np.float32)
    T = query.shape[2]
    allowed = np.arange(T)[:, None] >= np.arange(T)
    lengths = np.asarray(request.mask.key_value_lengths)[:, None, None, None]
    logits = np.where(allowed & (np.arange(T) < lengths), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = weights @ value
    d_logits = d_out @ np.swapaxes(value, 2, 3) - (d_out * out).sum(-1, keepdims=True)
    d_logits *= weights * scale
    transposed = np.swapaxes(d_logits, 2, 3) @ query, np.swapaxes(weights, 2, 3) @ d_out
    d_key, d_value = (x.sum(1, keepdims=True) for x in transposed)
    return tuple(np.moveaxis(x, 1, 2) for x in (out, d_logits @ key, d_key, d_value))
