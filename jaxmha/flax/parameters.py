"""Names and initialisers of parameters, equal to those of flax."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

from jaxmha.arrays import DTypeLike
from jaxmha.params import CANONICAL, NORMS, field_of

Initializer: TypeAlias = Callable[..., Any]

_LAYERS = {"query_norm": "query_ln", "key_norm": "key_ln"}


def _path(leaf: str) -> tuple[str, ...]:
    field = field_of(leaf)
    norm = field.removesuffix("_bias")
    if norm in _LAYERS:
        return _LAYERS[norm], "scale" if norm == field else "bias"
    return tuple(field.split("."))


# Leaf of MHAParams -> its path in the parameter tree of a flax module; flax's own path for leaves
# that flax has too.
PATHS: dict[str, tuple[str, ...]] = {leaf: _path(leaf) for leaf in CANONICAL}
# Leaves that a module has only if its argument `extra_params` names them.
EXTRA: tuple[str, ...] = tuple(
    leaf
    for leaf in CANONICAL
    if (leaf in NORMS and leaf not in _LAYERS) or leaf.startswith(("sinks", "gate"))
)


def extra_shapes(
    names: Sequence[str], sizes: Mapping[str, int]
) -> dict[str, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Name of a layer -> (name, shape) of its arrays, for the leaves `names` of `extra_params`.

    Raises:
      ValueError: a name is not among `EXTRA`.
    """
    found: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {}
    for leaf in names:
        if leaf not in EXTRA:
            raise ValueError(f"extra_params must be names among {', '.join(EXTRA)}, got {leaf!r}")
        layer, *name = PATHS[leaf]
        shape = tuple(sizes[letter] for letter in CANONICAL[leaf].split())
        found[layer] = (*found.get(layer, ()), ("".join(name), shape))
    return found


def flat_init(init: Initializer, contracted: int) -> Initializer:
    """Draws a kernel, whose first `contracted` axes are inputs, as a matrix (as a vector if 0).

    flax draws its kernels in the same way; initialisers compute their fans from the matrix.
    """

    def draw(key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike) -> PyTree:
        axes = shape[:contracted], shape[contracted:]
        flat = tuple(math.prod(x) for x in axes[contracted == 0 :])
        # tree.map: partitioning metadata boxes the array in a pytree.
        return jax.tree.map(lambda x: jnp.reshape(x, shape), init(key, flat, dtype))

    return draw


def bias_kv_init(
    key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Xavier-normal on `(1, 1, K * H)`, where both fans are `K * H`, as torch draws bias_k."""
    return jax.nn.initializers.normal(math.prod(shape) ** -0.5)(key, shape, dtype)
