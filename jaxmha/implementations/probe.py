"""Probes a kernel on this machine, once: compiles it, runs it and compares the results."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
    """All processes run the same program, so they must agree on the choice."""
    found = _tried(attend, dtype, dense)
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        works: Any = multihost_utils.process_allgather(np.asarray(found is None))
        if not np.all(works) and found is None:
            found = f"it fails in process {int(np.argmin(works))}"
    return found


def _tried(attend: Callable[[Request], Result], dtype: str, dense: bool) -> str | None:
    request, slope = _problem(dtype, dense)

    def run(query: Any, key: Any, value: Any, slope: Any) -> Any:
        def out(*heads: Any) -> Any:
            return attend(request._replace(query=heads[0], key=heads[1], value=heads[2])).out

        found, pull = jax.vjp(out, query, key, value)
        return found, *pull(slope)

    try:
        found = jax.jit(run)(*request[:3], slope)
        expected = _expected(request, slope)
        for what, x, y in zip(("output", "query", "key", "value"), found, expected, strict=True):
            error = np.abs(np.asarray(x, np.float32) - y).max() / np.abs(y).max()
            if not error <= ALLOWED:  # NaN as well
                gradient = "" if what == "output" else "the gradient of "
                return f"{gradient}{what} is wrong by {error:.1e} of the largest value"
    except Exception as error:  # noqa: BLE001  whatever a driver or a compiler raises
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
    return None


def _problem(dtype: str, dense: bool) -> tuple[Request, Any]:
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


def _expected(request: Request, slope: Any) -> tuple[Any, ...]:
    """Output and gradients, written out in NumPy."""
    heads = (np.asarray(x, np.float32) for x in (*request[:3], slope))
    query, key, value, slope = (np.moveaxis(x, 2, 1) for x in heads)
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
    slopes = slope @ np.swapaxes(value, 2, 3) - (slope * out).sum(-1, keepdims=True)
    slopes *= weights * scale
    transposed = np.swapaxes(slopes, 2, 3) @ query, np.swapaxes(weights, 2, 3) @ slope
    key_slope, value_slope = (x.sum(1, keepdims=True) for x in transposed)
    return tuple(np.moveaxis(x, 1, 2) for x in (out, slopes @ key, key_slope, value_slope))
