"""The native attention kernels as JAX primitives: shapes and derivatives."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.interpreters import ad

from jaxmha.implementations.native import portable
from jaxmha.implementations.native.operands import (
    RANKS,
    RANKS_OF_RESIDUALS,
    Problem,
    Residuals,
    Settings,
    batch,
)
from jaxmha.implementations.native.registration import Shapes, register


def _attend_shapes(settings: Settings, *operands: Any) -> Shapes:
    lead = batch(operands, RANKS)
    T, N, _ = operands[0].shape[-3:]
    rows = (*lead, N, T), np.float32
    return [((*lead, T, N, operands[2].shape[-1]), settings.out), rows, rows]


def _backward_shapes(settings: Settings, *operands: Any) -> Shapes:
    lead = batch(operands, (*RANKS, *RANKS_OF_RESIDUALS, 3))
    T, N, _ = operands[0].shape[-3:]
    heads: Shapes = [((*lead, *x.shape[-3:]), x.dtype) for x in operands[:3]]
    return [*heads, ((*lead, N, T), np.float32)]


def _bias_shapes(settings: Settings, *operands: Any) -> Shapes:
    """The shape of the bias gradient: the last batch axis has size 1 if it has size 1 in the bias,
    but axes that `vmap` has added in front of it have full size."""
    lead = batch(operands, (*RANKS, *RANKS_OF_RESIDUALS, 2))
    return [((*lead[:-1], *Problem(*operands[: len(RANKS)]).bias.shape[-4:]), np.float32)]


# Kernel -> a function that returns the shapes of its results, and the same kernel in plain XLA.
PRIMITIVES: dict[str, tuple[Callable[..., Shapes], Callable[..., list[Any]]]] = {
    "attend": (_attend_shapes, portable.attend),
    "attend_backward": (_backward_shapes, portable.attend_backward),
    "bias_gradient": (_bias_shapes, portable.bias_gradient),
}


@cache
def _primitive(name: str) -> Any:
    shapes, elsewhere = PRIMITIVES[name]

    def attributes(settings: Settings) -> dict[str, Any]:
        more = {"gradient": settings.gradient} if name == "attend" else {}
        return {**settings.attributes, **more}

    def differentiated(primals: Any, tangents: Any, *, settings: Settings) -> Any:
        moving = [
            None if type(x) is ad.Zero or x.dtype == jax.dtypes.float0 else x for x in tangents
        ]
        return portable.differentiated(elsewhere, settings, primals, moving)

    return register(
        name,
        shapes=lambda *operands, settings: shapes(settings, *operands),
        in_xla=lambda *operands, settings: elsewhere(settings, *operands),
        jvp=differentiated,
        attributes=attributes,
    )


def attend(settings: Settings, problem: Problem) -> list[Any]:
    """Output `B T N h` in `settings.out`, and row max and row sum `B N T` as in `Residuals`."""
    found: list[Any] = _primitive("attend").bind(*problem, settings=settings)
    return found


def attend_backward(
    settings: Settings, problem: Problem, residuals: Residuals, out: Any
) -> list[Any]:
    """Gradients of query, key and value, in their dtypes, and delta `B N T`, which `bias_gradient`
    reads. `out`: the output in float32."""
    operands = *problem, *residuals, out
    found: list[Any] = _primitive("attend_backward").bind(*operands, settings=settings)
    return found


def bias_gradient(settings: Settings, problem: Problem, residuals: Residuals, delta: Any) -> Any:
    """The gradient of the bias, in its shape, by a kernel of its own: XLA removes it if the result is
    unused. `delta`: that of `attend_backward`."""
    (found,) = _primitive("bias_gradient").bind(*problem, *residuals, delta, settings=settings)
    return found
