"""The native kernels as JAX primitives: shapes, vmap, derivatives and lowering."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import NamedSharding, PartitionSpec

from jaxmha.implementations.native import portable
from jaxmha.implementations.native.library import HANDLERS
from jaxmha.implementations.native.operands import (
    AXES,
    AXES_OF_RESIDUALS,
    Problem,
    Residuals,
    Settings,
    batch,
)

Shapes = list[tuple[tuple[int, ...], Any]]


def _attend_shapes(settings: Settings, *operands: Any) -> Shapes:
    lead = batch(operands, AXES)
    T, N, _ = operands[0].shape[-3:]
    rows = (*lead, N, T), np.float32
    return [((*lead, T, N, operands[2].shape[-1]), settings.out), rows, rows]


def _backward_shapes(settings: Settings, *operands: Any) -> Shapes:
    lead = batch(operands, (*AXES, *AXES_OF_RESIDUALS, 3))
    T, N, _ = operands[0].shape[-3:]
    heads: Shapes = [((*lead, *x.shape[-3:]), x.dtype) for x in operands[:3]]
    return [*heads, ((*lead, N, T), np.float32)]


def _bias_shapes(settings: Settings, *operands: Any) -> Shapes:
    """Bias gradients are summed over a batch axis that the bias broadcasts, but not over axes that
    `vmap` has added in front of it."""
    lead = batch(operands, (*AXES, *AXES_OF_RESIDUALS, 2))
    return [((*lead[:-1], *Problem(*operands[: len(AXES)]).bias.shape[-4:]), np.float32)]


# Primitive -> a function that returns the shapes of its results, and its implementation in XLA.
PRIMITIVES: dict[str, tuple[Callable[..., Shapes], Callable[..., list[Any]]]] = {
    "attend": (_attend_shapes, portable.attend),
    "attend_backward": (_backward_shapes, portable.attend_backward),
    "bias_gradient": (_bias_shapes, portable.bias_gradient),
}


@cache
def _primitive(name: str) -> Any:
    from jax.extend.core import Primitive  # also imports Pallas, which few programs need

    shapes, elsewhere = PRIMITIVES[name]
    primitive: Any = Primitive(f"jaxmha_cpu_{name}")
    primitive.multiple_results = True

    def abstract(*operands: Any, settings: Settings) -> list[Any]:
        return result_types(operands[0], shapes(settings, *operands))

    def differentiated(primals: Any, tangents: Any, *, settings: Settings) -> Any:
        moving = [
            None if type(x) is ad.Zero or x.dtype == jax.dtypes.float0 else x for x in tangents
        ]
        return portable.differentiated(elsewhere, settings, primals, moving)

    def in_xla(*operands: Any, settings: Settings) -> list[Any]:
        return elsewhere(settings, *operands)

    lower_in_xla: Any = mlir.lower_fun(in_xla, multiple_results=True)
    lower_call: Any = jax.ffi.ffi_lowering(HANDLERS[name])

    def lower(context: Any, *operands: Any, settings: Settings) -> Any:
        if may_move(context.module_context):
            return lower_in_xla(context, *operands, settings=settings)
        more = {"gradient": settings.gradient} if name == "attend" else {}
        return lower_call(context, *operands, **settings.attributes, **more)

    def run(*operands: Any, settings: Settings) -> Any:
        apply: Any = xla.apply_primitive
        return apply(primitive, *operands, settings=settings)

    primitive.def_impl(run)
    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = partial(batched, primitive)
    ad.primitive_jvps[primitive] = differentiated
    mlir.register_lowering(primitive, lower_in_xla)
    mlir.register_lowering(primitive, lower, platform="cpu")
    return primitive


def result_types(like: Any, shapes: Shapes) -> list[Any]:
    """Types of results on the devices of the operand `like`."""
    spec: Any = PartitionSpec
    return [
        like.update(
            shape=shape,
            dtype=np.dtype(dtype),
            weak_type=False,
            sharding=NamedSharding(like.sharding.mesh, spec(*[None] * len(shape))),
        )
        for shape, dtype in shapes
    ]


def batched(primitive: Any, operands: Any, axes: Any, **static: Any) -> Any:
    """Moves the mapped axis to the front; operands that are not mapped get one of size 1."""
    moved = [
        x.reshape(1, *x.shape) if axis is None else jax.numpy.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    found = primitive.bind(*moved, **static)
    return found, [0] * len(found)


def may_move(module: Any) -> bool:
    """True if a program may run on another machine, or XLA may partition it over devices.

    An exported program must run without the library. XLA's partitioner would gather the operands of
    a custom call; inside `shard_map` over all axes it has nothing left to partition.
    """
    if module.lowering_parameters.for_export:
        return True
    context = module.axis_context
    mesh = getattr(context, "mesh", None)
    if mesh is None:
        return bool(getattr(context, "num_devices", 1) > 1)
    free = set(mesh.axis_names) - set(context.manual_axes)
    return any(mesh.shape[name] > 1 for name in free)


def attend(settings: Settings, problem: Problem) -> list[Any]:
    """Output `B T N h`, row max and row sum `B N T`."""
    found: list[Any] = _primitive("attend").bind(*problem, settings=settings)
    return found


def attend_backward(
    settings: Settings, problem: Problem, residuals: Residuals, out: Any
) -> list[Any]:
    """Gradients of query, key and value, and delta `B N T`; `out` is the output in float32."""
    operands = *problem, *residuals, out
    found: list[Any] = _primitive("attend_backward").bind(*operands, settings=settings)
    return found


def bias_gradient(settings: Settings, problem: Problem, residuals: Residuals, delta: Any) -> Any:
    """The gradient of the bias, by a kernel of its own: XLA removes it if the result is unused."""
    (found,) = _primitive("bias_gradient").bind(*problem, *residuals, delta, settings=settings)
    return found
