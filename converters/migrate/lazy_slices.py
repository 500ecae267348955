"""Views of checkpoint tensors, whose data is read slice by slice on demand."""

import math
import mmap
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from jaxmha import checkpoint
from jaxmha.checkpoint import MalformedFile
from jaxmha.converters.layout.arrays import NDArray

SPAN = 16 << 20  # bytes of a mapped file in memory at once
# Most bytes cached of tensors that cannot be read in parts; a larger tensor is cached alone.
MOST_CACHED = 64 << 20


class _Placeholder(NamedTuple):
    """A reserved address range in place of a tensor; its memory is never accessed."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


class Slices:
    """Views of tensors for indexing and transposing; only `read` accesses the data.

    Attributes:
      views: name -> array. For a mapped file, a view of the file. Otherwise a view of reserved
        addresses without data; the addresses of a slice show which part of the tensor it covers.
    """

    def __init__(self, file: checkpoint.Checkpoint, names: list[str]) -> None:
        self.views: dict[str, NDArray] = {}
        self._file = file
        self._placeholders: list[_Placeholder] = []
        self._whole: dict[str, NDArray] = {}  # tensors that cannot be read in parts
        for name in names:
            view = file.view(name)
            self.views[name] = self._placeholder(name) if view is None else view

    def _part(self, name: str, box: tuple[slice, ...]) -> NDArray:
        if self._file.reads_parts:
            return self._file.part(name, box)
        if name not in self._whole:
            held = sum(array.nbytes for array in self._whole.values())
            if held + self._file.info[name].nbytes > MOST_CACHED:
                self._whole.clear()  # frees the kept tensors before this one is read
            self._whole[name] = self._file[name]
        return np.asarray(self._whole[name][box])

    def _placeholder(self, name: str) -> NDArray:
        info = self._file.info[name]
        # Anonymous pages that are never accessed take no memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        room = np.frombuffer(mmap.mmap(-1, max(info.nbytes, 1), flags=flags), np.uint8)
        array = room[: info.nbytes].view(info.dtype).reshape(info.shape)
        start = _address(array)
        self._placeholders.append(
            _Placeholder(name, start, start + max(info.nbytes, 1), info.shape)
        )
        return array

    def copied(self, parts: Iterable[NDArray]) -> bool:
        """True if some tensors are placeholders, and some of `parts` shares no memory with `views`.

        Such a part is a copy. A copy of a placeholder holds no data, and cannot be read: only the
        address of a view tells which part of the tensor to read.
        """
        return bool(self._placeholders) and not all(
            any(np.may_share_memory(part, view) for view in self.views.values()) for part in parts
        )

    def is_mapped(self, part: NDArray) -> bool:
        """True if a view covers mapped memory of the file."""
        return self._placeholder_of(part) is None

    def _placeholder_of(self, part: NDArray) -> _Placeholder | None:
        at = _address(part)
        return next((x for x in self._placeholders if x.start <= at < x.stop), None)

    def read(self, part: NDArray) -> NDArray:
        """Reads the data of `part`, a view of one of `views`, into a new array."""
        if not isinstance(part, np.ndarray):  # NumPy scalars are copies of reserved addresses
            raise TypeError(f"expected a view of an array, got {type(part).__name__}")
        placeholder = self._placeholder_of(part)
        if placeholder is not None:
            return _cut(self._part, placeholder, part)
        out = np.empty(part.shape, part.dtype)
        bits = f"u{part.itemsize}"  # integer views: NumPy cannot copy strided arrays of all dtypes
        _copy(*(x.view(bits) if x.itemsize in (1, 2, 4, 8) else x for x in (out, part)))
        if out.dtype == np.bool_ and out.view(np.uint8).max(initial=0) > 1:
            problem = "a Boolean tensor holds bytes other than 0 and 1"
            raise MalformedFile(self._file.path, problem, "write it again")
        return out


def _cut(read: Callable[..., NDArray], placeholder: _Placeholder, part: NDArray) -> NDArray:
    """Reads the elements of a tensor that a view of its reserved addresses covers."""
    if not part.size:
        return np.empty(part.shape, part.dtype)
    whole = [
        math.prod(placeholder.shape[k + 1 :]) * part.itemsize for k in range(len(placeholder.shape))
    ]
    first = np.unravel_index(
        (_address(part) - placeholder.start) // part.itemsize, placeholder.shape
    )
    counts = [1] * len(placeholder.shape)
    along: list[tuple[int, int]] = []  # for each axis of the view: axis of the tensor, step
    for size, stride in zip(part.shape, part.strides, strict=True):
        if size == 1:
            along.append((0, 0))
            continue
        axis = next(
            k for k, step in enumerate(whole) if step <= stride and placeholder.shape[k] > 1
        )
        along.append((axis, stride // whole[axis]))
        counts[axis] += (size - 1) * (stride // whole[axis])
    stop = [int(a) + n for a, n in zip(first, counts, strict=True)]
    if any(n > size for n, size in zip(stop, placeholder.shape, strict=True)):
        # The view is not a box of the tensor, since it goes on in its next row.
        box = read(placeholder.name, ()).reshape(-1)[
            (_address(part) - placeholder.start) // part.itemsize :
        ]
        strides = list(part.strides)
    else:
        box = read(
            placeholder.name, tuple(slice(int(a), b) for a, b in zip(first, stop, strict=True))
        )
        strides = [steps * box.strides[axis] if steps else 0 for axis, steps in along]
    found: NDArray = np.lib.stride_tricks.as_strided(box, part.shape, strides).copy(order="C")
    return found


def _copy(out: NDArray, part: NDArray) -> None:
    """Copies a mapped view in parts of at most SPAN bytes, and releases the pages of each part."""
    if not part.size or not part.ndim:
        out[...] = part
        return
    axis = int(np.argmax([abs(step) for step in part.strides]))
    out, part = np.moveaxis(out, axis, 0), np.moveaxis(part, axis, 0)
    rows = SPAN // max(abs(part.strides[0]), 1)
    if not rows and part.ndim > 1:
        for i in range(len(part)):
            _copy(out[i], part[i])
        return
    for at in range(0, len(part), max(rows, 1)):
        np.copyto(out[at : at + rows], part[at : at + rows])
        _let_go(part)


def _let_go(part: object) -> None:
    """Releases the pages of the mapped file under a view."""
    while isinstance(part, np.ndarray | memoryview):
        part = part.base if isinstance(part, np.ndarray) else part.obj
    if isinstance(part, mmap.mmap):
        part.madvise(mmap.MADV_DONTNEED)


def _address(array: NDArray) -> int:
    found: int = array.__array_interface__["data"][0]
    return found
