"""Mesh axes over which arrays vary, in the `jax.shard_map` of a caller."""

from typing import TypeVar

import jax

Tree = TypeVar("Tree")


def varies(arrays: object) -> bool:
    """True if any array varies over a mesh axis."""
    return any(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arrays))


def alike(arrays: Tree) -> Tree:
    """Casts all arrays to vary over the union of the mesh axes over which any of them varies.

    The arrays of a loop carry, and the operands of a primitive, must vary over the same mesh axes.
    If the cast precedes a loop, gradients of replicated inputs are summed over devices only once.
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
