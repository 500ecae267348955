"""Compares latent attention of two sources leaf by leaf, however their tensors are packed."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxmha.converters.discovery import positions, stored_semantics
from jaxmha.converters.discovery.latent_blocks import LatentBlock
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.verify.weights import How

Load = Callable[[str], NDArray | None]
Names = tuple[str | None, str | None]  # of a tensor in each source; None: it has none


def pairs(
    a: Sequence[LatentBlock], b: Sequence[LatentBlock]
) -> tuple[list[tuple[LatentBlock, LatentBlock]], list[LatentBlock], list[LatentBlock]]:
    """Pairs blocks by prefix ("/" equals "."); returns the pairs, and the rest of a and of b."""
    first, second = ({block.prefix.replace("/", "."): block for block in x} for x in (a, b))
    common = [prefix for prefix in first if prefix in second]
    return (
        [(first[prefix], second[prefix]) for prefix in common],
        [block for prefix, block in first.items() if prefix not in second],
        [block for prefix, block in second.items() if prefix not in first],
    )


def differences(
    pair: tuple[LatentBlock, LatentBlock],
    loads: tuple[Load, Load],
    describe: Callable[[NDArray, NDArray], How | None],
) -> Iterator[tuple[str, How, Names]]:
    """Yields the name, the difference and the tensors of every leaf and of every fact that differs.

    Facts are scale, dropout rate and positions; they are compared if both blocks know some, and are
    in no tensor.
    `describe` returns how two arrays differ, None if they are the same.
    """
    ours, theirs = (_leaves(block, load) for block, load in zip(pair, loads, strict=True))
    for leaf in dict.fromkeys([*pair[0].leaves, *pair[1].leaves]):
        name = f"{pair[0].prefix}, {leaf}"
        x, y = ours.get(leaf), theirs.get(leaf)
        tensors = _tensor(pair[0], leaf), _tensor(pair[1], leaf)
        if x is None or y is None:
            yield name, How(f"only in the {'second' if x is None else 'first'}"), tensors
        elif how := describe(x, y):
            yield name, how, tensors
    facts = [_facts(block) for block in pair]
    if all(facts):
        for what in {**facts[0], **facts[1]}:
            if facts[0].get(what) != facts[1].get(what):
                text = f"{facts[0].get(what)} and {facts[1].get(what)}"
                yield f"{pair[0].prefix}, {what}", How(text), (None, None)


def _tensor(block: LatentBlock, leaf: str) -> str | None:
    """Returns the name of the tensor that holds a leaf; None if the block lacks it."""
    key = block.leaves.get(leaf)
    return None if key is None else block.keys[key]


def _leaves(block: LatentBlock, load: Load) -> dict[str, NDArray]:
    found: dict[str, NDArray] = {}
    for key, name in block.keys.items():
        array = load(name)
        found |= {} if array is None else block.held[key].split(array)
    return found


def _facts(block: LatentBlock) -> Mapping[str, Any]:
    """Returns scale, dropout rate and positions of a block, as far as its file states them."""
    facts = json.loads(block.facts.get(stored_semantics.METADATA, "{}"))
    found = {what: value for what, value in facts.items() if what != "from"}
    place = block.facts.get(positions.METADATA)
    return found if place is None else {**found, "positions": place}
