"""Shapes and dtypes of tensors, and conversions between arrays and bytes."""

import math
import os
import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from jaxmha.checkpoint.errors import MalformedFile
from jaxmha.checkpoint.source import Source

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8 = tuple(
    np.dtype(t)
    for t in (
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e4m3fnuz,
        ml_dtypes.float8_e5m2,
        ml_dtypes.float8_e5m2fnuz,
        ml_dtypes.float8_e8m0fnu,
    )
)
# Built-in dtypes of NumPy that have the same representation in all file formats.
NUMPY = tuple(
    np.dtype(name)
    for name in [
        "bool",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "float16",
        "uint32",
        "int32",
        "float32",
        "uint64",
        "int64",
        "float64",
        "complex64",
        "complex128",
    ]
)


class TensorInfo(NamedTuple):
    """The shape and dtype of a tensor, as its file declares them."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the tensor stored densely."""
        return self.size * self.dtype.itemsize


def swapped(raw: NDArray[np.uint8], dtype: np.dtype, order: Literal["little", "big"]) -> None:
    """Converts elements from the byte order `order` to the order of this machine, in place."""
    width = dtype.itemsize // (2 if dtype.kind == "c" else 1)
    if order != sys.byteorder and width > 1:
        raw.view(f"u{width}").byteswap(inplace=True)


def from_bytes(
    raw: NDArray[np.uint8],
    dtype: np.dtype,
    order: Literal["little", "big"],
    path: str | os.PathLike[str],
    name: str,
) -> np.ndarray:
    """Returns a flat array over `raw`; swaps writable bytes in place, and other bytes in a copy.

    Raises:
        MalformedFile: a Boolean byte that is neither 0 nor 1.
    """
    if dtype == np.bool_ and raw.size and raw.max() > 1:
        raise MalformedFile(
            path, "a Boolean tensor holds bytes other than 0 and 1", "write it again", name
        )
    if order != sys.byteorder and not raw.flags.writeable:
        raw = raw.copy()
    swapped(raw, dtype, order)
    return raw.view(dtype)


def over(
    source: Source, offset: int, shape: tuple[int, ...], dtype: np.dtype, *, fortran: bool = False
) -> np.ndarray:
    """A view of elements in a mapped file; they must have the byte order of this machine."""
    raw = source.read_array(offset, math.prod(shape) * dtype.itemsize)
    flat = raw.view(dtype)
    return flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)


def to_bytes(array: np.ndarray) -> NDArray[np.uint8]:
    """The elements as little-endian bytes in C order; a view where the array allows it."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.byteorder == ">":
        flat = flat.astype(flat.dtype.newbyteorder("="))
    raw = flat.view(np.uint8)
    if sys.byteorder == "big":
        raw = raw.copy()
        swapped(raw, flat.dtype, "little")
    return raw


def blocks(array: np.ndarray, most: int = 1 << 20) -> Iterator[np.ndarray]:
    """Yields the elements in C order, in contiguous pieces of about `most` bytes at most.

    Pieces of the default size stay in the cache between casting, digest and writing. An array that
    is not contiguous, such as a transposed one, is never copied as a whole.
    """
    return (contiguous(part).reshape(-1) for part in parts(array, most))


def parts(array: np.ndarray, most: int = 1 << 20) -> Iterator[np.ndarray]:
    """Divides the array into views of about `most` bytes at most, in C order."""
    if array.nbytes <= most or not array.ndim:
        yield array
    elif array.flags.c_contiguous:
        flat, step = array.reshape(-1), max(1, most // array.itemsize)
        for at in range(0, flat.size, step):
            yield flat[at : at + step]
    elif len(array) == 1:
        yield from parts(array[0], most)
    else:
        rows = max(1, most * len(array) // array.nbytes)
        for at in range(0, len(array), rows):
            yield from parts(array[at : at + rows], most)


_ROWS, _SLAB = 128, 3 << 17  # a slab in the CPU's cache: rows of the source, bytes of its buffer


def contiguous(array: np.ndarray) -> np.ndarray:
    """The array in C order: itself, or a copy; a large transposed array is copied slab by slab.

    NumPy would copy row by row, which touches another page of the source for each element.
    """
    if array.flags.c_contiguous:
        return array
    out = np.empty(array.shape, array.dtype)
    # View as integers of the same size: NumPy cannot export some dtypes of ml_dtypes.
    bits = f"u{array.itemsize}" if array.itemsize in (1, 2, 4, 8) else array.dtype
    _copy(out.view(bits), array.view(bits))
    return out


def _copy(out: np.ndarray, array: np.ndarray) -> None:
    out, array = _merged(out, array)
    transposed = array.ndim > 1 and abs(array.strides[-1]) > abs(array.strides[-2])
    if not transposed or math.prod(array.shape[-2:]) <= _ROWS**2:  # small arrays fit in the cache
        np.copyto(out, array)
    elif array.ndim > 2:
        for i in range(len(array)):
            _copy(out[i], array[i])
    else:
        # Each slab is copied through a buffer that fits in the cache. If rows of the source are a
        # power of 2 bytes apart, they map to few cache sets and evict each other; the rows of the
        # buffer are padded to avoid this. Slabs are large because threads wait for each other at
        # every copy.
        rows = min(_ROWS, len(array))
        width = rows + 64 // array.itemsize
        columns = min(array.shape[1], max(1, _SLAB // (width * array.itemsize)))
        buffer = np.empty((columns, width), array.dtype)
        for i in range(0, len(array), rows):
            for j in range(0, array.shape[1], columns):
                slab = array[i : i + rows, j : j + columns]
                held = buffer[: slab.shape[1], : slab.shape[0]]
                held[...] = slab.T
                out[i : i + rows, j : j + columns] = held.T


def _merged(out: np.ndarray, array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Views of both arrays, with adjacent axes merged where both are contiguous across them."""
    shape: list[int] = []
    strides: list[tuple[int, int]] = []
    for size, *steps in zip(array.shape, out.strides, array.strides, strict=True):
        if shape and strides[-1] == (size * steps[0], size * steps[1]):
            shape[-1] *= size
            strides[-1] = steps[0], steps[1]
        elif size != 1:
            shape.append(size)
            strides.append((steps[0], steps[1]))
    view = np.lib.stride_tricks.as_strided
    return (
        view(out, shape, [pair[0] for pair in strides]),
        view(array, shape, [pair[1] for pair in strides], writeable=False),
    )
