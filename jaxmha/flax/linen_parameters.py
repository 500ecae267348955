"""Parameters of the linen module, in submodules with the names of flax's own layers."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import linen as nn

from jaxmha.arrays import DTypeLike
from jaxmha.flax.heads import Inputs
from jaxmha.flax.parameters import (
    Initializer,
    bias_kv_init,
    extra_shapes,
    flat_init,
    init_of_rank,
    scale_init,
)
from jaxmha.flax.settings import biased, head_sizes
from jaxmha.integers import require_sizes
from jaxmha.params import MHAParams, Projection
from jaxmha.semantics import Semantics


class Parameters(nn.Module):  # type: ignore[misc]
    """A submodule of parameters; `entries` are (name, initialiser, shape)."""

    entries: tuple[tuple[str, Initializer, tuple[int, ...]], ...]
    param_dtype: DTypeLike

    @nn.compact  # type: ignore[untyped-decorator]
    def declare(self) -> dict[str, Any]:
        """The parameters by name; missing ones are drawn."""
        return {
            name: self.param(name, init, shape, self.param_dtype)
            for name, init, shape in self.entries
        }


def declare(module: Any, inputs: Inputs, semantics: Semantics) -> MHAParams:
    """The parameters of a module, declared in flax's order and under flax's names."""
    Dq, Dk, Dv = (x.shape[-1] for x in inputs)
    N = module.num_heads
    features = module.qkv_features or Dq
    K, H, h = head_sizes(N, features, module.num_kv_heads, module.value_head_dim)
    Do = module.out_features or Dq
    require_sizes(out_features=Do)

    def projection(name: str, shape: tuple[int, ...], contracted: int = 1) -> Projection:
        kernel_init, bias_init = module.kernel_init, module.bias_init
        if name == "out":
            kernel_init = module.out_kernel_init or kernel_init
            bias_init = module.out_bias_init or bias_init
        entries = [("kernel", flat_init(kernel_init, contracted), shape)]
        if biased(module.use_bias, name):
            entries.append(("bias", flat_init(bias_init, 0), shape[contracted:]))
        return Projection(**Parameters(tuple(entries), module.param_dtype, name=name).declare())

    def learned(name: str, size: int) -> jax.Array | None:
        if not module.use_bias_kv:
            return None
        bias: jax.Array = module.param(name, bias_kv_init, (K, size), module.param_dtype)
        return bias

    ends = {"query": (Dq, N, H), "key": (Dk, K, H), "value": (Dv, K, h)}
    heads = {name: projection(name, shape) for name, shape in ends.items()}
    normed = semantics.qk_norm is not None and semantics.qk_norm_learned
    offset = semantics.qk_norm_offset if normed else None
    more = _more(module, {"Dq": Dq, "N": N, "K": K, "H": H, "h": h}, offset)
    scales = {"scale": (H,)} if normed else {}
    query_ln, key_ln = (more(name, **scales) for name in ("query_ln", "key_ln"))
    return MHAParams(
        **heads,
        query_norm=query_ln.get("scale"),
        key_norm=key_ln.get("scale"),
        query_norm_bias=query_ln.get("bias"),
        key_norm_bias=key_ln.get("bias"),
        out=projection("out", (N, h, Do), 2) if module.use_out else None,
        bias_k=learned("bias_k", H),
        bias_v=learned("bias_v", h),
        sinks=module.param("sinks", nn.initializers.zeros_init(), (N,), module.param_dtype)
        if "sinks" in module.extra_params
        else None,
        gate=Projection(**gate) if (gate := more("gate")) else None,
    )


def _more(
    module: Any, sizes: Mapping[str, int], offset: float | None
) -> Callable[..., dict[str, jax.Array]]:
    """Returns `more(name, **shapes)`, which declares the layer `name` with arrays of `shapes`, and
    the arrays that `extra_params` adds to it.

    `offset`: `Semantics.qk_norm_offset`; None: norms have no scales.
    """
    shapes = extra_shapes(module.extra_params, sizes, norms=offset is not None)
    extra = {name: dict(arrays) for name, arrays in shapes.items()}

    def initialiser(layer: str, kind: str, rank: int) -> Initializer:
        if layer != "gate":
            return nn.initializers.zeros_init() if kind == "bias" else scale_init(offset or 0.0)
        if kind == "bias":
            return init_of_rank(flat_init(module.bias_init, 0), rank)
        return init_of_rank(flat_init(module.kernel_init, 1), rank)

    def more(name: str, **shapes: tuple[int, ...]) -> dict[str, jax.Array]:
        shapes |= extra.get(name, {})
        if not shapes:
            return {}
        entries = tuple(
            (kind, initialiser(name, kind, len(shape)), shape) for kind, shape in shapes.items()
        )
        arrays: dict[str, jax.Array] = Parameters(entries, module.param_dtype, name=name).declare()
        return arrays

    return more
