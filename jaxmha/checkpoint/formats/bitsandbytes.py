"""Dequantises weights of bitsandbytes: NF4 and FP4, also with quantised scales, and int8.

https://github.com/bitsandbytes-foundation/bitsandbytes/blob/main/bitsandbytes/functional.py
"""

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmha.checkpoint.errors import MalformedFile, UnsupportedFormat
from jaxmha.checkpoint.formats.quantised import AGAIN, PIECE, Quantised
from jaxmha.checkpoint.json_text import parse
from jaxmha.checkpoint.limits import Budget, Limits
from jaxmha.checkpoint.plan import Contents
from jaxmha.checkpoint.tensor import TensorInfo

_STATE = ".quant_state.bitsandbytes__"
_INT8 = np.float32(7.874015718698502e-3)  # 1/127, as the library writes it
_MOST = 1 << 12  # most bytes of a quant_state
_DTYPES = ("float16", "bfloat16", "float32")
_Path = str | os.PathLike[str]


def found(contents: Contents, path: _Path) -> Iterator[tuple[str, Quantised]]:
    """Yields the name and the description of every weight of bitsandbytes."""
    for name in contents.info:
        weight, state, kind = name.partition(_STATE)
        if state and weight in contents.info:
            yield weight, _four_bits(weight, kind, name, contents, path)
        elif name.endswith(".SCB") and f"{name.removesuffix('SCB')}weight" in contents.info:
            yield f"{name.removesuffix('SCB')}weight", _int8(name, contents, path)


def _int8(name: str, contents: Contents, path: _Path) -> Quantised:
    weight, form = (f"{name.removesuffix('SCB')}{x}" for x in ("weight", "weight_format"))
    one, scale = contents.info[weight], contents.info[name]
    if one.dtype != np.int8 or len(one.shape) != 2 or scale.size != one.shape[0]:
        raise MalformedFile(path, f"a scale of {scale.shape} does not fit {one.shape}", AGAIN, name)
    parts: tuple[str, ...] = (weight, name)
    if form in contents.info:
        if contents.info[form].size != 1 or contents.load(form).item() != 0:
            problem = "its int8 weights are ordered for a GPU"
            raise UnsupportedFormat(path, problem, "dequantise it with its library", form)
        parts = (*parts, form)
    made = TensorInfo(one.shape, np.dtype(np.float32))
    return Quantised("int8 of bitsandbytes", made, parts, _from_int8)


def _from_int8(weight: NDArray[Any], scale: NDArray[Any], *_: NDArray[Any]) -> NDArray[Any]:
    out = weight.astype(np.float32)
    out *= scale.astype(np.float32).reshape(-1, 1)
    out *= _INT8
    return out


def _four_bits(weight: str, kind: str, name: str, contents: Contents, path: _Path) -> Quantised:
    info = contents.info
    if kind not in ("nf4", "fp4") or not 0 < info[name].nbytes <= _MOST:
        raise UnsupportedFormat(path, f"the type {kind!r} of bitsandbytes", AGAIN, name)
    raw, budget = contents.load(name).tobytes(), Budget(path, _MOST, Limits())
    state = parse(raw, budget, AGAIN, name, numbers=True)
    shape, dtype = state.get("shape"), state.get("dtype")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise MalformedFile(path, "quant_state has no shape", AGAIN, name)
    if dtype not in _DTYPES:
        raise MalformedFile(path, f"quant_state has the dtype {str(dtype)[:20]}", AGAIN, name)
    made = TensorInfo(tuple(shape), np.dtype(dtype))
    block, offset = state.get("blocksize"), state.get("nested_offset")
    if type(block) is not int or block < 1:
        raise MalformedFile(path, "quant_state has no blocksize", AGAIN, name)
    keys = ["absmax", "quant_map"]
    sizes = {"absmax": -(-made.size // block)}
    sizes |= {"quant_map": 16}
    if offset is not None:
        inner = state.get("nested_blocksize")
        keys += ["nested_absmax", "nested_quant_map"]
        blocks = -(-sizes["absmax"] // inner) if type(inner) is int and inner > 0 else -1
        sizes |= {"nested_absmax": blocks, "nested_quant_map": 256}
    for key in keys:
        if f"{weight}.{key}" not in info or info[f"{weight}.{key}"].size != sizes[key]:
            raise MalformedFile(path, f"{key} does not fit the weight", AGAIN, f"{weight}.{key}")
    if info[weight].nbytes != -(-made.size // 2):
        problem = f"{info[weight].nbytes} bytes are no 4-bit weight of {made.shape}"
        raise MalformedFile(path, problem, AGAIN, weight)
    make = partial(_from_four_bits, info=made, block=block, state=state)
    parts = (weight, *(f"{weight}.{key}" for key in keys), name)
    return Quantised(f"{kind.upper()} of bitsandbytes", made, parts, make)


def _from_four_bits(
    weight: NDArray[Any],
    scales: NDArray[Any],
    table: NDArray[Any],
    *nested: NDArray[Any],
    info: TensorInfo,
    block: int,
    state: dict[str, Any],
) -> NDArray[Any]:
    """Looks up the high and the low half of each byte, and multiplies by the scale of the block."""
    if len(nested) > 1:
        factors, values = nested[0].astype(np.float32), nested[1].astype(np.float32)
        within = np.arange(scales.size) // state["nested_blocksize"]
        scales = values[scales.reshape(-1)] * factors.reshape(-1)[within]
        scales += np.float32(state["nested_offset"])
    raw, known = weight.reshape(-1).view(np.uint8), table.astype(np.float32).reshape(-1)
    pairs = np.stack([known[np.arange(256) >> 4], known[np.arange(256) & 15]], 1)
    out, step = np.empty(info.size, info.dtype), PIECE // 2
    for at in range(0, raw.size, step):
        values = pairs[raw[at : at + step]].reshape(-1)[: info.size - 2 * at]
        within = np.arange(2 * at, 2 * at + values.size) // block
        values = values * scales.astype(np.float32, copy=False).reshape(-1)[within]
        out[2 * at : 2 * at + values.size] = values.astype(info.dtype)
    return out.reshape(info.shape)
