"""Names the remedy where JAX cannot differentiate: a custom gradient in forward mode, and loops with
traced bounds in reverse mode.

In forward mode JAX raises its own error when it lowers the program of the tangents, or batches or
differentiates it: under `jax.jit` no code of ours runs then. So the tangents carry a mark, which
raises first. In reverse mode the mark is transposed, to the identity, before any of these.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from jaxmha.implementations.base import Request

REMEDY = (
    "forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize) of attention needs "
    'implementation="reference", or "few_queries" where it supports the call'
)

ONCE = (
    "reverse-mode differentiation of a gradient of attention (jax.grad of jax.grad) needs "
    'implementation="reference", or "native" where it supports the call; forward mode over it '
    "(jax.jvp of jax.grad) needs neither"
)


@contextmanager
def forward_mode() -> Iterator[None]:
    """In this context, adds the remedy to JAX's TypeError of forward-mode differentiation."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error) or REMEDY in str(error):
            raise
        raise TypeError(f"{REMEDY}: {error}") from error


def only(request: Request) -> Request:
    """Returns the request with floating arrays that raise TypeError if they are differentiated in
    forward mode."""
    mod = request.score_mod
    operands = (*request[:3], request.bias, None if mod is None else mod.floats)
    unmarked = (request.mask, request.dropout_key, request.score_mod, request.mask_mod)
    arrays, structure = jax.tree.flatten(operands)
    others = [x for x in jax.tree.leaves(unmarked) if isinstance(x, jax.Array)]
    marked = _identity().bind(*arrays, *others, results=len(arrays))
    query, key, value, bias, floats = jax.tree.unflatten(structure, marked)
    if mod is not None:
        mod = mod._replace(floats=floats)
    return request._replace(query=query, key=key, value=value, bias=bias, score_mod=mod)


def _raise(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(REMEDY)


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, results: int
) -> tuple[list[Any], list[Any]]:
    # Each mark depends on all primals, so that a program which batches or differentiates one of
    # them raises. It gets slices without elements, so that a gradient saves no data for it.
    sources = [jax.lax.slice_in_dim(jnp.expand_dims(x, -1), 0, 0, axis=-1) for x in primals]
    marked = [
        x if type(x) is ad.Zero or x.dtype == jax.dtypes.float0 else _mark().bind(x, *sources)
        for x in tangents[:results]
    ]
    return list(primals[:results]), marked


@cache
def _identity() -> Any:
    """The primitive that returns the first arrays of its operands, as many as its parameter `results`
    says, with marked tangents.

    It is not a `jax.custom_jvp`, which under `jax.vmap` would batch the mark, and so raise, even in
    reverse mode.
    """
    from jax.extend.core import Primitive  # also imports Pallas, which few programs need

    def first(*arrays: Any, results: int) -> list[Any]:
        return list(arrays[:results])

    identity: Any = Primitive("attention_operands")
    identity.multiple_results = True
    identity.def_impl(first)
    identity.def_abstract_eval(first)
    mlir.register_lowering(identity, lambda _, *arrays, results: first(*arrays, results=results))
    batching.primitive_batchers[identity] = lambda arrays, axes, results: (
        identity.bind(*arrays, results=results),
        axes[:results],
    )
    ad.primitive_jvps[identity] = _jvp
    return identity


@cache
def _mark() -> Any:
    """The primitive that marks tangents: it raises when it is run, lowered, batched or
    differentiated, as happens in forward mode only, and its transpose is the identity."""
    from jax.extend.core import Primitive

    mark: Any = Primitive("attention_in_reverse_mode_only")
    mark.def_impl(_raise)
    mark.def_abstract_eval(lambda x, *_: x)
    mlir.register_lowering(mark, _raise)
    batching.primitive_batchers[mark] = _raise
    ad.primitive_jvps[mark] = _raise
    ad.primitive_transposes[mark] = lambda cotangent, _, *sources: (
        cotangent,
        *[None] * len(sources),
    )
    return mark


@jax.custom_jvp
def once(x: jax.Array) -> jax.Array:
    """Returns `x`, the result of a loop that JAX cannot differentiate in reverse mode, and raises
    ValueError with the remedy if that is tried; forward mode passes."""
    return x


@once.defjvp
def _once_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    linear: Any = jax.custom_derivatives.linear_call
    return primals[0], linear(lambda _, x: x, _raise_once, (), tangents[0])


def _raise_once(*_: Any) -> NoReturn:
    raise ValueError(ONCE)
