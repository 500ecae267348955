"""The calls with which a probe tests a kernel, and their expected results, computed in NumPy."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.implementations.base import Request
from jaxmha.mask import Mask
from jaxmha.semantics import Semantics

Wide = np.ndarray[Any, np.dtype[np.float32]]


# Features (H, h) of the heads of most probes: USUAL stands for all sizes with H = h up to
# WIDEST_USUAL. Other heads are probed with their own sizes.
USUAL, WIDEST_USUAL = (64, 64), 128
# Numbers of queries of a probe: FEW stands for 2 to FEW queries, MANY for more, since libraries run
# other kernels for few queries. One query has a probe of its own, to find whether its kernel needs
# unattended keys and values zeroed: zeroing takes most time relative to the kernel there.
FEW, MANY = 16, 128


class Kind(NamedTuple):
    """The properties of a request for which a kernel is probed once.

    Attributes:
      dtype: of queries, keys and values.
      dense: whether there is a bias or a dense mask.
      packed: whether sequences are packed, by their lengths.
      heads: USUAL for equal heads of at most WIDEST_USUAL features, else the features of a query
        and of a value head.
      padded: whether a Boolean array gives the valid keys.
      queries: 1, FEW (2 to FEW queries) or MANY (more); always MANY if the call is dense, packed or
        padded.
    """

    dtype: str
    dense: bool = False
    packed: bool = False
    heads: tuple[int, int] = USUAL
    padded: bool = False
    queries: int = MANY

    @property
    def text(self) -> str:
        """The kind in words, for messages.

        >>> Kind("bfloat16", dense=True, heads=(192, 128)).text
        'bfloat16 with a bias, with heads of 192 and 128 features'
        """
        heads = (
            "" if self.heads == USUAL else ", with heads of {} and {} features".format(*self.heads)
        )
        packed = ", for packed sequences" * self.packed + ", for padded keys" * self.padded
        queries = {1: " of one query", FEW: f" of at most {FEW} queries"}.get(self.queries, "")
        return self.dtype + queries + " with a bias" * self.dense + packed + heads


def kind_of(request: Request) -> Kind:
    """The properties of a request that decide which probe covers it. `padded` stays False: the module
    of a kernel that reads padding as a Boolean array sets it."""
    dense = request.bias is not None or request.mask.array is not None
    packed = request.mask.packed_ends is not None
    heads = request.query.shape[3], request.value.shape[3]
    usual = heads[0] == heads[1] <= WIDEST_USUAL
    T = request.query.shape[1]
    queries = MANY if dense or packed or T > FEW else FEW if T > 1 else 1
    return Kind(request.query.dtype.name, dense, packed, USUAL if usual else heads, queries=queries)


class Case(NamedTuple):
    """One call of a kernel.

    Attributes:
      name: the name of the case in messages.
      request: the call.
      cotangents: cotangents of output and lse; the latter is unused unless the request returns lse.
      clean: query, key, value and cotangents in float32, with 0 in place of NaN.
      poisoned: whether unattended keys and values are NaN, which must not reach the results.
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
        B, N = k.shape[:2]
        d_key, d_value = (
            np.moveaxis(x.reshape(B, N // group, group, S, -1).sum(2), 1, 2) for x in transposed
        )
        found = {"output": np.moveaxis(out, 1, 2)}
        found |= {"the log-sum-exp": lse} if self.request.return_lse else {}
        found["the gradient of query"] = np.moveaxis(d_logits @ k, 1, 2)
        return found | {"the gradient of key": d_key, "the gradient of value": d_value}


def cases(kind: Kind) -> Iterator[Case]:
    """The cases with which kernels are probed for a kind of request.

    If `dense`: a call with a bias, causal mask and lengths, and one with a dense mask. If `packed`:
    full, causal, and causal of odd size, each with some empty sequences. If `padded`: many queries
    and one query, with invalid keys at any positions. Otherwise: lengths with log-sum-exp; then
    lengths alone for one query, or, for more queries, causal with lengths, odd sizes without a mask,
    and a window. Of sequences with lengths, one is full, one is shorter and one is empty. Keys and
    values that no query attends are NaN; in the shorter sequence they begin within a tile, so that
    kernels read some of them.
    """
    T, S = kind.queries, 384

    def lengths(full: int) -> Mask:
        return Mask.lengths(key_value=np.asarray([full, 61 * full // 128, 0], np.int32))

    causal = Mask.causal() & lengths(T)
    if kind.dense:
        yield _case("causal, with a bias and lengths", kind, causal, bias=True)
        mask_array = np.random.default_rng(1).random((3, 1, 77, 93)) < 0.5
        mask_array[..., 17:79:3] = False
        yield _case("a dense mask of odd sizes", kind, Mask.dense(mask_array), T=77, S=93)
        return
    if kind.packed:
        several = np.asarray([[50, 0, 61], [128, 0, 0], [1, 2, 3]], np.int32)
        packed = Mask.packed(several, size=128)
        yield _case("packed", kind, packed)
        yield _case("packed, causal", kind, packed & Mask.causal())
        yield _case("packed, odd", kind, Mask.packed(several, size=77) & Mask.causal(), T=77, S=77)
        return
    if kind.padded:
        valid = np.random.default_rng(1).random((3, 128)) < 0.5
        valid[1], valid[2] = np.arange(128) >= 61, False
        padding = Mask.padding(key_value=valid)
        yield _case("padded keys", kind, padding)
        yield _case("padded keys of one query", kind, padding, T=1)
        return
    yield _case("with lengths and log-sum-exp", kind, lengths(S), T=T, S=S, lse=True)
    if T == 1:
        yield _case("one query", kind, lengths(S), T=T, S=S)
        return
    yield _case("causal, with lengths", kind, causal, T=T, S=T)
    yield _case("odd sizes", kind, Mask(), T=T // 4 + 5, S=T // 4 + 5)
    yield _case("a window", kind, Mask.window(T // 8, 0), T=T, S=T)


def _case(
    name: str,
    kind: Kind,
    mask: Mask,
    *,
    T: int = 128,
    S: int = 128,
    lse: bool = False,
    bias: bool = False,
) -> Case:
    rng = np.random.default_rng(0)
    B, N, K, (H, h) = 3, 2, 1, kind.heads
    dtype = kind.dtype

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    query, key, value = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, h)
    cotangents = normal(B, T, N, h), jnp.asarray(rng.standard_normal((B, N, T)), np.float32)
    clean = tuple(np.asarray(x, np.float32) for x in (query, key, value, *cotangents))
    attended: Any = np.asarray(mask.to_array(T, S, np)).any((1, 2))
    dead = ~attended[..., None, None]
    poisoned = bool(dead.any())
    if poisoned:
        key, value = (jnp.where(dead, jnp.asarray(jnp.nan, dtype), x) for x in (key, value))
        clean = (clean[0], *(np.where(dead, 0, x) for x in clean[1:3]), *clean[3:])
    mask = jax.tree.map(jnp.asarray, mask)
    added = normal(1, N, T, S) if bias else None
    request = Request(query, key, value, added, mask, Semantics(), None, False, lse)
    return Case(name, request, cotangents, clean, poisoned)
