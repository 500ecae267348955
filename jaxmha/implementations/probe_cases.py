"""The calls with which a probe tests a kernel, and their expected results, computed in NumPy."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.implementations.base import Request
from jaxmha.mask import Mask
from jaxmha.semantics import Semantics

Wide = np.ndarray[Any, np.dtype[np.float32]]


class Case(NamedTuple):
    """One call of a kernel.

    Attributes:
      name: the name of the case in messages.
      request: the call.
      cotangents: cotangents of output and lse.
      clean: query, key, value and cotangents in float32, with 0 in place of NaN.
      poisoned: whether keys and values beyond the lengths are NaN, which the kernel must not read.
    """

    name: str
    request: Request
    cotangents: tuple[jax.Array, jax.Array]
    clean: tuple[Wide, ...]
    poisoned: bool

    def expected(self) -> dict[str, Wide]:
        """Name -> expected output, lse or gradient, computed in NumPy."""
        query, key, value, d_out, d_lse = self.clean
        group = query.shape[2] // key.shape[2]
        q, k, v, d_out = (np.moveaxis(x, 2, 1) for x in (query, key, value, d_out))
        k, v = (np.repeat(x, group, 1) for x in (k, v))
        scale = q.shape[3] ** -0.5
        logits = scale * q @ np.swapaxes(k, 2, 3)
        if self.request.bias is not None:
            logits = logits + np.asarray(self.request.bias, np.float32)
        T, S = logits.shape[2:]
        logits = np.where(np.asarray(self.request.mask.to_array(T, S)), logits, -np.inf)
        most = logits.max(-1, keepdims=True)
        weights = np.exp(logits - np.where(np.isfinite(most), most, 0))
        sums = weights.sum(-1, keepdims=True)
        weights = weights / np.where(sums, sums, 1)
        out = weights @ v
        with np.errstate(divide="ignore"):
            lse = (np.where(np.isfinite(most), most, 0) + np.log(sums))[..., 0]
        d_logits = d_out @ np.swapaxes(v, 2, 3) - (d_out * out).sum(-1, keepdims=True)
        if self.request.return_lse:
            d_logits = d_logits + d_lse[..., None]
        d_logits = d_logits * weights * scale
        transposed = np.swapaxes(d_logits, 2, 3) @ q, np.swapaxes(weights, 2, 3) @ d_out
        B, N, _, H = k.shape
        d_key, d_value = (
            np.moveaxis(x.reshape(B, N // group, group, S, H).sum(2), 1, 2) for x in transposed
        )
        found = {"output": np.moveaxis(out, 1, 2)}
        found |= {"the log-sum-exp": lse} if self.request.return_lse else {}
        found["the gradient of query"] = np.moveaxis(d_logits @ k, 1, 2)
        return found | {"the gradient of key": d_key, "the gradient of value": d_value}


def cases(dtype: str, dense: bool) -> Iterator[Case]:
    """The cases of a probe. If `dense`: one causal call with a bias. Otherwise: calls with lengths,
    log-sum-exp, one query, odd sizes and a window. Where lengths are given, one sequence is full,
    one is shorter and one is empty; keys and values beyond the lengths are NaN."""
    lengths = np.asarray([128, 61, 0], np.int32)
    causal = Mask.causal() & Mask.lengths(key_value=lengths)
    if dense:
        yield _case("causal, with a bias and lengths", dtype, causal, bias=True)
        return
    yield _case("causal, with lengths", dtype, causal)
    yield _case("with lengths and log-sum-exp", dtype, Mask.lengths(key_value=lengths), lse=True)
    yield _case("one query", dtype, Mask.lengths(key_value=lengths), T=1)
    yield _case("odd sizes", dtype, Mask(), T=37, S=37)
    yield _case("a window", dtype, Mask.window(16, 0))


def _case(
    name: str,
    dtype: str,
    mask: Mask,
    *,
    T: int = 128,
    S: int = 128,
    lse: bool = False,
    bias: bool = False,
) -> Case:
    rng = np.random.default_rng(0)
    B, N, K, H = 3, 2, 1, 64

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    query, key, value = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, H)
    cotangents = normal(B, T, N, H), jnp.asarray(rng.standard_normal((B, N, T)), np.float32)
    clean = tuple(np.asarray(x, np.float32) for x in (query, key, value, *cotangents))
    lengths = mask.key_value_lengths
    if lengths is not None:
        lengths = jnp.asarray(lengths)
        mask = replace(mask, key_value_lengths=lengths)
        beyond = (jnp.arange(S).reshape(1, S) >= lengths[:, None])[..., None, None]
        key, value = (jnp.where(beyond, jnp.asarray(jnp.nan, dtype), x) for x in (key, value))
        zero = np.asarray(beyond)
        clean = (clean[0], *(np.where(zero, 0, x) for x in clean[1:3]), *clean[3:])
    added = normal(1, N, T, S) if bias else None
    request = Request(query, key, value, added, mask, Semantics(), None, False, lse)
    return Case(name, request, cotangents, clean, lengths is not None)
