"""Lists the arrays of a pytree with their paths."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxmha.converters.layout.arrays import packages_of


def tree_leaves(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Returns (path, array) for every array of a pytree, in JAX's order; unwraps Flax's boxes."""
    import jax

    return [
        (tuple(map(_key, path)), leaf)
        for path, one in jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_box)[0]
        for leaf in jax.tree_util.tree_leaves(one)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    ]


def steps(tree: Any, stop: Callable[[Any], bool]) -> list[tuple[str, Any]]:
    """Returns (path, value) of each node for which `stop` is true, and of each leaf outside of them."""
    import jax

    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=stop)[0]
    return [("/".join(map(_key, path)), one) for path, one in found]


def _is_box(leaf: object) -> bool:
    """True for an nnx variable, and for a linen array boxed with its partition names."""
    return "flax" in packages_of(leaf) and any(
        hasattr(leaf, name) for name in ("get_value", "unbox")
    )


def _key(key: object) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def node(tree: Any, keys: tuple[str, ...]) -> Any:
    """Returns the node that `keys`, indices or attribute names lead to; None if a name is missing."""
    for key in keys:
        if isinstance(tree, Mapping):
            tree = next((value for name, value in tree.items() if str(name) == key), None)
        elif isinstance(tree, list | tuple) and key.isdigit():
            tree = tree[int(key)]
        else:
            tree = getattr(tree, key, None)
    return tree
