"""Registration of a native kernel as a JAX primitive, with its equivalent in plain XLA."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.interpreters import ad, batching, mlir, xla
from jax.sharding import NamedSharding, PartitionSpec

from jaxmha.implementations.native.library import HANDLERS

Shapes = list[tuple[tuple[int, ...], Any]]


def register(
    name: str,
    *,
    shapes: Callable[..., Shapes],
    in_xla: Callable[..., list[Any]],
    jvp: Callable[..., Any],
    attributes: Callable[..., dict[str, Any]] = dict,
    batch: Callable[..., Any] | None = None,
    transpose: Callable[..., Any] | None = None,
    aliases: Mapping[int, int] | None = None,
) -> Any:
    """Returns a new primitive, which runs a kernel on CPUs.

    Programs that are exported, lowered for another platform or partitioned by XLA contain `in_xla`.

    Args:
      name: the kernel, a key of HANDLERS.
      shapes: `(*operands, **static)` -> shape and dtype of each result.
      in_xla: `(*operands, **static)` -> the results, computed in plain XLA.
      jvp: the rule of `jax.jvp`: `(primals, tangents, **static)` -> results and their tangents.
      attributes: `(**static)` -> attributes of the FFI call; by default the static parameters.
      batch: the rule of `jax.vmap`; None: `batched`, since the kernel takes leading batch axes.
      transpose: the transpose rule of linear operands; None: no operand is linear.
      aliases: number of an operand -> number of the result that overwrites it.
    """
    from jax.extend.core import Primitive  # not above: it imports Pallas, which few need

    primitive: Any = Primitive(f"jaxmha_cpu_{name}")
    primitive.multiple_results = True
    lower_in_xla: Any = mlir.lower_fun(in_xla, multiple_results=True)
    lower_call: Any = jax.ffi.ffi_lowering(HANDLERS[name], operand_output_aliases=aliases)

    def lower(context: Any, *operands: Any, **static: Any) -> Any:
        if may_move(context.module_context):
            return lower_in_xla(context, *operands, **static)
        return lower_call(context, *operands, **attributes(**static))

    def abstract(*operands: Any, **static: Any) -> list[Any]:
        return result_types(operands[0], shapes(*operands, **static))

    primitive.def_impl(partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(abstract)
    batching.primitive_batchers[primitive] = batch or partial(batched, primitive, shapes)
    ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    mlir.register_lowering(primitive, lower_in_xla)
    mlir.register_lowering(primitive, lower, platform="cpu")
    return primitive


def result_types(like: Any, shapes: Shapes) -> list[Any]:
    """The abstract values of results. They have the mesh of `like`, the abstract value of an operand,
    over whose explicit axes they are replicated."""
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


def batched(
    primitive: Any, shapes: Callable[..., Shapes], operands: Any, axes: Any, **static: Any
) -> Any:
    """The rule of `jax.vmap` for kernels that take leading batch axes, of full size or 1.

    Moves the mapped axis to the front; operands that are not mapped get an axis of size 1 there.
    No kernel runs over an axis of size 0: it would take mapped operands for absent ones.
    """
    moved = [
        x.reshape(1, *x.shape) if axis is None else jax.numpy.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    mapped = next(x for x, axis in zip(moved, axes, strict=True) if axis is not None)
    if mapped.shape[0]:
        found = primitive.bind(*moved, **static)
    else:
        struct: Any = jax.ShapeDtypeStruct
        one = [struct(x.shape[1:], x.dtype) for x in moved]
        results = shapes(*one, **static)
        found = [jax.numpy.zeros_like(mapped, d, shape=(0, *shape)) for shape, d in results]
    return found, [0] * len(found)


def may_move(module: Any) -> bool:
    """True if a program may run on another machine, or XLA may partition it over devices. `module`:
    the context of its lowering.

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
