"""Array types of the public signatures, and checks that reject other types."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from reprlib import repr as brief
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import jax
import numpy as np
from numpy.typing import DTypeLike

# Not NDArray: since NumPy 2.5 it is an alias that jaxtyping cannot resolve.
Array: TypeAlias = jax.Array | np.ndarray[tuple[Any, ...], np.dtype[Any]]
P = ParamSpec("P")
Tree = TypeVar("Tree")

__all__ = [
    "Array",
    "DTypeLike",
    "as_dtype",
    "brief_array",
    "conversion_hint",
    "in_jax",
    "is_rounded",
    "lacks_values",
    "mask_hint",
    "reject_foreign",
    "require_arrays",
    "shapes_too",
    "shown",
]

# Frameworks whose tensors have a shape and a dtype, and the call that converts a tensor to NumPy.
FOREIGN: dict[str, str] = {"torch": ".detach().cpu().numpy()", "tensorflow": ".numpy()"}


def require_arrays(*, optional: bool = False, **arguments: object) -> None:
    """Raises TypeError for an argument that is not a NumPy or JAX array; `optional` allows None."""
    for name, value in arguments.items():
        if _is_fine(value) or (optional and value is None):
            continue
        reject_foreign(name, value)
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            raise TypeError(
                f"{name} must be an array, got {type(value).__name__}{conversion_hint(name, value)}"
            )


def _is_fine(leaf: object) -> bool:
    if isinstance(leaf, jax.Array):
        return True
    if not isinstance(leaf, np.ndarray) or isinstance(leaf, np.ma.MaskedArray):
        return False
    return in_jax(leaf.dtype)


def in_jax(dtype: np.dtype[Any]) -> bool:
    """True if JAX has the dtype. Integers may have any byte order, since callers cast them."""
    widest = 16 if dtype.kind == "c" else 8  # NumPy's long double has more bytes, and JAX lacks it
    ordinary = dtype.kind in "biufc" and dtype.itemsize <= widest
    return dtype.isbuiltin == 2 or (ordinary and (dtype.isnative or dtype.kind in "iu"))


def to_dtype(dtype: DTypeLike) -> np.dtype[Any]:
    """`np.dtype(dtype)` through a cast: mypy takes half a second to choose among its overloads."""
    return cast("Callable[[object], np.dtype[Any]]", np.dtype)(dtype)


def as_dtype(name: str, dtype: DTypeLike | None) -> np.dtype[Any]:
    """Converts the argument `name` to a NumPy dtype; TypeError if it is None or JAX lacks it."""
    found: np.dtype[Any] | None = None
    with suppress(TypeError):
        found = None if dtype is None else to_dtype(dtype)
    if found is None or not in_jax(found):
        raise TypeError(f"{name} must be a dtype that JAX has, such as 'float32', got {dtype!r}")
    return found


def conversion_hint(name: str, value: object) -> str:
    """The end of an error message: how to convert a list or tuple to an array; "" for others."""
    return f": make it one with np.asarray({name})" if isinstance(value, list | tuple) else ""


def mask_hint(mask: object) -> str:
    """The end of an error message: what to give instead of `mask`, neither an array nor a `Mask`."""
    if hasattr(mask, "mask_mod"):  # a BlockMask of torch's flex_attention
        return ": it holds a function, to be given as mask_mod=block_mask.mask_mod"
    if isinstance(mask, type):
        return " itself: call a constructor, such as Mask.causal()"
    if callable(mask):
        return (
            ": give a function of positions as mask_mod= to attention, and to what has no mask_mod "
            "the array that it returns for np.arange(T)[:, None] and np.arange(S)"
        )
    if isinstance(mask, list | tuple):
        return ": make it an array with np.asarray(mask, bool)"
    if isinstance(mask, str | bool):  # as an array it would be one True, and mask nothing
        return (
            f" {mask!r}: for a causal mask give Mask.causal() or is_causal=True; None masks nothing"
        )
    if isinstance(mask, int | float):
        return f" {mask!r}: a number of keys goes to key_value_seq_lengths=, of each sequence"
    if isinstance(mask, Mapping):
        return f" of {', '.join(map(repr, mask))}: give the array in it"
    return ""


def latent_hint(value: object) -> str:
    """The end of an error message that asks for `LatentParams`: a remedy if `MHAParams` came, or ""."""
    if type(value).__name__ == "MHAParams":
        return (
            ": call the function of the same name in jaxmha, such as jaxmha.extend, with a cache from "
            "jaxmha.KVCache.empty"
        )
    return ""


def params_hint(value: object) -> str:
    """The end of an error message: how to get `MHAParams` from what was given; "" if unknown."""
    if type(value).__name__ == "LatentParams":
        return ": latent attention has functions of the same names in jaxmha.latent"
    if isinstance(value, Mapping):
        return (
            ": params, semantics = import_params(...) of jaxmha.converters.flax, .torch or .keras"
        )
    packages = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    for framework in ("keras", "torch", "flax", "equinox"):  # Keras' may be torch's too
        if framework in packages:
            return f": params, semantics = jaxmha.converters.{framework}.from_module(...)"
    return ""


def shown(value: object) -> str:
    """A value for an error message: arrays by dtype and shape, long lists shortened."""
    if isinstance(value, jax.Array | np.ndarray) and value.ndim:
        return f"{value.dtype} of shape {value.shape}"
    return brief(value) if isinstance(value, list | tuple) else repr(value)


def brief_array(value: object) -> str:
    """An array or a `ShapeDtypeStruct` by dtype and shape; any other value as it prints.

    >>> brief_array(jax.ShapeDtypeStruct((2, 3), "float32"))
    'float32[2, 3]'
    """
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    return str(value)


def is_rounded(dtype: DTypeLike) -> bool:
    """True if JAX silently converts the dtype to another, as it does float64 without x64."""
    return bool(jax.dtypes.canonicalize_dtype(dtype) != dtype)


def lacks_values(tree: object) -> bool:
    """True if a leaf is a `jax.ShapeDtypeStruct`, which has no values."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def shapes_too(function: Callable[P, Tree]) -> Callable[P, Tree]:
    """Lets a function of arrays take a `jax.ShapeDtypeStruct`, as `explain` does; the function then
    returns such structures in the place of arrays."""

    @wraps(function)
    def run(*arrays: P.args, **named: P.kwargs) -> Tree:
        if lacks_values(arrays):
            return cast(Tree, jax.eval_shape(function, *arrays, **named))
        return function(*arrays, **named)

    return run


