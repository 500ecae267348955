"""Pairs the outputs of two models, and measures how far each pair is apart."""

from typing import NamedTuple

import numpy as np

from jaxmha.converters.layout.arrays import is_float
from jaxmha.converters.matching.distances import distance
from jaxmha.converters.matching.proof import Departure
from jaxmha.converters.matching.running import Arguments, Outputs, Place

Pairs = dict[tuple[Place, Place], float]


class Compared(NamedTuple):
    """Pairs of outputs with their differences, and the outputs that are in none."""

    pairs: tuple[Departure, ...]
    left: tuple[str, ...]


def compare(
    mine: Outputs, theirs: Outputs, for_source: Arguments, for_target: Arguments
) -> Compared:
    """Compares the outputs of a source and a target, called with these arguments.

    Two wrong models agree in lengths, masks and inputs that they return unchanged: integers, Booleans
    and inputs that both return are left out.

    Raises:
      ValueError: nothing is left to compare.
    """
    kept_by_source, kept_by_target = _kept(mine, for_source), _kept(theirs, for_target)
    pairs = {
        (a, b): difference
        for (a, b), difference in _paired(mine, theirs, kept_by_source, kept_by_target).items()
        if not (a in kept_by_source and b in kept_by_target)
    }
    if not pairs:
        raise ValueError(
            "the models return no numbers to compare, or arrays of other sizes: the source returns "
            f"{_listed(mine, kept_by_source)}, the model {_listed(theirs, kept_by_target)}. Compared are "
            "arrays of float numbers of equal sizes, unless both are unchanged inputs: return some from both"
        )
    left = [f"{_name(a)} of the source" for a in mine if all(a != pair[0] for pair in pairs)]
    left += [f"{_name(b)} of the model" for b in theirs if all(b != pair[1] for pair in pairs)]
    return Compared(
        tuple(Departure(_name(a), _name(b), x) for (a, b), x in pairs.items()), tuple(left)
    )


def _paired(
    mine: Outputs, theirs: Outputs, kept_by_source: set[Place], kept_by_target: set[Place]
) -> Pairs:
    """Pairs outputs by key; the others in order, or if they are not as many, the nearest first."""
    ours, others = _numbers(mine), _numbers(theirs)
    named = [a for a in ours if a in others and any(isinstance(key, str) for key in a)]
    found: Pairs = {}
    for place in named:
        difference = distance(ours.pop(place), others.pop(place))
        found[place, place] = float("inf") if difference is None else difference
    in_order = [((a, b), distance(ours[a], others[b])) for a, b in zip(ours, others, strict=False)]
    if len(ours) == len(others) and all(x is not None for _, x in in_order):
        return found | {pair: x for pair, x in in_order if x is not None}
    ranked = [
        (difference, a, b)
        for b in others
        for a in ours
        if (a in kept_by_source) == (b in kept_by_target)
        and (difference := distance(ours[a], others[b])) is not None
    ]
    for difference, a, b in sorted(ranked, key=lambda row: row[0]):
        if a in ours and b in others:
            found[a, b] = difference
            del ours[a], others[b]
    return found


def _numbers(outputs: Outputs) -> Outputs:
    return {place: x for place, x in outputs.items() if is_float(x.dtype) and x.size}


def _kept(outputs: Outputs, arguments: Arguments) -> set[Place]:
    """The places of outputs that are inputs, unchanged but for the dtype."""
    import jax

    given = [np.array(x) for x in jax.tree.leaves(arguments) if hasattr(x, "dtype")]
    with np.errstate(over="ignore"):
        return {
            place
            for place, found in _numbers(outputs).items()
            if any(x.shape == found.shape and (x.astype(found.dtype) == found).all() for x in given)
        }


def _name(place: Place) -> str:
    return f"output {'.'.join(map(str, place))}" if place else "the output"


def _listed(outputs: Outputs, kept: set[Place]) -> str:
    rows = (
        f"{x.dtype} {x.shape}{' (an unchanged input)' * (place in kept)}"
        for place, x in outputs.items()
    )
    return ", ".join(rows) or "nothing"
