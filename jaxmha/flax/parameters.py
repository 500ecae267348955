"""Names and initialisers of parameters, equal to those of flax."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta
from jax.sharding import NamedSharding, PartitionSpec
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
    names: Sequence[str], sizes: Mapping[str, int], *, norms: bool
) -> dict[str, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Name of a layer -> (name, shape) of its arrays, for the leaves `names` of `extra_params`.

    `norms`: the module has learned norms of queries and keys.

    Raises:
      ValueError: a name is not in `EXTRA`, two names stand for one array, or a layer is absent.
      TypeError: `names` is not a tuple.
    """
    _check(names, norms)
    found: dict[str, tuple[tuple[str, tuple[int, ...]], ...]] = {}
    for leaf in names:
        layer, *name = PATHS[leaf]
        shape = tuple(sizes[letter] for letter in CANONICAL[leaf].split())
        found[layer] = (*found.get(layer, ()), ("".join(name), shape))
    return found


def _check(names: Sequence[str], norms: bool) -> None:
    if not isinstance(names, tuple | list):
        raise TypeError(f"extra_params must be a tuple of names, got {names!r}")
    for leaf in names:
        if leaf not in EXTRA:
            raise ValueError(f"extra_params must be names among {', '.join(EXTRA)}, got {leaf!r}")
    fields = [field_of(leaf) for leaf in names]
    for leaf, field in zip(names, fields, strict=True):
        if fields.count(field) > 1:
            raise ValueError(f"extra_params names {field} more than once: {tuple(names)}")
        if leaf in NORMS and not norms:
            raise ValueError(
                f"extra_params: {leaf} needs learned norms of queries and keys: normalize_qk=True, "
                "or Semantics with qk_norm and qk_norm_learned"
            )
        if field == "gate.bias" and "gate.kernel" not in fields:
            raise ValueError(f"extra_params: {leaf} needs gate.kernel or gate_heads.kernel")


def flat_init(init: Initializer, contracted: int) -> Initializer:
    """Returns an initialiser that draws a matrix (a vector if `contracted` is 0), and reshapes it
    to a kernel whose first `contracted` axes are inputs.

    flax draws its kernels in the same way; initialisers compute their fans from the matrix.
    """

    def draw(key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike) -> PyTree:
        axes = shape[:contracted], shape[contracted:]
        flat = tuple(math.prod(x) for x in axes[contracted == 0 :])
        drawn = init(key, flat, dtype)
        if isinstance(drawn, nnx.VariableMetadata):  # metadata of nnx, which are no pytree
            return replace(drawn, raw_value=jnp.reshape(drawn.raw_value, shape))
        # tree.map: partitioning metadata of linen box the array in a pytree.
        return jax.tree.map(lambda x: jnp.reshape(x, shape), drawn)

    return draw


# Metadata of nnx that have an entry for every axis; the last two are flax's older names.
_SHARDINGS = ("out_sharding", "sharding", "sharding_names")


def metadata_of_rank(metadata: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Cuts the sharding metadata of a kernel or bias to its first `rank` axes."""
    return {
        name: _first(value, rank) if name in _SHARDINGS else value
        for name, value in metadata.items()
    }


def init_of_rank(init: Initializer, rank: int) -> Initializer:
    """Draws as `init` does, and cuts its sharding metadata to the first `rank` axes."""

    def draw(*arguments: Any) -> PyTree:
        drawn = init(*arguments)
        if isinstance(drawn, nnx.VariableMetadata):
            return replace(drawn, metadata=metadata_of_rank(drawn.metadata, rank))
        if isinstance(drawn, meta.Partitioned):
            return drawn.replace(names=_first(drawn.names, rank))
        return drawn

    return draw


def _first(spec: Any, rank: int) -> Any:
    """The entries of the first `rank` axes."""
    if isinstance(spec, NamedSharding):
        first = _first(spec.spec, rank)
        return NamedSharding(spec.mesh, first, memory_kind=spec.memory_kind)
    if isinstance(spec, PartitionSpec):
        return PartitionSpec(*spec[:rank])  # type: ignore[no-untyped-call]
    return spec[:rank] if isinstance(spec, tuple) else spec


def scale_init(offset: float) -> Initializer:
    """Scales of norms that multiply by 1 once `Semantics.qk_norm_offset` is added."""
    return jax.nn.initializers.constant(1.0 - offset)


def bias_kv_init(
    key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Xavier-normal on `(1, 1, K * H)`, where both fans are `K * H`, as torch draws bias_k."""
    return jax.nn.initializers.normal(math.prod(shape) ** -0.5)(key, shape, dtype)
