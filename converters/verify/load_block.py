"""Reads one attention block of a checkpoint, and no other tensor."""

from pathlib import Path
from typing import NamedTuple

from jaxmha import MHAParams, Semantics, checkpoint
from jaxmha.checkpoint.errors import listed, printable
from jaxmha.converters.discovery import (
    attended,
    behaviours,
    described,
    head_count,
    positions,
    signs,
    user_names,
)
from jaxmha.converters.discovery.attended import Attended
from jaxmha.converters.discovery.attention_blocks import Block, shapes
from jaxmha.converters.discovery.head_count import Configured
from jaxmha.converters.layout.latent import SIGN as LATENT_SIGN
from jaxmha.converters.migrate.preconditions import naming
from jaxmha.converters.verify.comparands import layers

_LATENT = (
    ", and latent attention, which jaxmha.converters.huggingface.import_latent_params reads, is not "
    "a block of MHAParams"
)


class OneBlock(NamedTuple):
    """A block, its name (`name[i]` for layer i of a stack), and the number of other blocks.

    `positions` and `mask`: those that its model applies around it, in words; "" for none or unknown.
    """

    name: str
    params: MHAParams
    semantics: Semantics
    others: int
    positions: str
    mask: str

    def not_applied(self, *, mask: str = "") -> str:
        """The positions and the mask, except the mask `mask`, which the caller applies."""
        found = {"positions": self.positions, "mask": self.mask if self.mask != mask else ""}
        return "; ".join(f"{what}: {text}" for what, text in found.items() if text)


def read(path: Path, name: str | None = None, num_heads: int | None = None) -> OneBlock:
    """Reads the block with this name or prefix (`name[i]`: layer i of a stack).

    None reads the first block.

    Raises:
      CheckpointError: the file cannot be read.
      ValueError: no block has this name (the message lists the names), or the block cannot be read.
    """
    with checkpoint.open(path, dequantise=True, unbox=True) as file:
        all_shapes = shapes(file)
        with naming(path):
            found = behaviours.blocks(file)
        behaviours.refuse_unread(file, found)
        if not found:
            latent = any(name.endswith(f".{LATENT_SIGN}") for name in all_shapes)
            raise ValueError(f"{path}: no attention block found{_LATENT * latent}")
        called = user_names.distinct_names((block.prefix for block in found), file.names)
        known = {alias: b for b in found for alias in (b.prefix, called[b.prefix])}
        stack, bracket, index = (name or "").rpartition("[")  # `name[i]`: layer i of a stack
        whole = name is None or name in known
        if not whole and not (bracket and stack in known):
            names = listed([called[block.prefix] or "(top)" for block in found], 10)
            raise ValueError(printable(f"{path} has no block {name!r}; there are {names}"))
        block = found[0] if name is None else known[name if whole else stack]
        own, configured = called[block.prefix], described.of(file, found).heads
        count, _ = head_count.find(block, all_shapes, num_heads, file.metadata, configured)
        around = _around(file, block, configured)
        try:
            candidates = list(layers(own, block.layout.name, *block.read(file, count)))
        except ValueError as error:
            where = own or "(top)"
            raise ValueError(printable(f"{path}, block {where}: {error}")) from error
    chosen = [layer for layer in candidates if whole or layer.name == f"{own}[{index}"]
    if not chosen:
        names = f"{candidates[0].name} to {candidates[-1].name}"
        raise ValueError(printable(f"{path} has no block {name!r}; there are {names}"))
    first = chosen[0]
    others = len(found) + len(candidates) - 2
    return OneBlock(first.name, first.params, first.semantics, others, *around)


def _around(file: checkpoint.Checkpoint, block: Block, heads: Configured | None) -> tuple[str, str]:
    """Positions and mask in words that a model applies around a block; "" for none or not known.

    `heads`: the head counts of the configuration next to the file.
    """
    if positions.typed(file, heads):
        place = positions.of_blocks(file, [block], heads)[block.prefix]
        mask = attended.of_prefixes(file, [block], [block.prefix], heads)[block.prefix]
        no_mask = mask.scheme == "unknown" or mask == Attended("full")
        return str(place) if place.applied else "", "" if no_mask else str(mask)
    stated = positions.stated(file).get(block.prefix, "")
    if not stated and block.layout.name in signs.IMPLIED:
        stated = f"mostly {signs.IMPLIED[block.layout.name]}: no config.json says which"
    nothing = stated.startswith(("none", "unknown")) and not stated.endswith(positions.SCALED)
    return "" if nothing else stated, ""
