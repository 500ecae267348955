"""Says which biases of recurrent layers a plan leaves out, so that outputs would differ."""

import re
from collections.abc import Collection, Iterator

from jaxmha.converters.matching.trees import Tree

_SECOND = re.compile(r"(?P<layer>.*)(bias_hh|bias_n)(?P<suffix>(_l\d+)?(_reverse)?)")


def notes(used: Collection[str], source: Tree) -> Iterator[str]:
    """Yields a note per layer of which lines read the recurrent weight but not the second bias.

    That is `bias_hh` of torch and `bias_n` of equinox. One that is zero changes no output.
    """
    for name in (name for name in source.arrays if name not in used):
        found = _SECOND.fullmatch(name)
        weight = f"{found['layer']}weight_hh{found['suffix']}" if found else ""
        if found is None or weight not in used or _is_zero(name, source):
            continue
        outputs, inputs = source.arrays[weight].shape
        if outputs == 3 * inputs:
            why = (
                "of the gate n it is inside the product with the gate r, where no bias of the input "
                "can replace it: take a cell that has both biases"
            )
        else:
            why = (
                f"first add it to {found['layer']}bias_ih{found['suffix']} in a dict of the arrays"
            )
        yield f"{name} is not zero, and no line reads it, so that outputs differ: {why}"


def _is_zero(name: str, source: Tree) -> bool:
    try:
        return not source.load(name).any()
    except ValueError:  # an abstract array, which has no values
        return False
