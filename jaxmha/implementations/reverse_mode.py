"""Names the remedy where forward-mode differentiation meets a custom gradient.

JAX raises when it batches the program of the tangents, inside our call, or when it lowers it: under
`jax.jit` no code of ours runs then. So the tangents carry a mark, whose lowering raises first. In
reverse mode its transpose is the identity: the mark is gone before the program is lowered.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

import jax
from jax.interpreters import ad, batching, mlir

from jaxmha.implementations.base import Request

REMEDY = (
    "forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize) of attention needs "
    'implementation="reference", or "few_queries" where it supports the call'
)


@contextmanager
def forward_mode() -> Iterator[None]:
    """Adds the remedy to JAX's TypeError of forward-mode differentiation."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error) or REMEDY in str(error):
            raise
        raise TypeError(f"{REMEDY}: {error}") from error


def only(request: Request) -> Request:
    """Returns the request, with arrays that raise TypeError in forward mode."""
    query, key, value = (_marked(x) for x in request[:3])
    bias = None if request.bias is None else _marked(request.bias)
    mod = request.score_mod
    if mod is not None:
        mod = mod._replace(floats=tuple(_marked(x) for x in mod.floats))
    return request._replace(query=query, key=key, value=value, bias=bias, score_mod=mod)


@jax.custom_jvp
def _marked(x: jax.Array) -> jax.Array:
    return x


@_marked.defjvp
def _jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[0], _mark().bind(tangents[0])


def _raise(*_: Any, **__: Any) -> NoReturn:
    raise TypeError(REMEDY)


@cache
def _mark() -> Any:
    """The primitive of marked tangents."""
    from jax.extend.core import Primitive  # also imports Pallas, which few programs need

    mark: Any = Primitive("attention_in_reverse_mode_only")
    mark.def_impl(_raise)
    mark.def_abstract_eval(lambda x: x)
    mlir.register_lowering(mark, _raise)
    batching.primitive_batchers[mark] = lambda x, axes: (mark.bind(*x), axes[0])
    ad.deflinear2(mark, lambda cotangent, _: [cotangent])  # type: ignore[no-untyped-call]
    return mark
