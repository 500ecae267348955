"""Lists the contents of a checkpoint: attention blocks, other layers, and the rest."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jaxmha import checkpoint
from jaxmha.checkpoint.errors import printable
from jaxmha.converters.discovery import (
    adapters,
    attended,
    behaviours,
    damaged_blocks,
    described,
    head_count,
    hf_config,
    latent_blocks,
    other_layers,
    positions,
    unconverted,
    unknown_attention,
)
from jaxmha.converters.discovery.attention_blocks import Block, shapes
from jaxmha.converters.layout.transform import bind_shapes
from jaxmha.converters.migrate import of_optimizers
from jaxmha.converters.migrate import plans as planning


@dataclass(frozen=True)
class BlockInfo:
    """One attention block of a file.

    Attributes:
      prefix: prefix of the tensor names; `name` is the user's name for the block, if the format
        stores one.
      layout: name of the layout.
      num_heads: head count, None if unknown; `num_heads_from` says where it was found, or why not.
      shapes: key -> shape, for keys that were found. dtype: dtype of the block's first tensor.
      family, pattern: models that have such blocks at such a prefix; None if only the keys decide.
      also_fits: other layouts with the same keys, if no family decides.
      confidence: "certain": a known family has such blocks at the prefix, and a head count from a
        config is from a config of this family; "ambiguous": several layouts have these keys, and no
        family decides; "likely": otherwise. why: the reason for the confidence.
      positions: description of the positional encoding.
    """

    prefix: str
    name: str
    layout: str
    num_heads: int | None
    num_heads_from: str
    dtype: str
    shapes: dict[str, tuple[int, ...]]
    family: str | None
    pattern: str | None
    also_fits: tuple[str, ...]
    confidence: str
    why: str
    positions: str


@dataclass(frozen=True)
class LayerInfo:
    """One layer other than attention: linear, norm, embedding etc. (`layer_layouts`).

    `other_layers.Module` explains the attributes.
    """

    kind: str
    prefix: str
    convention: str
    dtype: str
    shapes: dict[str, tuple[int, ...]]
    confidence: str
    why: str


@dataclass(frozen=True)
class FileInfo:
    """The contents of a file: attention blocks, and everything else by kind.

    Attributes:
      other_tensors: shapes of all tensors outside attention.
      layers: the layers recognised among these tensors. not_understood: name of another tensor ->
        the reason; a conversion copies it unchanged, or raises.
      dtypes: dtype -> number of tensors.
      damaged: descriptions of blocks that lack arrays; `convert` and `verify` raise for them.
      notes: remarks, such as why a config next to the file was ignored, and which computations
        around the projections (positions, masks) no conversion copies.
    """

    path: str
    format: str
    blocks: tuple[BlockInfo, ...]
    other_tensors: dict[str, tuple[int, ...]]
    layers: tuple[LayerInfo, ...]
    not_understood: dict[str, str]
    dtypes: dict[str, int]
    damaged: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON-compatible data."""
        return asdict(self)


def inspect(path: str | os.PathLike[str], *, num_heads: int | None = None) -> FileInfo:
    """Lists the attention blocks of a checkpoint and everything else in it.

    Raises:
      CheckpointError: the file cannot be read.
      ValueError: two layouts fit a block, or the given head count does not fit.
    """
    with hf_config.read_once(), checkpoint.open(path, unbox=True) as file:
        all_shapes = shapes(file)
        found = behaviours.blocks(file)
        description = described.of(file, found)
        infos = []
        places = positions.of_blocks(file, found, description.heads)
        masks = attended.of_prefixes(file, found, [b.prefix for b in found], description.heads)
        for block in found:
            count = _heads(file, block, all_shapes, num_heads, description.heads)
            infos.append(
                _block_info(file, block, count, description.heads, str(places[block.prefix]))
            )
        taken = {name for block in found for name in block.keys.values()}
        others = {name: info.shape for name, info in file.info.items() if name not in taken}
        recognised, unknown = other_layers.find(
            file.info, found, description.unlike, description.unbiased
        )
        dtypes = Counter(str(info.dtype) for info in file.info.values())
        damaged_at = damaged_blocks.find(all_shapes, found)
        damaged = tuple(damaged_at.values())
        apart = unknown_attention.find(all_shapes, found, damaged_at)
        latents = latent_blocks.find(file)
        around = unconverted.notes(
            file.path,
            others,
            dict.fromkeys(b.layout.name for b in found),
            behaviours.carried(found, file),
        )
        return FileInfo(
            str(path),
            file.format,
            tuple(infos),
            others,
            tuple(_layer_info(file, layer) for layer in recognised),
            unknown,
            dict(dtypes),
            damaged,
            (
                *description.notes,
                *around,
                *positions.notes(file, places),
                *attended.notes(masks),
                *unknown_attention.notes(
                    of_optimizers.weights_of(file, latent_blocks.without(apart, latents)),
                    hf_config.model_types(file),
                ),
                *latent_blocks.notes(latents, converted=False),
                *filter(None, [adapters.describe(file.info)]),
                *file.notes,
            ),
        )


def _layer_info(file: checkpoint.Checkpoint, layer: other_layers.Module) -> LayerInfo:
    return LayerInfo(
        layer.kind,
        layer.prefix,
        layer.convention.name,
        str(file.info[next(iter(layer.keys.values()))].dtype),
        {key: file.info[name].shape for key, name in layer.keys.items()},
        layer.confidence,
        layer.why,
    )


def _block_info(
    file: checkpoint.Checkpoint,
    block: Block,
    count: tuple[int | None, str],
    configured: head_count.Configured | None,
    place: str,
) -> BlockInfo:
    """Describes a block; `count`: its head count and where it was found.

    `place`: description of its positional encoding.
    """
    family, pattern = block.family or (None, None)
    return BlockInfo(
        block.prefix,
        file.names.get(block.prefix, ""),
        block.layout.name,
        *count,
        str(file.info[next(iter(block.keys.values()))].dtype),
        {key: file.info[name].shape for key, name in block.keys.items()},
        family,
        pattern,
        block.also,
        planning.confidence(block, count[1], configured),
        block.why,
        place,
    )


def _heads(
    file: checkpoint.Checkpoint,
    block: Block,
    all_shapes: Mapping[str, tuple[int, ...]],
    given: int | None,
    configured: head_count.Configured | None,
) -> tuple[int | None, str]:
    """Returns the head count of a block and where it was found, or None and the reason.

    Raises ValueError if the count given by the caller does not fit.
    """
    try:
        count, where = head_count.find(block, all_shapes, given, file.metadata, configured)
    except head_count.UnusableConfigError as error:
        return None, str(error)
    own = {key: all_shapes[name] for key, name in block.keys.items()}
    try:
        if count is not None and not block.refused:
            bind_shapes(block.layout, own, count, block.prefix)
    except ValueError as error:
        if given is not None:
            raise ValueError(printable(f"{file.path}: {error}")) from error
        return None, printable(f"{where} says {count}, which does not fit: {error}")
    return count, where