def reject_foreign(name: str, tree: object) -> None:
    """Raises TypeError for a leaf that is a tensor of another framework (without importing it), a
    masked array of NumPy, or an array of a dtype that JAX lacks."""
    if all(map(_is_fine, jax.tree.leaves(tree))):  # the usual case, without the cost of paths
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if _is_fine(leaf):
            continue
        if isinstance(leaf, np.ma.MaskedArray):
            called = f"{name}{jax.tree_util.keystr(path)}"
            raise TypeError(
                f"{called} is a masked array, and JAX would drop its mask: give {called}.filled(0), "
                "and a mask of attention, such as Mask.padding(key_value=...), where True = attend"
            )
        if isinstance(leaf, np.ndarray):
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} is {leaf.dtype}, a dtype that JAX lacks: cast "
                "it with astype, to np.float32 or another"
            )
        framework = type(leaf).__module__.partition(".")[0]
        if framework in FOREIGN and hasattr(leaf, "dtype"):
            called = f"{name}{jax.tree_util.keystr(path)}"
            wide = ".float()" if framework == "torch" and "bfloat16" in str(leaf.dtype) else ""
            if hasattr(leaf, "_materialize"):  # torch's CausalBias computes its values only then
                wide = "._materialize()"
            raise TypeError(
                f"{called} must be an array of NumPy or JAX, got {framework}."
                f"{type(leaf).__name__}: give {called}{wide}{FOREIGN[framework]}"
            )
