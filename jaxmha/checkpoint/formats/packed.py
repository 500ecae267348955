"""Dequantises weights packed in 32-bit integers: GPTQ, AWQ, and compressed-tensors.

Every scheme computes `(number - zero point) * scale` in the dtype of the scale:

* GPTQ: https://github.com/ModelCloud/GPTQModel/blob/main/gptqmodel/nn_modules/qlinear/__init__.py
* AWQ: https://github.com/casper-hansen/AutoAWQ/blob/main/awq/utils/packing_utils.py
* compressed-tensors: https://github.com/vllm-project/compressed-tensors
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxmha.checkpoint.errors import MalformedFile, UnsupportedFormat
from jaxmha.checkpoint.formats.quantised import AGAIN, PIECE, Quantised
from jaxmha.checkpoint.formats.scaled import from_scaled
from jaxmha.checkpoint.json_text import parse
from jaxmha.checkpoint.limits import Budget, Limits
from jaxmha.checkpoint.plan import Contents
from jaxmha.checkpoint.tensor import BFLOAT16, TensorInfo

_BITS = (2, 4, 8)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position of each 4-bit number in an integer
_SETTINGS = ("config.json", "quantize_config.json")
_MOST = 1 << 22  # most bytes of a config.json
# Models of transformers whose packed layers are Conv1D, with weights (in, out).
_CONV1D = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_Path = str | os.PathLike[str]


def found(contents: Contents, path: _Path) -> Iterator[tuple[str, Quantised]]:
    """Yields the name and the description of every packed weight."""
    info, settings = contents.info, None
    for name in info:
        if name.endswith(".weight_packed"):
            yield name.removesuffix("_packed"), _compressed(name, contents, path)
        elif name.endswith(".qweight") and f"{name.removesuffix('qweight')}scales" in info:
            settings = _settings(path) if settings is None else settings
            yield f"{name.removesuffix('qweight')}weight", _packed(name, info, path, settings)


def _settings(path: _Path) -> Mapping[str, Any]:
    """The quantisation config next to the file `path`, with the model type; {} if there is none."""
    for name in _SETTINGS:
        near = Path(path).parent / name
        if near.is_file() and near.stat().st_size <= _MOST:
            budget = Budget(near, _MOST, Limits())
            content = parse(near.read_bytes().strip(), budget, AGAIN, numbers=True)
            kept = content.get("quantization_config", content)
            if isinstance(kept, dict) and "bits" in kept:
                return {**kept, "model_type": content.get("model_type")}
    return {}


def _packed(
    name: str, info: Mapping[str, TensorInfo], path: _Path, settings: Mapping[str, Any]
) -> Quantised:
    """Describes a weight of GPTQ, `in/pack out`, or of AWQ, `in out/pack`."""
    base = name.removesuffix("qweight")
    packed, zeros, scales = (info.get(f"{base}{x}") for x in ("qweight", "qzeros", "scales"))
    if packed is None or scales is None or zeros is None or packed.dtype != np.int32:
        raise MalformedFile(path, "qweight, qzeros and scales do not fit", AGAIN, name)
    if not len(packed.shape) == len(zeros.shape) == len(scales.shape) == 2:
        raise MalformedFile(path, "qweight, qzeros and scales must be matrices", AGAIN, name)
    groups, columns = scales.shape
    bits = next((b for b in _BITS if zeros.shape == (groups, -(-columns * b // 32))), 0)
    if not bits or scales.dtype not in (np.float16, np.float32, BFLOAT16):
        problem = f"zero points of {zeros.shape} for scales of {scales.shape} {scales.dtype}"
        raise UnsupportedFormat(path, problem, "only 2, 4 and 8 bits are dequantised", name)
    make: Callable[..., NDArray[Any]]
    parts = [f"{base}qweight", f"{base}qzeros", f"{base}scales"]
    if packed.shape[1] == columns:
        rows = packed.shape[0] * 32 // bits
        if (order := f"{base}g_idx") in info:
            if info[order].shape != (rows,) or info[order].dtype != np.int32:
                raise MalformedFile(path, f"g_idx does not have {rows} rows", AGAIN, name)
            parts.append(order)
        kind, shift = "GPTQ", _stored_less(path, name, settings)
        make = partial(_from_gptq, bits=bits, shift=shift, path=path)
    elif packed.shape[1] * 8 == columns and bits == 4:
        rows, kind, make = packed.shape[0], "AWQ", _from_awq
    else:
        problem = (
            f"integers of {packed.shape} for scales of {scales.shape} are neither GPTQ nor AWQ"
        )
        raise UnsupportedFormat(path, problem, "dequantise it with its library", name)
    if (kind == "AWQ" or len(parts) == 3) and (not groups or rows % groups):
        raise MalformedFile(path, f"{groups} groups do not divide {rows}", AGAIN, name)
    turned = settings.get("model_type") in _CONV1D
    made = TensorInfo((rows, columns) if turned else (columns, rows), scales.dtype)
    return Quantised(f"{kind} of {bits} bits", made, tuple(parts), partial(make, turned=turned))


def _stored_less(path: _Path, name: str, settings: Mapping[str, Any]) -> int:
    """1 if zero points are stored minus 1, as version 1 of GPTQ does, else 0.

    Raises UnsupportedFormat if the config is missing or has an unknown version.
    """
    versions = {"gptq": 1, "gptq_v2": 0}
    version = settings.get("checkpoint_format", "gptq")
    if not settings or version not in versions:
        problem = "the config.json that says how GPTQ stored its zero points is not in its folder"
        if settings:
            problem = f"its checkpoint_format {str(version)[:40]!r} is not known"
        raise UnsupportedFormat(path, problem, "download the whole model", name)
    return versions[version]


def _columns(packed: NDArray[Any], bits: int, order: tuple[int, ...] = ()) -> NDArray[np.uint8]:
    """Unpacks 32-bit integers, `rows columns`, into `rows numbers` of `bits` bits each."""
    shifts = np.array(order or range(32 // bits), np.uint32) * np.uint32(bits)
    mask = np.uint32((1 << bits) - 1)
    apart = (np.ascontiguousarray(packed).view(np.uint32)[:, :, None] >> shifts) & mask
    return apart.astype(np.uint8).reshape(len(packed), -1)


def _from_gptq(
    packed: NDArray[Any],
    zeros: NDArray[Any],
    scales: NDArray[Any],
    order: NDArray[Any] | None = None,
    *,
    bits: int,
    shift: int,
    turned: bool,
    path: _Path,
) -> NDArray[Any]:
    groups, columns = scales.shape
    rows = len(packed) * 32 // bits
    # Add the ones to whole 32-bit integers: the library subtracted them so, with borrows between
    # the numbers.
    ones = np.uint32(sum(1 << at for at in range(0, 32, bits)) * shift)
    known = _columns(np.ascontiguousarray(zeros).view(np.uint32) + ones, bits)[:, :columns]
    group = np.arange(rows) // (rows // groups) if order is None else order
    if rows and (group.min() < 0 or group.max() >= groups):
        raise MalformedFile(path, "g_idx names a group without scales", AGAIN)
    step = max(1, PIECE * bits // 32 // max(1, columns))
    pieces = (_columns(packed[at : at + step].T, bits).T for at in range(0, len(packed), step))
    return _by_group(pieces, group, known, scales, turned)


def _from_awq(
    packed: NDArray[Any], zeros: NDArray[Any], scales: NDArray[Any], *, turned: bool
) -> NDArray[Any]:
    group = np.arange(len(packed)) // (len(packed) // len(scales))
    step = max(1, PIECE // max(1, scales.shape[1]))
    pieces = (_columns(packed[at : at + step], 4, _AWQ_ORDER) for at in range(0, len(packed), step))
    return _by_group(pieces, group, _columns(zeros, 4, _AWQ_ORDER), scales, turned)


def _by_group(
    pieces: Iterable[NDArray[Any]],
    group: NDArray[Any],
    zeros: NDArray[Any],
    scales: NDArray[Any],
    turned: bool,
) -> NDArray[Any]:
    """Dequantises pieces of `in out`; `group` is the group of each row of `in`.

    Returns `out in`, or `in out` if `turned`.
    """
    out, at = np.empty((len(group), scales.shape[1]), scales.dtype), 0
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for piece in pieces:
            place = slice(at, at + len(piece))
            rows = group[place]
            difference = piece.astype(np.float32) - zeros[rows]
            out[place] = (difference * scales[rows].astype(np.float32)).astype(out.dtype)
            at += len(piece)
    return np.ascontiguousarray(out if turned else out.T)


def _compressed(name: str, contents: Contents, path: _Path) -> Quantised:
    """Describes a weight of compressed-tensors, `out in`, with scales `out groups`."""
    info, base = contents.info, name.removesuffix("_packed")
    packed, scale, shape = (info.get(f"{base}{x}") for x in ("_packed", "_scale", "_shape"))
    if packed is not None and packed.dtype == np.uint8:  # integers are packed in int32
        problem = "floating-point numbers of 4 bits (NVFP4 or MXFP4) of compressed-tensors"
        raise UnsupportedFormat(path, problem, "dequantise it with its library", name)
    if packed is None or scale is None or shape is None or len(packed.shape) != 2:
        raise MalformedFile(path, "weight_packed has no weight_scale or weight_shape", AGAIN, name)
    if packed.dtype != np.int32 or shape.shape != (2,) or shape.dtype.kind != "i":
        raise MalformedFile(path, "weight_packed or weight_shape has a wrong dtype", AGAIN, name)
    rows, columns = (int(x) for x in contents.load(f"{base}_shape"))
    if rows != packed.shape[0] or not 0 <= columns <= 32 * packed.shape[1]:
        raise MalformedFile(path, f"{packed.shape} integers are no {rows, columns}", AGAIN, name)
    widths = [b for b in range(1, 9) if -(-columns * b // 32) == packed.shape[1]]
    if len(widths) != 1 or widths[0] not in _BITS:
        problem = f"{packed.shape} integers have {' or '.join(map(str, widths)) or 'no known'} bits"
        raise UnsupportedFormat(path, problem, "dequantise it with its library", name)
    (bits,) = widths
    parts = [name, f"{base}_scale"]
    if len(scale.shape) != 2 or scale.shape[0] != rows or columns % max(1, scale.shape[1]):
        problem = f"scales of {scale.shape} do not fit {rows, columns}"
        raise MalformedFile(path, problem, AGAIN, name)
    if (zeros := f"{base}_zero_point") in info:
        if info[zeros] != TensorInfo((-(-rows * bits // 32), scale.shape[1]), packed.dtype):
            raise MalformedFile(path, "the zero points do not fit the scales", AGAIN, zeros)
        parts.append(zeros)
    parts.append(f"{base}_shape")
    made = TensorInfo((rows, columns), scale.dtype)
    make = partial(_from_compressed, bits=bits, info=made)
    return Quantised(f"int{bits} of compressed-tensors", made, tuple(parts), make)


def _from_compressed(
    packed: NDArray[Any], scale: NDArray[Any], *rest: NDArray[Any], bits: int, info: TensorInfo
) -> NDArray[Any]:
    rows, columns = info.shape

    def signed(packed: NDArray[Any], count: int) -> NDArray[np.int8]:
        apart = _columns(packed, bits)[:, :count].astype(np.int16) - (1 << (bits - 1))
        return apart.astype(np.int8)

    weight, step = np.empty(info.shape, np.int8), max(1, PIECE // max(1, columns))
    for at in range(0, rows, step):
        weight[at : at + step] = signed(packed[at : at + step], columns)
    zeros = signed(rest[0].T, rows).T if len(rest) > 1 else None
    return from_scaled(weight, scale, zeros, info=info)
