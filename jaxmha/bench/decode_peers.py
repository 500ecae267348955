"""One decode step of a whole layer, for peers that have a cache: it is written in place, and every
call appends the same token after the same past, whose length is known when the program runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmha
from jaxmha.bench import jax_peers
from jaxmha.bench.case import Case
from jaxmha.bench.data import Array, Data
from jaxmha.bench.program import Program, repeat
from jaxmha.converters import flax as flax_converter

# variables, cache, token -> output, cache
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

    text, nbytes = lambda: str(compiled[0].as_text()), lambda: jax_peers.held(compiled[0])
    return Program(build, run, outputs, text, nbytes)


def _past(case: Case, data: Data) -> tuple[jaxmha.MHAParams, int, Any, Any]:
    """Parameters, how many tokens there are, and their keys and values in a cache, `B S K H`."""
    assert case.lengths is not None
    assert data.params is not None
    past = case.lengths[0] - 1
    params = jax.tree.map(lambda x: jnp.asarray(x, case.dtype), data.params)
    query, key = (jnp.asarray(x, case.dtype) for x in (data.query, data.key[:, :past]))
    _, *heads = jaxmha.project(params, query, key)
    room = (case.B, case.S, case.K, case.H)
    keys, values = (jnp.zeros(room, case.dtype).at[:, :past].set(x) for x in heads)
    return params, past, keys, values


def jaxmha_program(case: Case, data: Data) -> Program:
    params, past, *cached = _past(case, data)
    keys, values = (jnp.copy(jnp.moveaxis(x, 2, 1)) for x in cached)

    def step(params: Any, cache: Any, token: Any) -> Any:
        out, longer = jaxmha.decode_step(params, token, cache)
        return out, longer._replace(lengths=cache.lengths)

    lengths = jnp.full(case.B, past, jnp.int32)
    return _program(data, step, params, jaxmha.KVCache(keys, values, lengths))


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
    """Projections as einsum, a cache by hand, `jax.nn.dot_product_attention`."""
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
