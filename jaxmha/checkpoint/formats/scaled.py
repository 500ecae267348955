"""Dequantises weights whose scales are other tensors of the checkpoint: FP8, int8 and MXFP4.

A weight is dequantised on reading, as in the library that defines its format:

* FP8 with `weight_scale_inv`, per tensor or per block:
  https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/finegrained_fp8.py
* FP8 or int8 with `weight_scale`, per tensor or per row: https://github.com/vllm-project/compressed-tensors
* MXFP4 with `_blocks` and `_scales`, as gpt-oss has it:
  https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/mxfp4.py
"""

import itertools
import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxmha.checkpoint.errors import MalformedFile
from jaxmha.checkpoint.formats.quantised import AGAIN, PIECE, Quantised
from jaxmha.checkpoint.plan import Contents
from jaxmha.checkpoint.tensor import BFLOAT16, FLOAT8, TensorInfo

_BLOCK = 128  # rows and columns of a block in DeepSeek; the last one of an axis may have fewer
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_TABLE = np.array([(_FP4[byte & 15], _FP4[byte >> 4]) for byte in range(256)], np.float32)


def found(contents: Contents, path: str | os.PathLike[str]) -> Iterator[tuple[str, Quantised]]:
    """Yields the name and the description of every quantised weight."""
    info = contents.info
    for name, one in info.items():
        base = name.removesuffix("_blocks")
        if base != name and one.dtype == np.uint8 and f"{base}_scales" in info:
            yield base, _mxfp4(name, f"{base}_scales", info, path)
        elif name.endswith("weight") and one.dtype in (*FLOAT8, np.dtype(np.int8)):
            for ending in ("_scale_inv", "_scale"):
                if f"{name}{ending}" in info:
                    yield name, _by_scale(name, f"{name}{ending}", info, path)
                    break


def _mxfp4(
    name: str, scales: str, info: Mapping[str, TensorInfo], path: str | os.PathLike[str]
) -> Quantised:
    shape, other = info[name].shape, info[scales]
    if len(shape) != 4 or other.shape != shape[:-1] or other.dtype != np.uint8:
        problem = f"blocks of {shape} and scales of {other.shape} {other.dtype} are no MXFP4"
        raise MalformedFile(path, problem, AGAIN, name)
    experts, rows, groups, width = shape
    made = TensorInfo((experts, groups * width * 2, rows), BFLOAT16)
    return Quantised("MXFP4", made, (name, scales), partial(_from_mxfp4, info=made))


def _from_mxfp4(blocks: np.ndarray, scales: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Dequantises one expert at a time: table lookup, powers of two as scales, transposition."""
    out = np.empty(info.shape, info.dtype)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        step = max(1, PIECE // max(1, info.shape[1]))
        for expert, at in itertools.product(range(len(blocks)), range(0, info.shape[2], step)):
            block, scale = blocks[expert, at : at + step], scales[expert, at : at + step]
            exponents = scale.astype(np.int32)[:, :, None, None] - 127
            values = np.ldexp(_TABLE[block], exponents).astype(info.dtype)
            out[expert, :, at : at + step] = values.reshape(len(block), -1).T
    return out


def _by_scale(
    name: str, scale: str, info: Mapping[str, TensorInfo], path: str | os.PathLike[str]
) -> Quantised:
    """Describes a weight `out in` with a scale for the tensor, every row, or every block."""
    one, other = info[name], info[scale]
    grid = _grid(one.shape, other)
    floating = other.dtype.kind == "f" or other.dtype == BFLOAT16
    exponents = other.dtype == np.uint8 or other.dtype.name == "float8_e8m0fnu"
    if grid is None or not (floating or exponents):
        problem = f"a scale of {other.shape} {other.dtype} does not fit {one.shape} {one.dtype}"
        raise MalformedFile(path, problem, AGAIN, name)
    kind = "int8" if one.dtype == np.int8 else "FP8"
    if math.prod(grid) > 1:
        kind += " per row" if grid == (one.shape[0], 1) else " per block"
    made = TensorInfo(one.shape, other.dtype if floating else BFLOAT16)
    parts: tuple[str, ...] = (name, scale)
    if (zeros := f"{name}_zero_point") in info:
        if one.dtype != np.int8 or info[zeros] != TensorInfo(other.shape, one.dtype):
            problem = f"zero points of {info[zeros].shape} {info[zeros].dtype} do not fit the scale"
            raise MalformedFile(path, problem, AGAIN, name)
        parts = (*parts, zeros)
    return Quantised(kind, made, parts, partial(from_scaled, info=made))


def _grid(shape: tuple[int, ...], scale: TensorInfo) -> tuple[int, int] | None:
    """The number of blocks along each axis; None if the shapes of weight and scale do not fit."""
    if scale.size == 1:
        return 1, 1
    if len(shape) != 2 or not scale.size or len(scale.shape) > 2:
        return None
    grid = scale.shape if len(scale.shape) == 2 else (scale.shape[0], 1)
    block = _block(shape, (grid[0], grid[1]))
    fits = block == (_BLOCK, _BLOCK) or not (shape[0] % grid[0] or shape[1] % grid[1])
    return (grid[0], grid[1]) if fits else None


def _block(shape: tuple[int, ...], grid: tuple[int, int]) -> tuple[int, int]:
    """The shape of a block: 128 x 128 if that gives the grid, else the axes divided by the grid."""
    if all(-(-n // _BLOCK) == g for n, g in zip(shape, grid, strict=True)):
        return _BLOCK, _BLOCK
    return max(1, shape[0] // grid[0]), max(1, shape[1] // grid[1])


def from_scaled(
    weight: np.ndarray, scale: np.ndarray, zeros: np.ndarray | None = None, *, info: TensorInfo
) -> np.ndarray:
    """Subtracts zero points, multiplies by the scale, and rounds once to the dtype in `info`.

    It computes in float64 if the scale is float64, else in float32.
    """
    wide: np.dtype[np.floating[Any]] = np.dtype(
        np.float64 if scale.dtype == np.float64 else np.float32
    )
    factors = scale.astype(wide)
    if scale.dtype == np.uint8:  # exponents of powers of two
        factors = np.exp2(factors - 127)
    out = np.empty(info.shape, info.dtype)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if factors.size == 1:
            shift = 0 if zeros is None else zeros.astype(wide).reshape(())
            flat, into = weight.reshape(-1), out.reshape(-1)
            for at in range(0, flat.size, PIECE):
                part = (flat[at : at + PIECE].astype(wide) - shift) * factors.reshape(())
                into[at : at + PIECE] = part.astype(info.dtype)
            return out
        grid = factors.reshape(len(factors), -1)
        block = _block(info.shape, (grid.shape[0], grid.shape[1]))
        columns = np.arange(info.shape[1]) // block[1]
        step = max(1, PIECE // max(1, info.shape[1]))
        for at in range(0, len(out), step):
            rows = np.arange(at, min(at + step, len(out))) // block[0]
            part = weight[at : at + step].astype(wide)
            if zeros is not None:
                part -= zeros.reshape(grid.shape)[rows][:, columns]
            part *= grid[rows][:, columns]
            out[at : at + step] = part.astype(info.dtype)
    return out
