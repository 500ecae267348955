"""Dequantises weights whose scales are other tensors of the checkpoint: FP8, int8 and MXFP4.

A weight is dequantised on reading, as in the library that defines its format:

* FP8 with `weight_scale_inv`, per tensor or per block:
  https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/finegrained_fp8.py
* FP8 or int8 with `weight_scale`, per tensor or per row: https://github.com/vllm-project/compressed-tensors
* MXFP4 with `_blocks` and `_scales`, as gpt-oss has it:
  https://github.com/huggingface/transformers/blob/main/src/transformers/integrations/mxfp4.py
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxmha.checkpoint.errors import MalformedFile, UnsupportedFormat
from jaxmha.checkpoint.plan import Contents
from jaxmha.checkpoint.tensor import BFLOAT16, FLOAT8, TensorInfo

_BLOCK = 128  # of DeepSeek; the last block of an axis may be smaller
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_TABLE = np.array([(_FP4[byte & 15], _FP4[byte >> 4]) for byte in range(256)], np.float32)
_ROWS = 1 << 20  # most elements to dequantise at once
# Suffix of tensor names -> the quantisation scheme, which is not supported.
_OTHERS = {
    ".qweight": "GPTQ or AWQ",
    ".weight_packed": "compressed-tensors with packed weights",
    ".weight.absmax": "bitsandbytes with 4 bits",
    ".SCB": "bitsandbytes with 8 bits",
    ".weight_zero_point": "compressed-tensors with zero points",
    ".weight_global_scale": "NVFP4",
}
_AGAIN = "download it again"


class _Scaled(NamedTuple):
    """A quantised weight: its kind, dequantised shape and dtype, two tensors, and dequantiser."""

    kind: str
    info: TensorInfo
    parts: tuple[str, str]
    make: Callable[[np.ndarray, np.ndarray, TensorInfo], np.ndarray]


def dequantised(contents: Contents, path: str | os.PathLike[str]) -> Contents:
    """The same contents with weights dequantised on loading, without the tensors of their scales.

    Raises:
        UnsupportedFormat: weights are quantised in another way.
        MalformedFile: the shapes of a weight and its scale do not fit.
    """
    found = dict(_found(contents.info, path))
    for name in contents.info:
        for ending, scheme in _OTHERS.items():
            if name.endswith(ending):
                problem = f"its weights are quantised by {scheme}, which is not dequantised here"
                remedy = "dequantise the model with its library and save it, or use the original"
                raise UnsupportedFormat(path, problem, remedy, name)
    if not found:
        return contents
    parts = {part for one in found.values() for part in one.parts}
    parts |= {f"{name.removesuffix('weight')}input_scale" for name in found}
    info = {name: one for name, one in contents.info.items() if name not in parts}
    info |= {name: one.info for name, one in found.items()}
    order = {name: n for n, name in enumerate(contents.info)}
    names = sorted(
        info, key=lambda name: order.get(found[name].parts[0] if name in found else name, 0)
    )

    def load(name: str) -> np.ndarray:
        one = found.get(name)
        if one is None:
            return contents.load(name)
        return one.make(contents.load(one.parts[0]), contents.load(one.parts[1]), one.info)

    def view(name: str) -> np.ndarray | None:
        return None if name in found or contents.view is None else contents.view(name)

    return replace(
        contents,
        info={name: info[name] for name in names},
        load=load,
        view=view,
        stream=None,
        part=None,
        digests={n: x for n, x in contents.digests.items() if n in info and n not in found},
        quantised={name: one.kind for name, one in found.items()},
    )


def _found(
    info: Mapping[str, TensorInfo], path: str | os.PathLike[str]
) -> Iterator[tuple[str, _Scaled]]:
    """Yields the name and the parts of every quantised weight."""
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
) -> _Scaled:
    shape, other = info[name].shape, info[scales]
    if len(shape) != 4 or other.shape != shape[:-1] or other.dtype != np.uint8:
        problem = f"blocks of {shape} and scales of {other.shape} {other.dtype} are no MXFP4"
        raise MalformedFile(path, problem, _AGAIN, name)
    experts, rows, groups, width = shape
    made = TensorInfo((experts, groups * width * 2, rows), BFLOAT16)
    return _Scaled("MXFP4", made, (name, scales), _from_mxfp4)


def _from_mxfp4(blocks: np.ndarray, scales: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Dequantises one expert at a time: table lookup, powers of two as scales, transposition."""
    out = np.empty(info.shape, info.dtype)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for expert, (block, scale) in enumerate(zip(blocks, scales, strict=True)):
            exponents = scale.astype(np.int32)[:, :, None, None] - 127
            values = np.ldexp(_TABLE[block], exponents).astype(info.dtype)
            out[expert] = values.reshape(len(block), -1).T
    return out


def _by_scale(
    name: str, scale: str, info: Mapping[str, TensorInfo], path: str | os.PathLike[str]
) -> _Scaled:
    """Describes a weight `out in` with a scale for the tensor, every row, or every block."""
    one, other = info[name], info[scale]
    grid = _grid(one.shape, other)
    floating = other.dtype.kind == "f" or other.dtype == BFLOAT16
    exponents = other.dtype == np.uint8 or other.dtype.name == "float8_e8m0fnu"
    if grid is None or not (floating or exponents):
        problem = f"a scale of {other.shape} {other.dtype} does not fit {one.shape} {one.dtype}"
        raise MalformedFile(path, problem, _AGAIN, name)
    kind = "int8" if one.dtype == np.int8 else "FP8"
    if math.prod(grid) > 1:
        kind += " per row" if grid == (one.shape[0], 1) else " per block"
    made = TensorInfo(one.shape, other.dtype if floating else BFLOAT16)
    return _Scaled(kind, made, (name, scale), _from_scaled)


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


def _from_scaled(weight: np.ndarray, scale: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Multiplies weight and scale in float32, or float64 for float64 scales, and rounds once.

    The result has the dtype in `info`.
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
            out[...] = (weight.astype(wide) * factors.reshape(())).astype(info.dtype)
            return out
        grid = factors.reshape(len(factors), -1)
        block = _block(info.shape, (grid.shape[0], grid.shape[1]))
        columns = np.arange(info.shape[1]) // block[1]
        step = max(1, _ROWS // max(1, info.shape[1]))
        for at in range(0, len(out), step):
            rows = np.arange(at, min(at + step, len(out))) // block[0]
            part = weight[at : at + step].astype(wide) * grid[rows][:, columns]
            out[at : at + step] = part.astype(info.dtype)
    return out
