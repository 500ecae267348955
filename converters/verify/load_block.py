"""Reads one attention block of a checkpoint, and no other tensor."""

from pathlib import Path
from typing import NamedTuple

from jaxmha import MHAParams, Semantics, checkpoint
from jaxmha.checkpoint.errors import printable
from jaxmha.converters.discovery import behaviours, described, head_count, user_names
from jaxmha.converters.discovery.attention_blocks import shapes
from jaxmha.converters.layout.latent import SIGN as LATENT_SIGN
from jaxmha.converters.migrate.preconditions import naming
from jaxmha.converters.verify import model_facts
from jaxmha.converters.verify.comparands import layers

SHOWN = 10  # names listed before "and more"
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
    with checkpoint.open(path, dequantise=True) as file:
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
            names = ", ".join(called[block.prefix] or "(top)" for block in found[:SHOWN])
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            raise ValueError(printable(f"{path} has no block {name!r}; there are {names}{more}"))
        block = found[0] if name is None else known[name if whole else stack]
        own, configured = called[block.prefix], described.of(file, found).heads
        count, _ = head_count.find(block, all_shapes, num_heads, file.metadata, configured)
        around = model_facts.around(file, block, configured)
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
