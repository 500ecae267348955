"""Layers of flax and of jaxmha side by side: sizes, random weights, inputs and masks."""

import inspect
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from tests.drawn import to_jax
from tests.promotion import foreign

B, T, S, N, H = 2, 5, 7, 3, 11
DQ, DK, DV, DO = 17, 19, 23, 29


# The oldest flax says it by a mask alone; newer ones hand the argument on to attention_fn.
KNOWN = inspect.signature(nnx.MultiHeadAttention.__call__).parameters
CAUSAL = {"is_causal": True} if "is_causal" in KNOWN else {}


class Row(NamedTuple):
    """Constructor arguments that flax and jaxmha both have; `inputs` is 1 (self), 2 or 3."""

    name: str
    settings: dict[str, Any]
    inputs: int = 1
    dtype: str = "float32"


def normal(name: str, shape: tuple[int, ...], dtype: Any = np.float32, scale: float = 1.0) -> Any:
    """A draw that belongs to a name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return to_jax((rng.standard_normal(shape) * scale).astype(dtype))


def by_numpy(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An initializer without a program for every shape."""
    return normal(f"kernel {shape}", shape, dtype, 0.4)


def randomise(tree: Any) -> Any:
    """Every leaf drawn anew, biases and scales of norms too; leaves may be shapes alone."""

    def draw(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path)
        return normal(name, x.shape, x.dtype, 0.2 if "kernel" in name else 1.0)

    return jax.tree_util.tree_map_with_path(draw, tree)


def inputs(row: Row, widths: tuple[int, int, int] = (DQ, DK, DV)) -> list[Any]:
    """Features of query, key and value, as many as the row asks for."""
    shapes = ((B, T, widths[0]), (B, S, widths[1]), (B, S, widths[2]))[: row.inputs]
    return [normal(f"input {i}", shape, row.dtype) for i, shape in enumerate(shapes)]


def pairs(columns: int, *, empty: bool = False) -> Any:
    """A mask `(B, N, T, columns)`; with `empty` one row of queries has nothing left."""
    rng = np.random.default_rng(31)
    mask = rng.random((B, N, T, columns)) < 0.6
    mask[..., 0] = True
    if empty:
        mask[0, 1, 2] = False
    return to_jax(mask)


def plain(tree: Any) -> dict[str, Any]:
    """A tree as a flat dict of NumPy arrays."""
    flat = jax.tree_util.tree_leaves_with_path(linen.meta.unbox(tree))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


def state_of(module: Any, *kinds: Any) -> dict[str, Any]:
    """The arrays of an nnx module by path."""
    state = nnx.to_flat_state(nnx.state(module, *kinds))
    return {"/".join(map(str, path)): np.asarray(value(v)) for path, v in state}


def shapes(tree: Any) -> list[tuple[str, Any, Any]]:
    """Names, shapes and dtypes of a tree."""
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path), x.shape, x.dtype) for path, x in flat]


def structure(tree: Any) -> Any:
    """The definition of a tree."""
    return jax.tree.structure(tree)


def value(variable: Any) -> Any:
    """The array in an nnx variable; keys of streams as numbers."""
    array = variable.get_value()
    keys = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(array) if keys else array


def theirs(function: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of flax's own code, which promotes implicitly."""
    with foreign():
        return function(*args, **kwargs)
