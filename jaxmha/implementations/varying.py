"""Mesh axes over which arrays vary, in the `jax.shard_map` of a caller."""

from typing import TypeVar

import jax

Tree = TypeVar("Tree")


def varies(arrays: object) -> bool:
    """True if any array varies over a mesh axis."""
    return any(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arrays))


def alike(arrays: Tree) -> Tree:
    """Casts all arrays to the union of their varying mesh axes.

    The arrays of a loop carry must vary over the same mesh axes. The cast precedes the loop, so
    that gradients of replicated inputs are summed over devices only once.
    """
    leaves, tree = jax.tree.flatten(arrays)
    varying: list[frozenset[str]] = [jax.typeof(x).manual_axis_type.varying for x in leaves]
    names = frozenset().union(*varying)
    if not names:
        return arrays
    more = [tuple(names - before) for before in varying]
    leaves = [jax.lax.pcast(x, axes, to="varying") for x, axes in zip(leaves, more, strict=True)]
    found: Tree = jax.tree.unflatten(tree, leaves)
    return found
