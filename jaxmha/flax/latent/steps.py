"""Paths of parameters, and calls of `jaxmha.latent`: shared by the modules of linen and nnx."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import PRNGKeyArray

from jaxmha import latent
from jaxmha.arrays import Array
from jaxmha.flax.parameters import Initializer, flat_init
from jaxmha.flax.settings import cast, read_mask, reject_others, require_features
from jaxmha.latent import LatentParams
from jaxmha.latent.initializers import contracted, leaf_shapes
from jaxmha.latent.params import CANONICAL, leaves, sizes
from jaxmha.mask import Mask
from jaxmha.mod_arguments import ModFunctions
from jaxmha.semantics import Semantics

# Leaf of LatentParams -> its path in the parameter tree of a module.
PATHS: dict[str, tuple[str, ...]] = {leaf: tuple(leaf.split(".")) for leaf in CANONICAL}
# Arguments of the modules that are sizes, with the names of `init_latent_params`.
SIZES = (
    "num_heads", "latent_dim", "rotary_dim", "head_dim", "value_head_dim", "query_latent_dim",
    "out_features", "use_bias",
)  # fmt: skip


def shapes_of(module: Any, features: int) -> dict[str, tuple[int, ...]]:
    """The shape of every leaf of a module for inputs `(*B, T, features)`."""
    given = {name: getattr(module, name) for name in SIZES}
    return leaf_shapes(features=features, **given)


def initializer(leaf: str, kernel_init: Initializer, bias_init: Initializer) -> Initializer:
    """The initialiser of a leaf; scales of norms start at 1."""
    if leaf.endswith("kernel"):
        return flat_init(kernel_init, contracted(leaf))
    return bias_init if leaf.endswith("bias") else nnx.initializers.ones_init()


def attend(
    module: Any,
    params: LatentParams,
    inputs: Array,
    mask: Array | Mask | None,
    bias: Array | None,
    dropout_key: PRNGKeyArray | None,
    functions: ModFunctions,
    *,
    is_causal: bool,
    positions: Array | None,
) -> jax.Array:
    """`latent_attention` with the settings of a module."""
    require_features(inputs=inputs)
    params, inputs = cast((params, inputs), module.dtype)
    out = latent.latent_attention(
        params,
        inputs,
        positions=positions,
        rotate=module.rotate,
        bias=bias,
        mask=read_mask(mask, None, is_causal),
        semantics=module.semantics,
        dropout_key=dropout_key,
        implementation=module.implementation,
        score_mod=functions.score_mod,
        mask_mod=functions.mask_mod,
    )
    found: jax.Array = cast(out, module.dtype)
    return found


def settings_of(
    params: LatentParams, semantics: Semantics, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a module that holds these parameters.

    Raises:
      ValueError: no module has exactly these leaves, or an argument in `given` contradicts them.
    """
    found = sizes(params)
    made: dict[str, Any] = {
        "num_heads": found["N"],
        "latent_dim": found["L"],
        "rotary_dim": found["R"],
        "head_dim": found["H"],
        "value_head_dim": found["h"],
        "query_latent_dim": None if params.query_latent is None else found["P"],
        "out_features": found.get("Do"),
        "use_bias": params.latent.bias is not None,
        "semantics": semantics,
        "param_dtype": np.dtype(params.query.kernel.dtype),
    }
    held = leaf_shapes(features=found["Dq"], **{name: made[name] for name in SIZES})
    if held.keys() != (present := leaves(params).keys()):
        missing, more = sorted(held.keys() - present), sorted(present - held.keys())
        raise ValueError(
            f"params: a module has the leaves {sorted(held)}; these lack {missing} and have {more} "
            "more: call jaxmha.latent_attention with them"
        )
    defaults = {"value_head_dim": found["H"], "out_features": found["Dq"]}
    reject_others(made, given, defaults)
    return {**made, **given}


def reject_in_steps(dropout_key: PRNGKeyArray | None, **arrays: Array | None) -> None:
    """Raises ValueError for a dropout key or an array, which steps over a cache do not support."""
    given = [name for name, x in {"dropout": dropout_key, **arrays}.items() if x is not None]
    if given:
        raise ValueError(
            f"decode: a step over the cache takes no {' and no '.join(given)}; tokens have the "
            "positions of their slots, and deterministic=True switches dropout off"
        )
