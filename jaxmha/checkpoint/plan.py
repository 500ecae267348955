"""The interface of the formats: the contents of a file that was read, and a plan to write one."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxmha.checkpoint import digests
from jaxmha.checkpoint.casting import FLOATS, Loss, cast
from jaxmha.checkpoint.errors import UnsupportedDtype
from jaxmha.checkpoint.tensor import TensorInfo, contiguous, parts, to_bytes

Progress = Callable[[int, int], None]  # bytes done, bytes in total


In = TypeVar("In")
Out = TypeVar("Out")
_LARGE = 4 << 20
# Attribute of a .weights.h5 file whose groups may not be in the order of the model's layers.
UNORDERED = ("jaxmha.order", "unknown")
_WORKERS = 2  # threads; copying a transposed array takes longer than writing it


def _ahead(make: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    """Like `map`, but computes the next items in threads while the caller uses one."""
    with ThreadPoolExecutor(_WORKERS) as workers:
        made: deque[Future[Out]] = deque()
        for item in items:
            made.append(workers.submit(make, item))
            if len(made) > _WORKERS:
                yield made.popleft().result()
        while made:
            yield made.popleft().result()


def _encoded(part: np.ndarray, dtype: np.dtype) -> tuple[NDArray[np.uint8], Loss | None]:
    """Casts a part of a tensor; returns its bytes, and the loss, or None without a cast."""
    block, loss = contiguous(part).reshape(-1), None
    if block.dtype.newbyteorder("=") != dtype:
        block, loss = cast(block, dtype)
    return to_bytes(block), loss


def _numbers(part: np.ndarray) -> np.ndarray:
    """The part as a 1-D array; each complex number becomes two real ones."""
    flat = contiguous(part).reshape(-1)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contents:
    """A file whose header was read and checked; `load` reads one tensor."""

    info: Mapping[str, TensorInfo]
    load: Callable[[str], np.ndarray]
    metadata: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    ordered: bool = True  # False: the numbers of Keras groups may differ from those in the model
    digests: Mapping[str, str] = field(default_factory=dict)
    others: tuple[str, ...] = ()  # names of entries that are not tensors
    config: Mapping[str, Any] = field(default_factory=dict)  # .keras only: its config.json
    close: Callable[[], None] = _nothing
    files: tuple[Path, ...] = ()  # files read in addition to the opened one
    # Orbax folders only: name of a tensor -> the files and folders that hold it.
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Yields the bytes of one tensor, little-endian in C order; a piece is valid until the next.
    stream: Callable[[str], Iterator[memoryview]] | None = None
    # Name of a tensor that the file holds quantised -> its kind; `load` returns it dequantised.
    quantised: Mapping[str, str] = field(default_factory=dict)
    unboxed: frozenset[str] = frozenset()  # names that lack the key `value` of `nnx.State`
    # A view of one tensor in a mapped file, not read or checked; None if the layout in the file
    # differs from that in memory.
    view: Callable[[str], np.ndarray | None] | None = None
    # Reads a box of one tensor, and little more than the box.
    part: Callable[[str, tuple[slice, ...]], np.ndarray] | None = None


class Overhead(NamedTuple):
    """Upper bounds on the bytes of a file besides its data.

    `base` counts those that do not depend on the tensors; `each` returns those of one tensor.
    """

    base: int
    each: Callable[[str], int]


@dataclass(frozen=True)
class WriteJob:
    """Tensors to write to `path`; `info` has their shapes and dtypes before any data is loaded."""

    path: Path
    info: Mapping[str, TensorInfo]
    declared: Mapping[str, TensorInfo]  # shapes and dtypes that `load` returns, before casting
    load: Callable[[str], np.ndarray]
    metadata: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    ordered: bool = True
    algorithm: str = "sha256"
    keep_digests: bool = True
    refuses_overflow: bool = False
    advance: Callable[[int], None] = lambda count: None
    digests: dict[str, str] = field(default_factory=dict)  # of the tensors written so far
    losses: dict[str, Loss] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # for the user, as in `writer.Written`

    @property
    def texts(self) -> list[tuple[str, str]]:
        """Metadata and layer names, which the manifest digest covers too."""
        return [*self.metadata.items(), *self.names.items(), *[UNORDERED] * (not self.ordered)]

    def casts(self, name: str) -> bool:
        """True if writing this tensor changes its dtype."""
        return self.declared[name].dtype != self.info[name].dtype

    def blocks(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """Yields the bytes of a tensor, cast and in C order, and sets its digest at the end.

        Raises UnsupportedDtype if a value overflows and `refuses_overflow` is True.
        """
        array, dtype = np.asarray(self.load(name)), self.info[name].dtype
        state = digests.hasher(self.algorithm, self.path)
        each = _ahead if array.nbytes > _LARGE else map
        for raw, loss in each(partial(_encoded, dtype=dtype), parts(array)):
            if loss is not None:
                if loss.overflowed and self.refuses_overflow:
                    raise self._beyond(name, array)
                self.losses[name] = self.losses[name] + loss if name in self.losses else loss
            state.update(raw.data)
            yield raw
            self.advance(raw.size)
        self.digests[name] = f"{self.algorithm}:{state.hexdigest()}"

    def _beyond(self, name: str, array: np.ndarray) -> UnsupportedDtype:
        dtype, low, high, beyond, lost = self.info[name].dtype, np.inf, -np.inf, False, False
        for part in map(_numbers, parts(array)):
            wide = part.astype(np.float64)
            finite = np.isfinite(wide)
            low, high = wide[finite].min(initial=low), wide[finite].max(initial=high)
            beyond |= cast(part[finite], dtype)[1].overflowed > 0
            lost |= cast(part[~finite], dtype)[1].overflowed > 0
        what = [f"values from {low:.6g} to {high:.6g}"] * beyond + ["NaN or infinity"] * lost
        remedy = "choose a wider dtype" + " or a signed one" * (dtype.kind == "u")
        if dtype in FLOATS:
            remedy += " (bfloat16 has the range of float32)"
        elif lost:
            remedy = "choose a floating-point dtype"
        problem = f"{' and '.join(what)} do not fit into {dtype}"
        return UnsupportedDtype(self.path, problem, remedy, name)

    def pieces(self, name: str) -> Iterator[memoryview]:
        """Yields each of the `blocks` as a memoryview for `writelines`.

        The iterator keeps no reference to the tensor after its last block.
        """
        return (block.data for block in self.blocks(name))

    def manifest(self) -> str:
        """The manifest digest; all blocks of all tensors must have been written."""
        return digests.manifest(self.info, self.digests, self.texts, self.algorithm, self.path)
