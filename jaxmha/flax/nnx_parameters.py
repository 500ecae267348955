"""Parameters of the nnx module, in flax's own layers, which hold them but are never called."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from jaxmha.flax.parameters import (
    PATHS,
    bias_kv_init,
    flat_init,
    init_of_rank,
    metadata_of_rank,
)
from jaxmha.flax.settings import UseBias, biased
from jaxmha.params import MHAParams, from_leaves

Settings = Mapping[str, Any]
Extra = Mapping[str, Sequence[tuple[str, tuple[int, ...]]]]


def with_given(settings: Settings, **others: object) -> dict[str, Any]:
    """Adds to `settings` the entries of `others` that are truthy."""
    return {**settings, **{name: value for name, value in others.items() if value}}


def declare(
    sizes: Mapping[str, int],
    heads: Settings,
    out: Settings | None,
    norms: Mapping[str, Settings],
    *,
    use_bias: UseBias,
    use_bias_kv: bool,
    extra: Extra,
) -> dict[str, Any]:
    """Returns layers and parameters by attribute name, drawn in flax's order; None for absent ones.

    Args:
      sizes: Dq, Dk, Dv, Do, N, K, H, h.
      heads: arguments of `nnx.LinearGeneral` for queries, keys and values.
      out: arguments for the output projection; None: no output projection.
      norms: by name, arguments of `nnx.LayerNorm`.
      use_bias: as in `MultiHeadAttention`.
      use_bias_kv: as in `MultiHeadAttention`.
      extra: further arrays by the name of their layer, as `extra_shapes` returns them.
    """
    N, K, H, h = (sizes[axis] for axis in ("N", "K", "H", "h"))
    ends = {
        "query": (sizes["Dq"], (N, H)),
        "key": (sizes["Dk"], (K, H)),
        "value": (sizes["Dv"], (K, h)),
    }
    made: dict[str, Any] = {
        name: nnx.LinearGeneral(*end, use_bias=biased(use_bias, name), **heads)
        for name, end in ends.items()
    }
    for name, settings in norms.items():
        shape = dict(extra.get(name, ())).get("scale", (H,))
        made[name] = nnx.LayerNorm(H, use_bias=False, **_of_shape(settings, shape))
    if out is not None:
        bias = biased(use_bias, "out")
        made["out"] = nnx.LinearGeneral((N, h), sizes["Do"], axis=(-2, -1), use_bias=bias, **out)
    if use_bias_kv:
        for name, size in (("bias_k", H), ("bias_v", h)):
            key, dtype = heads["rngs"].params(), heads["param_dtype"]
            made[name] = nnx.Param(bias_kv_init(key, (K, size), dtype))
    for name, arrays in extra.items():
        shapes, dtype = dict(arrays), heads["param_dtype"]
        if name == "sinks":
            made[name] = nnx.Param(jnp.zeros(shapes[""], dtype))
        elif name == "gate":
            made[name] = _gate(shapes, heads)
        elif "bias" in shapes:
            made[name].bias = nnx.Param(jnp.zeros(shapes["bias"], dtype))
    return {name: made.get(name, nnx.data(None)) for name, *_ in PATHS.values()}


def _of_shape(settings: Settings, shape: tuple[int, ...]) -> dict[str, Any]:
    """Returns `settings` with an initialiser that draws the scale in `shape`, which may differ from
    the features of `nnx.LayerNorm`."""
    init = settings["scale_init"]
    return {**settings, "scale_init": lambda key, _, dtype: init(key, shape, dtype)}


def _gate(shapes: Mapping[str, tuple[int, ...]], heads: Settings) -> nnx.LinearGeneral:
    """The gate projection, with the initialisers and sharding of the head projections; arrays of a
    gate per head lack their last axis."""
    Dq, *out = shapes["kernel"]
    kernel = {
        "kernel_init": init_of_rank(heads["kernel_init"], 1 + len(out)),
        "kernel_metadata": metadata_of_rank(heads["kernel_metadata"], 1 + len(out)),
    }
    made = nnx.LinearGeneral(Dq, tuple(out), use_bias=False, **{**heads, **kernel})
    if "bias" in shapes:
        rank = len(shapes["bias"])
        init = init_of_rank(flat_init(heads["bias_init"], 0), rank)
        drawn = init(heads["rngs"].params(), shapes["bias"], heads["param_dtype"])
        made.bias = nnx.Param(drawn, **metadata_of_rank(heads["bias_metadata"], rank))
    return made


# Settings of these layers that only a call of the layer would use, with their values after
# `declare`: `variable` rejects others. The module's own dtype and precision apply to every matmul.
UNTOUCHED: dict[str, Any] = {
    "dot_general": None,
    "dot_general_cls": None,
    "preferred_element_type": None,
    "promote_dtype": dtypes.promote_dtype,
    "epsilon": 1e-6,
}


def variable(module: nnx.Module, leaf: str) -> nnx.Variable | None:
    """The variable of a module that holds a leaf of `MHAParams`, or None. Raises TypeError if its
    layer was replaced by another type, ValueError if a setting in `UNTOUCHED` was changed."""
    name, *tail = PATHS[leaf]
    held = getattr(module, name)
    if not tail or held is None:
        return held
    kind = nnx.LayerNorm if name.endswith("_ln") else nnx.LinearGeneral
    if type(held) is not kind:
        raise TypeError(
            f"{name} must be an nnx.{kind.__name__}, which holds parameters and is not called, "
            f"got {type(held).__name__}: change its parameters instead, or use flax's own "
            "module with attention_fn=jaxmha.flax.attention_fn"
        )
    for setting, expected in UNTOUCHED.items():
        if getattr(held, setting, expected) != expected:
            raise ValueError(
                f"{name}.{setting} was changed, which has no effect: the layer is not called. Use "
                "flax's own module with attention_fn=jaxmha.flax.attention_fn"
            )
    return getattr(held, *tail)


def params_of(module: nnx.Module) -> MHAParams:
    """Reads the parameters from the variables of a module."""
    variables = {leaf: variable(module, leaf) for leaf in PATHS}
    return from_leaves({leaf: x.get_value() for leaf, x in variables.items() if x is not None})
