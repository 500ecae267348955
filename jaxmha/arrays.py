"""Array types of the public signatures, and checks that refuse other types."""

from typing import Any, TypeAlias

import jax
import numpy as np
from numpy.typing import DTypeLike

# Not NDArray: from NumPy 2.5 on that is an alias that jaxtyping cannot look into.
Array: TypeAlias = jax.Array | np.ndarray[tuple[Any, ...], np.dtype[Any]]

__all__ = ["Array", "DTypeLike", "are_arrays", "none_foreign"]

# Frameworks whose tensors have shapes and dtypes too, and how theirs become arrays.
FOREIGN: dict[str, str] = {"torch": ".detach().cpu().numpy()", "tensorflow": ".numpy()"}


def are_arrays(**arguments: Any) -> None:
    """Raises TypeError for an argument other than None that is no array of NumPy or JAX."""
    for name, value in arguments.items():
        if value is None or isinstance(value, jax.Array | np.ndarray):
            continue
        none_foreign(name, value)
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            hint = f": make it one with np.asarray({name})" * isinstance(value, list | tuple)
            raise TypeError(f"{name} must be an array, got {type(value).__name__}{hint}")


def none_foreign(name: str, tree: Any) -> None:
    """Raises TypeError for a leaf that is a tensor of another framework, which is not imported."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array | np.ndarray):
            continue
        framework = type(leaf).__module__.partition(".")[0]
        if framework in FOREIGN and hasattr(leaf, "dtype"):
            called = f"{name}{jax.tree_util.keystr(path)}"
            wide = ".float()" if framework == "torch" and "bfloat16" in str(leaf.dtype) else ""
            raise TypeError(
                f"{called} must be an array of NumPy or JAX, got {framework}."
                f"{type(leaf).__name__}: give {called}{wide}{FOREIGN[framework]}"
            )
