"""Finds layers of Flax and equinox that normalise the weights of another layer at each call."""

import re
import sys
from collections.abc import Mapping
from typing import Any

from jaxmha.checkpoint.errors import listed
from jaxmha.converters.matching.trees import Tree, is_nnx

_CLASSES = ("WeightNorm", "SpectralNorm")
_BY_LEAF = {"scale": "WeightNorm", "u": "SpectralNorm", "sigma": "SpectralNorm"}
_OF_NNX = re.compile(r"(?:scales|batch_stats)/\('.*?(u|sigma)?',?\)")
_WHOLE = {
    "WeightNorm": "weight * scale / norm of the weight over all axes but that of its features",
    "SpectralNorm": "weight / sigma, its largest singular value",
}


def layers(model: Any) -> dict[str, str]:
    """Maps the path of each weight-normalising layer in a model to its class; {} for files."""
    if is_nnx(model) and not hasattr(model, "flat_state"):
        from flax import nnx

        found = [("/".join(map(str, path)), one) for path, one in nnx.iter_modules(model)]
    elif "equinox" in sys.modules:
        from jaxmha.converters.matching.leaves import steps

        found = steps(model, lambda node: bool(_class(node)))
    else:
        return {}
    return {path: kind for path, one in found if (kind := _class(one))}


def parts(tree: Tree) -> dict[str, str]:
    """Maps each array that a weight-normalising layer adds, such as a scale, to the layer's class."""
    paths = {array.path for array in tree.arrays.values()}
    found = {}
    for name, array in tree.arrays.items():
        if match := _OF_NNX.fullmatch("/".join(array.path[-2:])):
            found[name] = f"nnx.{_BY_LEAF[match[1] or 'scale']}"
        elif array.path[-1] == "g" and re.match(r"equinox\..*\.WeightNorm$", array.owner):
            found[name] = "equinox.nn.WeightNorm"
        elif array.path[-1] in _BY_LEAF and _of_linen(array.path[:-1], paths):
            found[name] = f"linen.{_BY_LEAF[array.path[-1]]}"
    return found


def refuse(of: Mapping[str, str], arrays: Mapping[str, str]) -> None:
    """Raises ValueError, with the remedy, if a source has weight-normalising layers.

    `of`: what `layers` found in the source, if it is live; `arrays`: what `parts` found in it.
    """
    if not (found := of or arrays):
        return
    layer = next(iter(found.values()))
    how = f"store its result, {_WHOLE[layer.rpartition('.')[2]]}"
    if of and layer.startswith("nnx."):
        how = "call the model once, which stores the result"
    raise ValueError(
        f"{layer} of the source ({listed([name or 'the model' for name in found])}) normalises a "
        "weight at each call, and what is stored is not what it computes with: "
        f"{how}, and put the layer that it wraps in its place"
    )


def advice(layer: str) -> str:
    """Returns advice on an array that a layer of a weight-normalising class adds to a target."""
    scales = " and set its scales to the norms of the loaded weights over all axes but that of their features"
    return (
        f"{layer} normalises a weight by it, and the source has the whole weight: load the layer "
        f"before {layer} wraps it,{scales * layer.endswith('WeightNorm') or ' as it is'}"
    )


def _class(layer: object) -> str:
    """Returns the class of a weight-normalising layer, such as "nnx.WeightNorm"; "" for others."""
    for base in type(layer).__mro__:
        library = base.__module__.split(".")[0]
        if base.__name__ in _CLASSES and library in ("flax", "equinox"):
            return f"{'nnx' if library == 'flax' else library + '.nn'}.{base.__name__}"
    return ""


def _of_linen(path: tuple[str, ...], paths: set[tuple[str, ...]]) -> bool:
    """True if an array has this path without one part, the name of the normalising layer in linen.

    Linen stores `Dense_0/kernel` and `WeightNorm_0/Dense_0/kernel/scale`.
    """
    return any(path[:n] + path[n + 1 :] in paths for n in range(len(path) - 1))
