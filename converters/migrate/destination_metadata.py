"""Makes the metadata of the destination, and notes on facts that its format cannot store."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxmha import checkpoint
from jaxmha.checkpoint.errors import listed
from jaxmha.checkpoint.formats import table
from jaxmha.converters.discovery import (
    attention_blocks,
    head_count,
    hf_config,
    keras_groups,
    latent_blocks,
    positions,
    stored_semantics,
)
from jaxmha.converters.discovery.attention_blocks import shapes
from jaxmha.converters.discovery.head_count import Configured
from jaxmha.converters.layout.base import Layout
from jaxmha.converters.migrate import keras_order
from jaxmha.converters.migrate.plans import Plan
from jaxmha.converters.migrate.resolved import Resolved

# A format without metadata loses keys with these prefixes without a note: they are of jaxmha, which
# notes on its own, or describe only the source file.
_NO_NEWS = ("jaxmha.", "format", "total_size")
# Metadata keys of facts on single blocks: `.` and the prefix of the block follow.
_OF_BLOCKS = (stored_semantics.METADATA, positions.METADATA, head_count.METADATA)


def settings(
    destination: str | os.PathLike[str],
    plan: Plan,
    found: Resolved,
    file: checkpoint.Checkpoint,
    groups: keras_order.Groups,
    heads: Configured | None,
) -> tuple[dict[str, Any], list[str]]:
    """Returns arguments of `checkpoint.write`, and notes on facts that the format cannot store.

    `heads`: the head counts of the configuration of the source.
    """
    in_file = str(destination).endswith(".weights.h5")
    made: dict[str, Any] = {"names": found.names} if in_file else {}
    holds_metadata = table.for_writing(Path(destination)).holds_metadata
    notes = list(_config(Path(destination), plan, file, heads, holds_metadata))
    as_torch_does = ".safetensors" in Path(destination).suffixes  # its loader reads ties
    if lacking := sorted(_untied(found, file) if as_torch_does else file.tied):
        notes.append(_lacks(lacking))
    if holds_metadata:
        return made | {"metadata": _of(plan, found, file, groups, heads)}, notes
    return made, [*_lost(file, found, attention_blocks.named(plan.to)), *notes]


def copied(
    destination: Path, plan: Plan, file: checkpoint.Checkpoint
) -> tuple[dict[str, Any], list[str]]:
    """As `settings`, for a destination with all tensors of the source under their names."""
    holds_metadata = table.for_writing(destination).holds_metadata
    notes, metadata = list(_config(destination, plan, file, None, named=False)), {**file.metadata}
    if file.tied and ".safetensors" not in destination.suffixes:
        notes.append(_lacks(file.tied))
    if holds_metadata:
        if file.names and file.ordered:
            groups = {group: (group, name) for group, name in file.names.items()}
            metadata[keras_groups.METADATA] = json.dumps(groups, separators=(",", ":"))
        return {"metadata": metadata}, notes
    names = keras_groups.names(file.names, file.metadata)
    kept = {keras_groups.METADATA, "format", "total_size", *file.tied}
    if lost := sorted(file.metadata.keys() - kept):
        notes.append(
            f"metadata not carried over, for which the format has no place: {listed(lost)}"
        )
    return {"names": names, "ordered": file.ordered}, notes


def _lacks(names: Iterable[str]) -> str:
    return (
        f"the result has each tied tensor under one name, and lacks {listed(sorted(names))}: tie the "
        "parameters in the model that loads it"
    )


def _of(
    plan: Plan,
    found: Resolved,
    file: checkpoint.Checkpoint,
    groups: keras_order.Groups,
    heads: Configured | None,
) -> dict[str, str]:
    """Returns the metadata of the destination.

    It is the metadata of the source, updated with the semantics, positions, latent blocks, head
    counts and Keras groups of the converted layers.
    """
    to, blocks = attention_blocks.named(plan.to), {s.target: b for s, b in found.blocks.items()}
    sources = [*(b.prefix for b in blocks.values()), *(b.prefix for b in found.latents.values())]
    # Blocks get new prefixes: under the old ones, nothing would read these facts.
    left_out = {f"{key}.{prefix}" for key in _OF_BLOCKS for prefix in sources}
    kept = file.metadata.keys() - left_out - {keras_groups.METADATA} - _untied(found, file)
    metadata = {k: v for k, v in file.metadata.items() if k in kept}
    metadata |= keras_order.to_metadata(groups, plan.steps) if file.ordered else {}
    metadata |= stored_semantics.to_metadata(blocks, to, file.metadata)
    metadata |= latent_blocks.to_metadata(found.latents) if to.name == "jaxmha" else {}
    places = positions.of_blocks(file, list(blocks.values()), heads)
    metadata |= positions.to_metadata(file, places, {x: b.prefix for x, b in blocks.items()})
    whole = _attention_names(file) <= taken(plan)
    if whole:  # every block is converted
        metadata = {k: v for k, v in metadata.items() if not k.startswith(head_count.METADATA)}
    if not to.stores_num_heads:
        metadata |= head_count.to_metadata(found.counts, whole=whole)
    return metadata


def _untied(found: Resolved, file: checkpoint.Checkpoint) -> set[str]:
    """The other names of tied tensors whose own names are not in the destination."""
    return {
        name
        for name, own in file.tied.items()
        if own not in found.made or found.made[own].sources != (own,)
    }


def _config(
    destination: Path,
    plan: Plan,
    file: checkpoint.Checkpoint,
    heads: Configured | None,
    named: bool,
) -> Iterator[str]:
    """Yields a note if the source's configuration is missing next to the destination.

    Also if another one is there. Facts that no tensor holds would then be lost, or wrong. `named`:
    the metadata of the destination states the positions, so that the note leaves them out.
    """
    if not positions.typed(file, heads):
        return
    name, facts = hf_config.file_of(file.path).name, "masks and epsilons of norms"
    stored = "; the metadata names the positions in words" if named else ""
    facts = facts if named else f"positions, {facts}"
    present = hf_config.file_of(destination.absolute())
    if not present.exists():
        # If scales were folded into weights, advise copying it only where the metadata states the
        # semantics: other readers would apply the scale of config.json again.
        if named or not plan.fold_scale:
            yield f"no tensor holds {facts}: copy {name} next to the destination{stored}"
    elif hf_config.readable(present) != hf_config.readable(file.path):
        yield (
            f"{present} differs from the {name} of the source, and would be read as that of the "
            f"destination: replace it, or choose another folder{stored}"
        )


def _lost(file: checkpoint.Checkpoint, found: Resolved, target: Layout) -> Iterator[str]:
    """Describes facts of the source that a format without metadata cannot hold."""
    known = {text for text in positions.stated(file).values() if not text.startswith("unknown")}
    if known and not positions.typed(file):  # else the note of `_config` names them
        yield (
            f"the positions ({listed(sorted(known), 3)}) are in no tensor, and the format has no place "
            "for them: keep the source, or a config.json next to the file"
        )
    if own := [
        key for key in file.metadata if not key.startswith(_NO_NEWS) and key not in file.tied
    ]:
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
