"""One descriptor on one regular file, read by position."""

import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxmha.converters.checkpoint.errors import IntegrityError, MalformedFile, UnreadableFile

_MOST_AT_ONCE = 1 << 30  # the kernel reads less than 2 GiB per call


class Source:
    """An open file. Everything is read from the one descriptor that was checked at the start.

    Raises:
        UnreadableFile: missing, a directory, FIFO, socket or device, or no permission.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.fd = -1
        try:
            # Devices act on being opened and FIFOs block, so look before opening.
            _refuse_special(self.path, os.stat(self.path))
            # O_NONBLOCK: the path may have become a FIFO since.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
            self.fd = os.open(self.path, flags)
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

    def read(self, offset: int, count: int) -> bytes:
        """Exactly count bytes.

        Raises:
            MalformedFile: the range leaves the file.  IntegrityError: the file shrank.
        """
        return self.read_array(offset, count).tobytes()

    def read_array(self, offset: int, count: int) -> NDArray[np.uint8]:
        """Exactly count bytes as a fresh array; errors as in `read`."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise MalformedFile(
                self.path,
                f"needs bytes {offset} to {offset + count} of a file of {self.size}",
                "the file is cut short or damaged: copy it again",
            )
        raw = np.empty(count, np.uint8)
        done = 0
        while done < count:
            view = raw[done : done + _MOST_AT_ONCE].data
            try:
                got = os.preadv(self.fd, [view], offset + done)
            except OSError as e:
                raise UnreadableFile(
                    self.path, f"reading failed ({e.strerror or e})", "check the disk and try again"
                ) from e
            if got == 0:
                raise self._changed()
            done += got
        return raw

    def check_unchanged(self) -> None:
        """Raises IntegrityError if size or modification time moved since opening."""
        if _identity(os.fstat(self.fd)) != self._identity:
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


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _refuse_special(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "a FIFO, socket or device"
        raise UnreadableFile(path, f"is {kind}, not a regular file", "name one checkpoint file")
