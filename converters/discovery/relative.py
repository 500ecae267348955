"""Reads relative positions of attention blocks from their tensors."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxmha import checkpoint
from jaxmha.converters.discovery.added_terms import (
    Buckets,
    Computed,
    Distances,
    Grid,
    Looked,
    Term,
    Waves,
    Window,
    classed,
    planes,
)
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.layout.arrays import NDArray, to_numpy

_T5 = "relative_attention_bias.weight"
_SAM = ("rel_pos_h", "rel_pos_w")
_MLP = tuple(
    f"rel_pos.mlp.{layer}.{array}" for layer in ("fc1", "fc2") for array in ("weight", "bias")
)
_SHAW = "distance_embedding.weight"
# lucidrains' conformer: rows go by query minus key position, unlike those of `_SHAW`, and over the same
# range in both directions.
_SHAW_BACK = "rel_pos_emb.weight"
_WAVES = (
    ("bias_u", "bias_v", "relative_k_proj.weight"),
    ("pos_bias_u", "pos_bias_v", "linear_pos.weight"),
)
# Keys of a learned bias for every pair of tokens: the table, and the row of every pair. If the file
# has only the table, it is read as that of a square window (LeViT's: of a square image).
TABLES = (
    ("self.relative_position_bias_table", "self.relative_position_index"),
    ("relative_position_bias_table", "relative_position_index"),
    ("rel_pos.relative_position_bias_table", "rel_pos.relative_position_index"),
    ("attention_biases", "attention_bias_idxs"),
    ("rel_pos_bias.weight", "rel_pos_indices"),
)


def of(block: Block, own: Mapping[str, Any], file: checkpoint.Checkpoint) -> Term | None:
    """The term that tensors of a block define; None without such tensors.

    `own`: the configuration of this part of the model. Raises ValueError if it lacks a setting.
    """
    if block.layout.name in ("t5", "mpnet"):
        return _buckets(block, own, file)
    if (found := table(block, file)) is not None:
        return found
    if (read := _read(block, file, _SHAW)) is not None:
        left = own.get("left_max_position_embeddings")
        if type(left) is not int:
            raise ValueError("left_max_position_embeddings is not in its configuration")
        return Distances(read[0], left)
    for keys in _WAVES:
        if (read := _read(block, file, *keys)) is not None:
            u, v, kernel = read
            kernel = np.moveaxis(kernel.reshape(*u.shape, kernel.shape[-1]), -1, 0)
            return Waves(u, v, kernel)
    return None


def table(block: Block, file: checkpoint.Checkpoint) -> Term | None:
    """The term that a block's tensors alone define; None if there is none or its form is unknown.

    It is a bias of pairs of tokens, learned (`TABLES`) or computed by a network (timm), or a product
    of queries with learned vectors of differences (SAM, lucidrains' conformer).
    """
    if (grid := _read(block, file, *_SAM)) is not None:
        return Grid(*grid)
    if (read := _read(block, file, _SHAW_BACK)) is not None and read[0].ndim == 2:
        return Distances(read[0][::-1], len(read[0]) // 2)
    for root in (block.prefix, "shared_rel_pos"):  # the second: one network for all blocks of timm
        names = [
            f"{root}.{key}".replace("shared_rel_pos.rel_pos", "shared_rel_pos") for key in _MLP
        ]
        if all(name in file.info for name in names):
            return Computed(*(to_numpy(file[name]) for name in names))
    for key, index in TABLES:
        if (read := _read(block, file, key, index)) is not None:
            values, rows = read
            if key.endswith("biases"):  # LeViT's table is by head, then by kind of pair
                values = values.T
            side = math.isqrt(rows.size)
            if values.ndim == 2 and side * side == rows.size:
                return Looked(values, rows.reshape(side, side))
        elif (read := _read(block, file, key)) is not None:
            return _of_differences(read[0]) if key.endswith("biases") else square(read[0])
    return None


def _of_differences(values: NDArray) -> Term | None:
    """The bias by absolute row and column differences in a square image (LeViT).

    None if the number of columns of the table `values` is not a square.
    """
    side = math.isqrt(values.shape[-1])
    if values.ndim != 2 or side * side != values.shape[-1]:
        return None
    row, column = (abs(x) for x in planes(side, side))
    return Looked(values.T, row * side + column)


def square(values: NDArray) -> Term | None:
    """The bias of a square window from its table alone (Swin, BEiT, MaxViT).

    None if the table has the rows of no square window, with or without a class token.
    """
    if values.ndim == 3 and values.shape[1] == values.shape[2]:  # by head, and key minus query
        values = np.flip(values, (1, 2)).reshape(len(values), -1).T
    if values.ndim != 2:
        return None
    for rows, first in ((len(values), False), (len(values) - 3, True)):
        if rows > 0 and (span := math.isqrt(rows)) ** 2 == rows and span % 2:
            return classed(values, (span + 1) // 2) if first else Window(values)
    return None


def _read(block: Block, file: checkpoint.Checkpoint, *keys: str) -> list[NDArray] | None:
    names = [block.layout.path(block.prefix, key) for key in keys]
    return [to_numpy(file[n]) for n in names] if all(n in file.info for n in names) else None


def is_across(block: Block) -> bool:
    """True for the cross-attention of T5, which has no relative positions."""
    return block.layout.name == "t5" and block.prefix.endswith("EncDecAttention")


def _buckets(block: Block, own: Mapping[str, Any], file: checkpoint.Checkpoint) -> Term:
    """The buckets of a T5 block.

    The first layer of a stack holds the table for the whole stack; MPNet has it in the encoder.
    """
    stack = re.match(r"(.*?)block[./]\d+[./]", block.prefix)
    whole = f"{block.prefix.partition('encoder.layer.')[0]}encoder.{_T5}"  # MPNet
    names = [f"{block.prefix}.{_T5}", whole, *_tables(file.info, stack[1] if stack else "")]
    name = next((n for n in names if n in file.info), None)
    if name is None:
        raise ValueError(f"no tensor {_T5} in its stack")
    both = "decoder" not in block.prefix.split(".")[0:2]
    most = own.get("relative_attention_max_distance", 128)
    return Buckets(to_numpy(file[name]), both, most)


def _tables(names: Mapping[str, Any], stack: str) -> Iterator[str]:
    yield from (n for n in names if n.startswith(f"{stack}block.0.") and n.endswith(_T5))
