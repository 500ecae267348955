"""Makes the metadata of the destination, and notes on facts that its format cannot store."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxmha import checkpoint
from jaxmha.checkpoint.formats import table
from jaxmha.converters.discovery import (
    attention_blocks,
    head_count,
    keras_groups,
    latent_blocks,
    positions,
    stored_semantics,
)
from jaxmha.converters.discovery.attention_blocks import shapes
from jaxmha.converters.discovery.notes import listed
from jaxmha.converters.layout.base import Layout
from jaxmha.converters.migrate import keras_order
from jaxmha.converters.migrate.plans import Plan
from jaxmha.converters.migrate.resolved import Resolved

# Metadata keys with these prefixes are dropped without a note: they are made again for the
# destination, or apply only to the source.
_NO_NEWS = ("jaxmha.", "format", "total_size")


def settings(
    destination: str | os.PathLike[str],
    plan: Plan,
    found: Resolved,
    file: checkpoint.Checkpoint,
    groups: keras_order.Groups,
) -> tuple[dict[str, Any], list[str]]:
    """Returns arguments of `checkpoint.write`, and notes on facts that the format cannot store."""
    in_file = str(destination).endswith(".weights.h5")
    made: dict[str, Any] = {"names": found.names} if in_file else {}
    if table.for_writing(Path(destination)).holds_metadata:
        return made | {"metadata": _of(plan, found, file, groups)}, []
    return made, list(_lost(file, found, attention_blocks.named(plan.to)))


def _of(
    plan: Plan, found: Resolved, file: checkpoint.Checkpoint, groups: keras_order.Groups
) -> dict[str, str]:
    """Returns the metadata of the destination.

    It is the metadata of the source, updated with the semantics, positions, latent blocks, head
    counts and Keras groups of the converted layers.
    """
    to, blocks = attention_blocks.named(plan.to), {s.target: b for s, b in found.blocks.items()}
    sources = [*(b.prefix for b in blocks.values()), *(b.prefix for b in found.latents.values())]
    left_out = {f"{stored_semantics.METADATA}.{prefix}" for prefix in sources}
    kept = file.metadata.keys() - left_out - {keras_groups.METADATA}
    metadata = {k: v for k, v in file.metadata.items() if k in kept}
    metadata |= keras_order.to_metadata(groups, plan.steps) if file.ordered else {}
    metadata |= stored_semantics.to_metadata(blocks, to, file.metadata)
    metadata |= latent_blocks.to_metadata(found.latents) if to.name == "jaxmha" else {}
    places = positions.of_blocks(file, list(blocks.values()))
    metadata |= positions.to_metadata(file, {x: places[b.prefix] for x, b in blocks.items()})
    whole = _attention_names(file) <= taken(plan)
    if whole:  # every block is converted
        metadata = {k: v for k, v in metadata.items() if not k.startswith(head_count.METADATA)}
    if not to.stores_num_heads:
        metadata |= head_count.to_metadata(found.counts, whole=whole)
    return metadata


def _lost(file: checkpoint.Checkpoint, found: Resolved, target: Layout) -> Iterator[str]:
    """Describes facts of the source that a format without metadata cannot hold."""
    if own := [key for key in file.metadata if not key.startswith(_NO_NEWS)]:
        yield f"metadata not carried over, for which the format has no place: {listed(own)}"
    if not target.stores_num_heads and found.counts:
        counts = ", ".join(map(str, sorted(set(found.counts.values()))))
        yield (
            f"the head count ({counts}) is in no tensor, and the format has no place for it: "
            "keep a config.json next to the file"
        )


def taken(plan: Plan) -> set[str]:
    """The names of the tensors of all attention blocks that a plan converts."""
    return {name for step in plan.steps if step.kind == "attention" for name in step.tensors}


def _attention_names(file: checkpoint.Checkpoint) -> set[str]:
    return {name for block in attention_blocks.find(shapes(file)) for name in block.keys.values()}
