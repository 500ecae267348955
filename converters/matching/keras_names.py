"""Gives the arrays of a Keras file the names and paths that they have in the live model."""

from collections import Counter
from dataclasses import replace

from jaxmha.converters.matching.trees import Tree


def as_live(tree: Tree) -> Tree:
    """Returns a Keras file with the array names of its live model, in which users name layers.

    An array keeps its name in the file if another array has, or would get, the same new name. Other
    trees are returned unchanged.
    """
    if tree.kind != "file" or not tree.saved:
        return tree
    names = {name: tree.saved.get(name, name) for name in tree.arrays}
    several = Counter([*names, *(new for name, new in names.items() if new != name)])
    names = {name: new if several[new] == 1 else name for name, new in names.items()}
    old = {new: name for name, new in names.items()}
    return replace(
        tree,
        arrays={new: tree.arrays[name]._replace(name=new) for new, name in old.items()},
        load=lambda new: tree.load(old[new]),
        saved=names,
        stated=lambda: {names[name]: one for name, one in tree.stated().items() if name in names},
    )


def named_alike(source: Tree, target: Tree) -> Tree:
    """Returns a Keras file, or a flat dict of one, with the paths of a target of the same names.

    The target is a Keras model whose own weights file would have the same names and shapes: Keras
    pairs arrays by these. Any other source is returned unchanged.
    """
    files = source.saved or {name: name for name in source.arrays}
    if source.kind not in ("keras state", "file") or target.kind != "keras":
        return source
    if files.keys() != target.saved.keys():
        return source
    pairs = [(source.arrays[n], target.arrays.get(target.saved[key])) for key, n in files.items()]
    if any(b is not None and a.shape != b.shape for a, b in pairs):
        return source
    arrays = {a.name: a if b is None else a._replace(path=b.path) for a, b in pairs}
    return replace(source, arrays=arrays, depends_on=target.depends_on)
