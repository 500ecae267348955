"""Pairs the outputs of two models, and measures how far each pair is apart."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxmha.converters.layout.arrays import NDArray, is_float
from jaxmha.converters.matching.distances import Order, are_whole, distances
from jaxmha.converters.matching.proof import Departure
from jaxmha.converters.matching.running import Arguments, Outputs, Place

Pairs = dict[tuple[Place, Place], list[Order]]  # the first order decides (`distances`)

REMEDY = "put random numbers there in the source, fill the model again, and compare"
_UNTRAINED = (
    ". A layer of zeros that was never trained, such as a new head or the last layer of a branch, hides "
    f"the layers before it: {REMEDY}; or return the input of that layer too. Without inputs, prove "
    "compares the arrays alone"
)


class Compared(NamedTuple):
    """Pairs of outputs, with differences and places; outputs in no pair (`left`); notes on pairs."""

    pairs: tuple[Departure, ...]
    places: tuple[tuple[Place, Place], ...]
    left: tuple[str, ...]
    notes: tuple[str, ...]


def compare(
    mine: Outputs, theirs: Outputs, for_source: Arguments, for_target: Arguments, tolerance: float
) -> Compared:
    """Compares the outputs of a source and a target, called with these arguments.

    Outputs in which even two wrong models agree are left out: integers and Booleans, such as lengths;
    inputs that both return unchanged; and equal arrays of numbers that stand in an input, in any order,
    or are whole, such as masks, indices of largest values, or zeros of a layer that was never trained.

    Raises:
      ValueError: nothing is left to compare.
    """
    kept_by_source, kept_by_target = _kept(mine, for_source), _kept(theirs, for_target)
    pairs = {
        (a, b): orders
        for (a, b), orders in _paired(mine, theirs, kept_by_source, kept_by_target).items()
        if not (a in kept_by_source and b in kept_by_target)
        and not (
            orders[0].difference <= tolerance
            and _known(mine[a], for_source)
            and _known(theirs[b], for_target)
        )
    }
    if not pairs:
        raise ValueError(
            "the models return no numbers to compare, or arrays of other sizes: the source returns "
            f"{_listed(mine, for_source)}, the model {_listed(theirs, for_target)}. Compared are arrays of "
            "float numbers of equal sizes, unless both have only numbers of inputs, or equal whole numbers: "
            f"return some from both{_UNTRAINED if _hidden(mine, for_source) else ''}"
        )
    left = [f"{name_of(a)} of the source" for a in mine if all(a != pair[0] for pair in pairs)]
    left += [f"{name_of(b)} of the model" for b in theirs if all(b != pair[1] for pair in pairs)]
    return Compared(
        tuple(_departure(a, b, orders, tolerance) for (a, b), orders in pairs.items()),
        tuple(pairs),
        tuple(left),
        tuple(_chosen(_numbers(mine), _numbers(theirs), pairs)),
    )


def _departure(a: Place, b: Place, orders: list[Order], tolerance: float) -> Departure:
    axes, difference = orders[0]
    agreeing = [order.axes for order in orders if order.difference <= tolerance < difference]
    return Departure(name_of(a), name_of(b), difference, axes, (*agreeing, None)[0])


def _chosen(mine: Outputs, theirs: Outputs, pairs: Iterable[tuple[Place, Place]]) -> Iterator[str]:
    """Yields notes on outputs that are paired by their nearness alone, with one of several."""
    if len(mine) == len(theirs):
        return
    for a, b in pairs:
        for place, roles, size, others in (
            (a, ("source", "model"), mine[a].size, theirs),
            (b, ("model", "source"), theirs[b].size, mine),
        ):
            many = sum(x.size == size for x in others.values())
            if many > 1 and not (a == b and _keyed(a)):
                yield (
                    f"{name_of(place)} of the {roles[0]} is compared with the nearest of {many} outputs of "
                    f"its size that the {roles[1]} returns: return dicts with the same keys to say which is meant"
                )


def _paired(
    mine: Outputs, theirs: Outputs, kept_by_source: set[Place], kept_by_target: set[Place]
) -> Pairs:
    """Pairs outputs by key; others in order if counts and sizes agree, else those that differ least."""
    ours, others = _numbers(mine), _numbers(theirs)
    named = [a for a in ours if a in others and _keyed(a)]
    found: Pairs = {}
    for place in named:
        orders = distances(ours.pop(place), others.pop(place))
        found[place, place] = orders or [Order((), float("inf"))]
    in_order = {(a, b): distances(ours[a], others[b]) for a, b in zip(ours, others, strict=False)}
    if len(ours) == len(others) and all(in_order.values()):
        return found | in_order
    ranked = [
        (orders, a, b)
        for b in others
        for a in ours
        if (a in kept_by_source) == (b in kept_by_target)
        and (orders := distances(ours[a], others[b]))
    ]
    for orders, a, b in sorted(ranked, key=lambda row: row[0][0].difference):
        if a in ours and b in others:
            found[a, b] = orders
            del ours[a], others[b]
    return found


def _keyed(place: Place) -> bool:
    return any(isinstance(key, str) for key in place)


def _numbers(outputs: Outputs) -> Outputs:
    return {
        place: x
        for place, x in outputs.items()
        if x.size and (is_float(x.dtype) or np.iscomplexobj(x))
    }


def _kept(outputs: Outputs, arguments: Arguments) -> set[Place]:
    """Returns the keys of outputs that equal an argument, apart from the dtype."""
    return {
        place
        for place, found in _numbers(outputs).items()
        if any(x.shape == found.shape and (x == found).all() for x in _given(arguments, found))
    }


def _known(output: NDArray, arguments: Arguments) -> bool:
    """True if every number of an output is whole, or one of the arguments: weights decide none of them."""
    known = are_whole(output)
    # Half precision has so few numbers that a result may equal one of the arguments by chance.
    if output.real.itemsize > 2:
        known = known | _among(output, arguments)
    return bool(known.all())


def _among(output: NDArray, arguments: Arguments) -> NDArray:
    """Marks the numbers of an output that are also in an argument, or 0."""
    given = [x.reshape(-1) for x in _given(arguments, output)]
    return np.isin(output, np.concatenate([np.zeros(1), *given]))


def _given(arguments: Arguments, output: NDArray) -> list[NDArray]:
    """Returns the arrays in the arguments, in the dtype of this output."""
    import jax

    given = [np.array(x) for x in jax.tree.leaves(arguments) if hasattr(x, "dtype")]
    with np.errstate(over="ignore"):
        return [
            x if np.iscomplexobj(x) else x.astype(output.dtype)
            for x in given
            if x.dtype.kind not in "OSU"
        ]


def _hidden(outputs: Outputs, arguments: Arguments) -> bool:
    """True if a layer of zeros may have made an output: zeros, or an input to which it added them."""
    return any(_among(x, arguments).all() for x in _numbers(outputs).values())


def name_of(place: Place) -> str:
    return f"output {'.'.join(map(str, place))}" if place else "the output"


def _listed(outputs: Outputs, arguments: Arguments) -> str:
    return (
        ", ".join(f"{x.dtype} {x.shape}{_why(x, arguments)}" for x in outputs.values()) or "nothing"
    )


def _why(output: NDArray, arguments: Arguments) -> str:
    """Returns why an output is not compared, in brackets; "" if it may be."""
    if output.dtype.kind in "biu" or not _known(output, arguments):
        return ""
    return f" (only {'whole numbers' if are_whole(output).all() else 'numbers of inputs'})"
