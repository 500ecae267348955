"""Reads source and target of a plan, and computes weights that the source stores in parts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxmha.checkpoint.errors import listed
from jaxmha.converters.discovery import adapters
from jaxmha.converters.layout import parametrized
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.layout.parametrized import Parts
from jaxmha.converters.matching import classes, keras_names, normed, trees
from jaxmha.converters.matching.patterns import expand
from jaxmha.converters.matching.plan import Question
from jaxmha.converters.matching.terms import meaning
from jaxmha.converters.matching.trees import Array, Tree


class _OfParts(Question):
    """A question on a stored part of a weight, such as a norm: a whole weight does not determine it."""

    def case(self) -> str:
        return "zeros are wrong here, and a line has this form"


def read(source: Any, target: Any, argument: str = "target") -> tuple[Tree, Tree]:
    """Reads source and target; `argument`: name of the argument `target` in error messages.

    Where the source has the parts of torch's weight norm or of pruning, and the target has none, the
    tree of the source has the weights that torch computes from them. Adapters of the source fill
    nothing, unless the target has adapters too.

    Raises:
      ValueError: the source has only adapters, or stores a weight in parts that do not determine it,
        or normalises a weight at each call, and the target has no such arrays.
    """
    mine = keras_names.as_live(trees.read(source))
    try:
        theirs = trees.read(target, argument)
        if not adapters.find(theirs.arrays):
            mine = _without_adapters(mine)
        if not parametrized.stored(_shapes(theirs)):
            mine = _computed(mine, source)
        if not normed.layers(target) and not normed.parts(theirs):
            normed.refuse(normed.layers(source), normed.parts(mine))
    except BaseException:
        mine.close()
        raise
    return _without_copies(_without_ties(mine, theirs), theirs), theirs


def asked(questions: Sequence[Question], source: Tree, target: Tree) -> list[Question]:
    """Returns the questions with those on parts of a weight first, and the remedy as their reason.

    If the source has such parts too, the questions are unchanged.
    """
    reasons = _reasons(target) if not _reasons(source) else {}
    found, rest = list[Question](), list[Question]()
    for one in questions:
        names = (name for array in one.arrays for name in expand(array, reasons))
        if why := next((reasons[name] for name in names), ""):
            found.append(_OfParts(one.target, one.candidates, why, one.examples))
        else:
            rest.append(one)
    return [*found, *rest]


def _reasons(tree: Tree) -> dict[str, str]:
    """Maps each array that is a part of a weight to advice, if the source has the whole weight.

    Parts are those of a weight norm and the like, and the arrays of adapters.
    """
    adapter = "it is part of an adapter (LoRA or the like), and the source has none: fill the model"
    torch = {
        name: f"torch computes {key} from it, and the source has the whole weight: fill the model "
        "first, then call weight_norm or the like, which takes the weight apart"
        for key, parts in parametrized.stored(_shapes(tree)).items()
        for name in parts.names
    }
    jax = {name: normed.advice(layer) for name, layer in normed.parts(tree).items()}
    return torch | jax | dict.fromkeys(adapters.find(tree.arrays), f"{adapter} before it gets one")


def _without_adapters(tree: Tree) -> Tree:
    """Returns a tree in which arrays of adapters fit no layer; raises if there are no others."""
    if not (found := adapters.find(tree.arrays)):
        return tree
    if len(found) == len(tree.arrays):
        adapters.refuse(found)
    left = {name: tree.arrays[name]._replace(form="no") for name in found}
    note = adapters.describe(found)
    return replace(tree, arrays={**tree.arrays, **left}, notes=(*tree.notes, note))


def _without_ties(source: Tree, target: Tree) -> Tree:
    """Returns a source whose arrays fit no layer where the target ties them to others of its arrays.

    Of a head that it ties to the embedding, the target lists only the bias: so must the source. If
    the source has different values for both arrays, `loading` says that one is unused.
    """
    shapes = _shapes(source)
    again = [
        source.arrays[name]
        for name, first in target.aliases.items()
        if name in shapes and shapes[name] == shapes.get(first)
    ]
    left = {one.name: one._replace(path=(*one.path, "tied"), form="no") for one in again}
    return replace(source, arrays={**source.arrays, **left}) if left else source


def _without_copies(source: Tree, target: Tree) -> Tree:
    """Returns a source that lists a tied table once where the target has fewer arrays of its sizes.

    A file may have copies of tied arrays: a head with the values of an embedding is one.
    """
    mine, theirs = (Counter(map(_sizes, x.arrays.values())) for x in (source, target))
    more = [
        one
        for one in source.arrays.values()
        if theirs[_sizes(one)] < mine[_sizes(one)]
        and len(one.shape) == 2
        and meaning(one.path) & {"embed", "head"}
    ]
    again = {one.name: source.aliases[one.name] for one in more if one.name in source.aliases}
    heads = [x for x in more if x.name not in again and "head" in meaning(x.path)]
    again |= {head.name: first for head in heads for first in _equal(head, source)[:1]}
    if not again:
        return source
    left = {name: one for name, one in source.arrays.items() if name not in again}
    return replace(source, arrays=left, aliases={**source.aliases, **again})


def _sizes(array: Array) -> tuple[int, ...]:
    return tuple(sorted(array.shape))


def _equal(head: Array, source: Tree) -> list[str]:
    """Returns the embeddings with the values of a head; none if it is constant, as initialisers do."""
    others = [
        one.name
        for one in source.arrays.values()
        if (one.shape, one.dtype) == (head.shape, head.dtype) and "embed" in meaning(one.path)
    ]
    try:
        own = source.load(head.name) if others else np.zeros(1)
    except ValueError:  # an abstract array, which has no values
        return []
    return [x for x in others if np.ptp(own) and np.array_equal(own, source.load(x))]


def _computed(tree: Tree, model: Any) -> Tree:
    """Returns a tree with the weights that torch computes from their stored parts."""
    found = parametrized.stored(_shapes(tree))
    # Arrays of other libraries may be named like torch's parts, such as `x_g` and `x_v`. Torch takes
    # apart only a `weight` or `bias`, and so it must have been one.
    if tree.kind != "torch":
        found = {key: of for key, of in found.items() if key.endswith(("weight", "bias"))}
    if not found:
        return tree
    for key, parts in found.items():
        if not _is_exact(key, parts, tree, model):
            raise ValueError(parametrized.remedy(key, parts))
    key_of = {name: key for key, parts in found.items() for name in parts.names}
    arrays: dict[str, Array] = {}
    for name, array in tree.arrays.items():
        key = key_of.get(name, name)
        if key not in arrays:
            arrays[key] = array if key == name else _array(key, found[key], tree, model)

    def load(name: str) -> NDArray:
        return _value(found[name], tree) if name in found else tree.load(name)

    way = "as its layers do" if tree.kind == "torch" else "if nothing else computes them"
    note = f"computed from the parts that torch stores, {way}: {listed([*found])}"
    order = tuple(dict.fromkeys(key_of.get(name, name) for name in tree.order))
    return replace(tree, arrays=arrays, load=load, order=order, notes=(*tree.notes, note))


def _shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in tree.arrays.items()}


def _is_exact(key: str, parts: Parts, tree: Tree, model: Any) -> bool:
    """True if the parts determine the weight: those of pruning or of a weight norm alone."""
    if parts.remove != parametrized.PARAMETRIZE:
        return len(parts.names) == 2
    if [name.rpartition(".")[2] for name in parts.names] != ["original0", "original1"]:
        return False
    if tree.kind != "torch":
        norm, direction = (tree.arrays[name].shape for name in parts.names)
        return parametrized.norms(norm, direction)
    layer, _, leaf = key.rpartition(".")
    steps = model.get_submodule(layer).parametrizations[leaf]
    return [type(step).__name__ for step in steps] == ["_WeightNorm"]


def _array(key: str, parts: Parts, tree: Tree, model: Any) -> Array:
    last = tree.arrays[parts.names[-1]]
    form = last.form
    if tree.kind == "torch":
        form = classes.form_of(model.get_submodule(key.rpartition(".")[0]), "torch") or "raw"
    return last._replace(name=key, path=trees.split(key), form=form)


def _value(parts: Parts, tree: Tree) -> NDArray:
    """Computes a weight from its two parts in float64, rounded to the dtype in which it is stored."""
    first, last = (tree.load(name) for name in parts.names)
    a, b = first.astype(np.float64), last.astype(np.float64)
    if parts.remove == "prune.remove":
        return (a * b).astype(first.dtype)
    axes = tuple(n for n in range(b.ndim) if a.ndim == 0 or a.shape[n] == 1)
    made: NDArray = (a * b / np.sqrt(np.square(b).sum(axes, keepdims=True))).astype(last.dtype)
    return made
