"""One attention block of a checkpoint; nothing else of the file is read."""

from pathlib import Path
from typing import NamedTuple

from jaxmha import MHAParams, Semantics
from jaxmha.converters import checkpoint, heads
from jaxmha.converters.blocks import find
from jaxmha.converters.checkpoint.errors import printable
from jaxmha.converters.sides import layers, shapes

SHOWN = 10  # names listed before "and more"


class OneBlock(NamedTuple):
    """A block with its name (a stacked layer is `prefix[i]`), and how many others there are."""

    name: str
    params: MHAParams
    semantics: Semantics
    others: int


def read(path: Path, name: str | None = None, num_heads: int | None = None) -> OneBlock:
    """The block of that name, by default the first.

    Raises:
      CheckpointError: the file cannot be read.
      ValueError: there is none of that name, with those there are; or it cannot be read.
    """
    with checkpoint.open(path) as file:
        heads.refuse_behaviour(file.path)
        there = shapes(file)
        found = find(there)
        if not found:
            raise ValueError(f"{path}: no attention block found")
        stack = None if name is None else name.partition("[")[0]
        named = [block for block in found if stack in (None, block.prefix)]
        if not named:
            names = ", ".join(block.prefix or "(top)" for block in found[:SHOWN])
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            raise ValueError(printable(f"{path} has no block {name!r}; there are {names}{more}"))
        block, configured = named[0], heads.in_config(file.path)
        count, _ = heads.find(block, there, num_heads, file.metadata, configured)
        try:
            sides = list(layers(block.prefix, block.layout.name, *block.read(file, count)))
        except ValueError as error:
            where = block.prefix or "(top)"
            raise ValueError(printable(f"{path}, block {where}: {error}")) from error
    chosen = [side for side in sides if name in (None, stack, side.name)]
    if not chosen:
        names = f"{sides[0].name} to {sides[-1].name}"
        raise ValueError(printable(f"{path} has no block {name!r}; there are {names}"))
    first = chosen[0]
    return OneBlock(first.name, first.params, first.semantics, len(found) + len(sides) - 2)
