"""Native kernels that replace a function in plain XLA, for steps over a cache and writes to it.

A program contains the function itself if it is exported, lowered for another platform, or
partitioned by XLA, under `jax.vmap`, and in derivatives.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from jax.sharding import AxisType

from jaxmha.implementations.native import attention
from jaxmha.implementations.native.registration import register

# Kernel -> {operand: the result that overwrites it}, both by number.
ALIASES: dict[str, dict[int, int]] = {"attend_cache": {}, "write_cache": {0: 0}}


def unavailable() -> str | None:
    """Returns None if these kernels can run in this process, on the current platform and mesh, else
    the reason why not. With several devices they need a `shard_map` of the caller:
    `jaxmha.sharding.use` adds none to them."""
    manual = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
    if jax.device_count() > 1 and not manual:
        return "XLA may partition the call"
    return attention.unavailable()


@cache
def in_place_of_xla(name: str) -> Any:
    """The JAX primitive that runs the kernel `name`, a key of ALIASES, on CPUs.

    Its parameter `settings` has the `attributes` of the FFI call, `shapes(*operands)`, the shapes and
    dtypes of the results, and `in_xla(settings, operands)`, the results computed in plain XLA.
    """

    def in_xla(*operands: Any, settings: Any) -> list[Any]:
        return list(settings.in_xla(settings, operands))

    def batched(operands: Any, axes: Any, *, settings: Any) -> Any:
        found = jax.vmap(lambda *x: in_xla(*x, settings=settings), tuple(axes))(*operands)
        return found, [0] * len(found)

    def differentiated(primals: Any, tangents: Any, *, settings: Any) -> Any:
        def instantiated(x: Any, tangent: Any) -> Any:
            if type(tangent) is not ad.Zero:
                return tangent
            floating = jnp.issubdtype(x.dtype, np.floating)
            return np.zeros(x.shape, x.dtype if floating else jax.dtypes.float0)

        moving = tuple(instantiated(*pair) for pair in zip(primals, tangents, strict=True))
        return jax.jvp(lambda *x: in_xla(*x, settings=settings), tuple(primals), moving)

    return register(
        name,
        shapes=lambda *operands, settings: settings.shapes(*operands),
        in_xla=in_xla,
        jvp=differentiated,
        attributes=lambda settings: settings.attributes,
        batch=batched,
        aliases=ALIASES[name],
    )
