"""Positions and masks of every attention block of a checkpoint, latent attention included."""

import os
from pathlib import Path

from jaxmha import checkpoint
from jaxmha.converters.discovery import attended, attention_blocks, latent_blocks, positions
from jaxmha.converters.discovery.attended import Attended
from jaxmha.converters.discovery.latent_blocks import LatentBlock
from jaxmha.converters.discovery.positions import Positions
from jaxmha.integers import require_sizes


def positions_of(source: str | os.PathLike[str], *, length: int = 0) -> dict[str, Positions]:
    """The positional encoding of every attention block of a checkpoint, by block prefix.

    The rotary positions of latent attention rotate only its rotary features.

    `source`: a checkpoint file, or a folder with one. config.json of the model is read from the
    same folder. `length`: the longest sequence, see `rope_frequencies`; 0: up to the trained length.

    Raises:
      CheckpointError: the file cannot be read.
      ValueError: the folder has no checkpoint, or several.
    """
    require_sizes(least=0, length=length)
    with checkpoint.open(positions.in_folder(Path(source)), unbox=True) as file:
        blocks = attention_blocks.find(attention_blocks.shapes(file))
        found = positions.of_blocks(file, blocks, length=length)
        return found | {b.prefix: _of_latent(b) for b in latent_blocks.every(file, length)}


def masks_of(source: str | os.PathLike[str]) -> dict[str, Attended]:
    """The mask of every attention block of a checkpoint, by block prefix, without padding.

    `source` and errors are as in `positions_of`.
    """
    with checkpoint.open(positions.in_folder(Path(source)), unbox=True) as file:
        found = attention_blocks.find(attention_blocks.shapes(file))
        prefixes = [block.prefix for block in found]
        prefixes += [block.prefix for block in latent_blocks.every(file)]
        return attended.of_prefixes(file, found, prefixes)


def _of_latent(block: LatentBlock) -> Positions:
    if block.place is not None:
        return block.place
    text = block.facts.get(positions.METADATA)
    why = f"metadata names them as a text alone: {text}" if text else "no configuration has them"
    return Positions("unknown", why=why)
