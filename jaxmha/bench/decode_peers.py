"""Decode steps over a cache.

Steps of a whole layer need a peer that has a cache. A step writes the cache in place, and appends
the same token after the same past in every call; the length of the past is an argument of the
program, not a constant. Steps of the core (attention alone) only read a cache, which is jaxmha's.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmha
from jaxmha.bench import jax_peers
from jaxmha.bench.case import Case
from jaxmha.bench.data import Array, Data
from jaxmha.bench.peers import CACHES
from jaxmha.bench.program import Program, UnsupportedError, repeat
from jaxmha.cached_attention import attend_cache
from jaxmha.cached_step import BLOCK
from jaxmha.converters import flax as flax_converter
from jaxmha.page_table import truncated
from jaxmha.quantized import is_scaled, quantize, storage_dtype

PAGE = 64  # tokens of a page

# (variables, cache, token) -> (output, cache)
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def _program(data: Data, step: Step, variables: Any, cache: Any) -> Program:
    token = jnp.asarray(data.query, jax.tree.leaves(variables)[0].dtype)
    variables = jax.tree.map(jnp.asarray, variables)
    held, compiled = [cache], list[Any]()

    def build() -> None:
        lowered = jax.jit(step, donate_argnums=1).lower(variables, held[0], token)
        compiled.append(lowered.compile())

    def call() -> Any:
        out, held[0] = compiled[0](variables, held[0], token)
        return out

    def run(calls: int = 1) -> None:
        repeat(lambda: (call(), held[0]), calls)

    def outputs(cotangent: Array) -> tuple[Any, None]:
        return np.asarray(call(), np.float32), None

    text, nbytes = lambda: str(compiled[0].as_text()), lambda: jax_peers.bytes_of(compiled[0])
    return Program(build, run, outputs, text, nbytes)


def _past(case: Case, data: Data) -> tuple[jaxmha.MHAParams, int, Any, Any]:
    """Returns parameters, the number of past tokens, and their keys and values `B S K H`, 0 in the
    slots that later tokens may take."""
    assert case.lengths is not None
    assert data.params is not None
    past = case.lengths[0] - 1
    params = jax.tree.map(lambda x: jnp.asarray(x, case.dtype), data.params)
    query, key = (jnp.asarray(x, case.dtype) for x in (data.query, data.key[:, :past]))
    _, *heads = jaxmha.project(params, query, key)
    room = (case.B, case.S, case.K, case.H)
    keys, values = (jnp.zeros(room, case.dtype).at[:, :past].set(x) for x in heads)
    return params, past, keys, values


def _cache(name: str, keys: Any, values: Any, lengths: Any) -> Any:
    """Returns a cache of jaxmha with the first `lengths` of keys `B S K H` and values `B S K h`.

    `name`: one of `CACHES`; "": a `KVCache`."""
    if not name:
        keys, values = (jnp.copy(jnp.moveaxis(x, 2, 1)) for x in (keys, values))
        return jaxmha.KVCache(keys, values, lengths)
    dtype = storage_dtype(CACHES[name] or keys.dtype)
    pools = (jax.jit(_pages, static_argnums=1)(x, dtype) for x in (keys, values))
    (key, key_scale), (value, value_scale) = pools
    table = np.arange(len(key), dtype=np.int32).reshape(len(keys), -1)
    held = truncated(jnp.asarray(table), jnp.asarray(lengths), PAGE)
    return jaxmha.PagedKVCache(key, value, held, lengths, key_scale, value_scale)


def _pages(x: Any, dtype: Any) -> tuple[Any, Any]:
    """Tokens `B S K H` as pages `P K page H` of a dtype, in order, and their scales, if it has any.

    It is not timed; to append the tokens of a long cache instead would only take seconds more.
    """
    B, S, K, H = x.shape
    room = -(-S // PAGE) * PAGE
    x = jnp.pad(x, ((0, 0), (0, room - S), (0, 0), (0, 0)))
    x = x.reshape(B * room // PAGE, PAGE, K, H).swapaxes(1, 2)
    return quantize(x, dtype) if is_scaled(dtype) else (x.astype(dtype), None)


def core_program(case: Case, data: Data, name: str) -> Program:
    """Attention of queries over a cache that holds all keys and values; `name`: one of `CACHES`."""
    assert case.lengths is not None
    lengths = jnp.asarray(case.lengths, jnp.int32)
    query, keys, values = (jnp.asarray(x, case.dtype) for x in (data.query, data.key, data.value))
    # Queries are at or after the last key, so that causal steps attend all keys, as other peers do.
    positions = (lengths - 1)[:, None] + jnp.arange(case.T, dtype=jnp.int32)
    held = query, _cache(name, keys, values, lengths)
    compiled = list[Any]()

    def attend(query: Any, cache: Any) -> jax.Array:
        semantics = jaxmha.Semantics()
        return attend_cache(None, query, cache, positions, jaxmha.Mask(), semantics, BLOCK)

    def build() -> None:
        compiled.append(jax.jit(attend).lower(*held).compile())

    def run(calls: int = 1) -> None:
        repeat(lambda: compiled[0](*held), calls)

    def outputs(cotangent: Array) -> tuple[Any, None]:
        return np.asarray(compiled[0](*held), np.float32), None

    text, nbytes = lambda: str(compiled[0].as_text()), lambda: jax_peers.bytes_of(compiled[0])
    return Program(build, run, outputs, text, nbytes)


def jaxmha_program(case: Case, data: Data, name: str = "") -> Program:
    params, past, keys, values = _past(case, data)

    def step(params: Any, cache: Any, token: Any) -> Any:
        out, longer = jaxmha.decode_step(params, token, cache)
        return out, longer._replace(lengths=cache.lengths)

    lengths = jnp.full(case.B, past, jnp.int32)
    return _program(data, step, params, _cache(name, keys, values, lengths))


def linen_program(case: Case, data: Data) -> Program:
    params, past, keys, values = _past(case, data)
    module, variables = flax_converter.to_module(params, kind="linen")
    module = module.clone(decode=True)

    def step(variables: Any, cache: Any, token: Any) -> Any:
        out, changed = module.apply(
            variables | {"cache": cache}, token, deterministic=True, mutable=["cache"]
        )
        return out, changed["cache"] | {"cache_index": cache["cache_index"]}

    cache = {"cached_key": keys, "cached_value": values, "cache_index": jnp.array(past, jnp.int32)}
    return _program(data, step, variables, cache)


def nnx_program(case: Case, data: Data) -> Program:
    from flax import nnx

    params, past, keys, values = _past(case, data)
    module = flax_converter.to_module(params)
    module.init_cache((case.B, case.S, case.E), dtype=case.dtype)
    module.cached_key[...], module.cached_value[...] = keys, values
    module.cache_index[...] = jnp.array(past, jnp.int32)
    graph, state, cache, rest = nnx.split(module, nnx.Param, nnx.Cache, ...)

    def step(state: Any, cache: Any, token: Any) -> Any:
        module = nnx.merge(graph, state, cache, rest)
        out = module(token, deterministic=True, decode=True)
        module.cache_index[...] -= 1
        return out, nnx.state(module, nnx.Cache)

    return _program(data, step, state, cache)


def jax_nn_program(case: Case, data: Data) -> Program:
    """A step as a user of `jax.nn` writes it: projections by einsum, and a cache by hand."""
    params, past, keys, values = _past(case, data)

    def step(params: Any, cache: Any, token: Any) -> Any:
        query, *new = (jnp.einsum("btd,dnh->btnh", token, p.kernel) + p.bias for p in params[:3])
        *heads, past = cache
        heads = [x.at[:, past].set(y[:, 0]) for x, y in zip(heads, new, strict=True)]
        lengths = jnp.full(case.B, past + 1)
        context = jax.nn.dot_product_attention(query, *heads, key_value_seq_lengths=lengths)
        out = jnp.einsum("btnh,nhd->btd", context, params.out.kernel) + params.out.bias
        return out, (*heads, past)

    return _program(data, step, params, (keys, values, jnp.array(past, jnp.int32)))


PROGRAMS: dict[str, Callable[[Case, Data], Program]] = {
    "jaxmha": jaxmha_program,
    "flax-linen": linen_program,
    "flax-nnx": nnx_program,
    "jax-nn": jax_nn_program,
}


def program(peer: str, case: Case, data: Data) -> Program:
    """The program of a peer's step; `jaxmha:paged` names the peer and one of `CACHES`.

    Raises:
      UnsupportedError: its layer has no cache.
    """
    base, _, name = peer.partition(":")
    if case.scope == "core":
        return core_program(case, data, name)
    if base not in PROGRAMS or (name and name not in CACHES):
        raise UnsupportedError("its layer has no cache of keys and values")
    return jaxmha_program(case, data, name) if name else PROGRAMS[base](case, data)
