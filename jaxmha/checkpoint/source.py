"""A regular file that is checked when it is opened, and read by position."""

import contextlib
import mmap
import os
import stat
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxmha.checkpoint import system
from jaxmha.checkpoint.errors import IntegrityError, MalformedFile, UnreadableFile
from jaxmha.checkpoint.system import Directory

_MOST_AT_ONCE = 1 << 30  # the kernel reads less than 2 GiB per call
_PIECE = 1 << 20


class Source:
    """An open file. All reads use the descriptor that was checked on opening. With `held=False`,
    each read opens the file again, and checks that it is the same, unchanged file.

    Raises:
        UnreadableFile: missing, a directory, FIFO, socket or device, or no permission.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mapped: bool = False,
        within: tuple[Directory, str] | None = None,
        known_as: Path | None = None,
        held: bool = True,
    ) -> None:
        """Opens the file by its path, or by an open folder and a name in it.

        Args:
            path: the file.
            mapped: arrays are views of the mapped file, which stays mapped while a view exists.
            within: an open folder and the name of the file in it, which may not be a link.
            known_as: the path for error messages, if the file is a temporary of that path.
            held: False: close the file, and open it again for each read, because the system limits
                the open files of a process. A read raises IntegrityError if the file was replaced.
        """
        opened = Path(path)
        self.path = known_as or opened
        self.mapped = mapped
        self.fd = -1
        self._map: Callable[[], mmap.mmap | None] = lambda: None
        # The path to open again; absolute, because the working folder may change.
        self._again = None if held else os.path.abspath(opened)
        try:
            # Opening a device can change its state, and a FIFO blocks, so check the type first.
            before = os.stat(opened) if within is None else within[0].stat(within[1])
            _refuse_special(self.path, before)
            if within is None:
                self.fd = system.open_regular(opened)
            else:
                self.fd = within[0].open_file(within[1])
            status = os.fstat(self.fd)
            _refuse_special(self.path, status)
        except FileNotFoundError as e:
            raise UnreadableFile(self.path, "there is no such file", "check the path") from e
        except (OSError, ValueError) as e:
            self.close()
            if isinstance(e, UnreadableFile):
                raise
            reason = getattr(e, "strerror", None) or str(e)
            raise UnreadableFile(
                self.path, f"cannot be opened ({reason})", "check the path and its permissions"
            ) from e
        self.size = status.st_size
        self._identity = _identity(status)
        if not held:
            self.close()

    @contextlib.contextmanager
    def _descriptor(self) -> Iterator[int]:
        """Yields a descriptor of the file; converts an OSError in the block to UnreadableFile."""
        own = -1
        try:
            if self._again is not None:
                own = system.open_regular(self._again)
                self._check(own)
            fd = self.fd if own < 0 else own
            if fd < 0:  # mmap takes -1 as anonymous memory, which is all zeros
                raise UnreadableFile(
                    self.path, "the checkpoint is closed", "read inside `with checkpoint.open(...)`"
                )
            yield fd
        except OSError as e:
            if isinstance(e, UnreadableFile):
                raise
            raise UnreadableFile(
                self.path, f"reading failed ({e.strerror or e})", "check the disk and try again"
            ) from e
        finally:
            if own >= 0:
                os.close(own)

    def read(self, offset: int, count: int) -> bytes:
        """Reads exactly count bytes.

        Raises:
            MalformedFile: the range exceeds the file.  IntegrityError: the file shrank.
        """
        self._check_range(offset, count)
        raw = np.empty(count, np.uint8)
        self.read_into(raw, offset)
        return raw.tobytes()

    def read_array(self, offset: int, count: int) -> NDArray[np.uint8]:
        """Returns `count` bytes as a new array or a view of the map; raises as `read` does."""
        self._check_range(offset, count)
        if self.mapped and count:
            return np.frombuffer(self._mapping(), np.uint8, count, offset)
        raw = np.empty(count, np.uint8)
        self.read_into(raw, offset)
        return raw

    def _mapping(self) -> mmap.mmap:
        """The memory map of the file. Only views keep it alive, since it holds a descriptor."""
        whole = self._map()
        if whole is None:
            with self._descriptor() as fd:
                self._check(fd)
                try:
                    whole = mmap.mmap(fd, self.size, access=mmap.ACCESS_READ)
                except ValueError as e:  # it shrank since the check
                    raise self._changed() from e
            self._map = weakref.ref(whole)
        return whole

    def _check_range(self, offset: int, count: int) -> None:
        if offset < 0 or count < 0 or offset + count > self.size:
            raise MalformedFile(
                self.path,
                f"needs bytes {offset} to {offset + count} of a file of {self.size}",
                "the file is cut short or damaged: copy it again",
            )

    def read_into(self, raw: NDArray[np.uint8], offset: int) -> None:
        """Fills `raw` with the bytes at an offset; raises the errors of `read`."""
        done, count = 0, raw.size
        with self._descriptor() as fd:
            while done < count:
                view = raw[done : done + _MOST_AT_ONCE].data
                got = system.read_at(fd, view, offset + done)
                if got == 0:
                    raise self._changed()
                done += got

    def stream(self, offset: int, count: int) -> Iterator[memoryview]:
        """Yields a range in pieces, each valid until the next one; raises the errors of `read`."""
        buffer = np.empty(min(count, _PIECE), np.uint8)
        for at in range(0, count, _PIECE):
            piece = buffer[: min(_PIECE, count - at)]
            self.read_into(piece, offset + at)
            yield piece.data

    def check_unchanged(self) -> None:
        """Raises IntegrityError if size or modification time changed since opening."""
        with self._descriptor() as fd:
            self._check(fd)

    def _check(self, fd: int) -> None:
        if _identity(os.fstat(fd)) != self._identity:
            raise self._changed()

    def _changed(self) -> IntegrityError:
        return IntegrityError(
            self.path, "the file changed while it was being read", "wait for its writer, read again"
        )

    def close(self) -> None:
        """Closes the descriptor; doing so twice is fine."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


class Section(Source):
    """A byte range of another Source, with the same interface; closing it closes no file."""

    def __init__(self, whole: Source, offset: int, size: int) -> None:
        self.whole, self.offset = whole, offset
        self.path, self.size, self.mapped = whole.path, size, whole.mapped

    def read_array(self, offset: int, count: int) -> NDArray[np.uint8]:
        """Returns `count` bytes as an array; raises the errors of `read`."""
        self._check_range(offset, count)
        return self.whole.read_array(self.offset + offset, count)

    def read_into(self, raw: NDArray[np.uint8], offset: int) -> None:
        """Fills `raw` with the bytes at an offset; raises the errors of `read`."""
        self.whole.read_into(raw, self.offset + offset)

    def check_unchanged(self) -> None:
        """Raises IntegrityError if the whole file changed since opening."""
        self.whole.check_unchanged()

    def close(self) -> None:
        """Does nothing: the whole file stays open."""


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _refuse_special(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a FIFO, socket or device"
        raise UnreadableFile(path, f"is {kind}, not a regular file", "name one checkpoint file")
