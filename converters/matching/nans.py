"""Says where two models return NaN. It differs from everything: outputs that hold it never agree."""

from collections.abc import Iterable, Iterator

import numpy as np

from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.matching.distances import distances
from jaxmha.converters.matching.outputs import name_of
from jaxmha.converters.matching.running import Arguments, Place, Run

_DRAWN = "the drawn inputs hold NaN: draw numbers alone"
_MASKED = (
    "a row of scores in which masks leave nothing to attend gives NaN in many layers: draw inputs that "
    "leave something to each row"
)


def notes(
    source: Run, target: Run, pairs: Iterable[tuple[Place, Place]], arguments: tuple[Arguments, ...]
) -> Iterator[str]:
    """Yields a note on every pair of outputs with NaN, and one on the layers that first return it."""
    both = [(a, b, _nan(source.outputs[a]), _nan(target.outputs[b])) for a, b in pairs]
    both = [pair for pair in both if pair[2].any() or pair[3].any()]
    for a, b, one, other in both:
        orders = distances(one.astype("d"), other.astype("d"))
        same = bool(orders) and orders[0].difference == 0
        yield (
            f"NaN differs from everything: {one.sum()} of {one.size} numbers in {name_of(a)} of the source, "
            f"{other.sum()} of {other.size} in {name_of(b)} of the model, at {'the same' if same else 'other'} "
            "places"
        )
    if both:
        firsts = (f"{_first(source)} of the source", f"{_first(target)} of the model")
        yield f"NaN comes first from {' and '.join(firsts)}; {_DRAWN if _any(arguments) else _MASKED}"


def _nan(array: NDArray) -> NDArray:
    found: NDArray = np.isnan(array)
    return found


def _first(run: Run) -> str:
    paths = (path for path, array in run.layers.items() if _nan(array).any())
    return ".".join(next(paths, ())) or "no inner layer"


def _any(arguments: tuple[Arguments, ...]) -> bool:
    import jax

    given = (np.array(x) for x in jax.tree.leaves(arguments) if hasattr(x, "dtype"))
    return any(_nan(x).any() for x in given)
