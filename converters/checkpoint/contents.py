"""What passes between a format and the rest: contents read, a plan to write."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxmha.converters.checkpoint import digests
from jaxmha.converters.checkpoint.casting import Loss, cast
from jaxmha.converters.checkpoint.tensor import TensorInfo, blocks, to_bytes

Progress = Callable[[int, int], None]  # bytes done, bytes in total


_LARGE = 4 << 20


def _ahead(items: Iterator[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
    """The same, the next of which is made while this one is used."""
    with ThreadPoolExecutor(1) as worker:
        future = worker.submit(next, items, None)
        while (item := future.result()) is not None:
            future = worker.submit(next, items, None)
            yield item


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contents:
    """A file whose header was read and checked; `load` reads one tensor."""

    info: Mapping[str, TensorInfo]
    load: Callable[[str], np.ndarray]
    metadata: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    close: Callable[[], None] = _nothing
    files: tuple[Path, ...] = ()  # beside the one that was opened
    # The bytes of one tensor, little-endian in C order, in pieces that are valid one at a time.
    stream: Callable[[str], Iterator[memoryview]] | None = None
    # One tensor over a mapped file, unread and unchecked; None: it does not lie there as in memory.
    view: Callable[[str], np.ndarray | None] | None = None
    # A box of one tensor, reading little more than it.
    part: Callable[[str, tuple[slice, ...]], np.ndarray] | None = None


@dataclass(frozen=True)
class Plan:
    """Tensors to write to `path`; `info` says how, before any data is loaded."""

    path: Path
    info: Mapping[str, TensorInfo]
    declared: Mapping[str, TensorInfo]  # what `load` gives; other dtypes are cast
    load: Callable[[str], np.ndarray]
    metadata: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    algorithm: str = "sha256"
    keep_digests: bool = True
    advance: Callable[[int], None] = lambda count: None
    digests: dict[str, str] = field(default_factory=dict)  # of what was written so far
    losses: dict[str, Loss] = field(default_factory=dict)

    @property
    def texts(self) -> list[tuple[str, str]]:
        """What is kept beside the tensors."""
        return [*self.metadata.items(), *self.names.items()]

    def casts(self, name: str) -> bool:
        """Whether writing this tensor changes its dtype."""
        return self.declared[name].dtype != self.info[name].dtype

    def blocks(self, name: str) -> Iterator[NDArray[np.uint8]]:
        """The bytes of a tensor, as they stand in a file; its digest is known behind them."""
        made = self._blocks(name)
        for raw in _ahead(made) if self.info[name].nbytes > _LARGE else made:
            yield raw
            self.advance(raw.size)

    def pieces(self, name: str) -> Iterator[memoryview]:
        """The same for `writelines`, behind which nothing of the tensor is held any more."""
        return (block.data for block in self.blocks(name))

    def _blocks(self, name: str) -> Iterator[NDArray[np.uint8]]:
        array, dtype = np.asarray(self.load(name)), self.info[name].dtype
        state = digests.hasher(self.algorithm, self.path)
        for block in blocks(array):
            if block.dtype.newbyteorder("=") != dtype:
                block, loss = cast(block, dtype)
                self.losses[name] = self.losses[name] + loss if name in self.losses else loss
            raw = to_bytes(block)
            state.update(raw.data)
            yield raw
        self.digests[name] = f"{self.algorithm}:{state.hexdigest()}"

    def manifest(self) -> str:
        """The digest over everything; all blocks must have been written."""
        return digests.manifest(self.info, self.digests, self.texts, self.algorithm, self.path)
