"""System calls that differ between operating systems, with fallbacks.

Linux has all of them. macOS lacks `renameat2`, `fallocate` and `posix_fadvise`; Windows also lacks
file locks, file names relative to an open folder, and reads at an offset.
"""

import contextlib
import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

StrPath = str | os.PathLike[str]
NO_LOCKS = "this system has no file locks, so its writer may still be running"
_PIECE = 1 << 20
_CWD, _NEW, _EXCHANGE = -100, 1, 2  # arguments of renameat2(2)
_position = threading.Lock()  # held during seek and read if the system has no `preadv`


def _flags(*names: str) -> int:
    """The `os.open` flags that this system has, combined; Windows alters bytes without O_BINARY."""
    flags = 0
    for name in ("O_BINARY", "O_CLOEXEC", *names):
        flags |= getattr(os, name, 0)
    return flags


def has_locks() -> bool:
    """True if the system has file locks, which show other processes that a writer is running."""
    return fcntl is not None


def lock(fd: int) -> None:
    """Locks a file or folder until its descriptor is closed; does nothing without file locks.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    if fcntl is not None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def create(path: StrPath, mode: int) -> int:
    """Creates a file; returns a descriptor to read and write it.

    Raises:
        FileExistsError.
    """
    return os.open(path, _flags("O_RDWR", "O_CREAT", "O_EXCL", "O_NOFOLLOW"), mode)


def open_plain(path: StrPath) -> int:
    """Opens a file or folder that is not a link for reading; does not block on a FIFO."""
    return os.open(path, _flags("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK"))


def open_regular(path: StrPath) -> int:
    """Opens a file for reading; does not block if the path has become a FIFO."""
    return os.open(path, _flags("O_RDONLY", "O_NOCTTY", "O_NONBLOCK"))


def open_created(folder: Path) -> int | None:
    """Opens a folder that was just created; None if the system cannot open folders."""
    if not hasattr(os, "O_DIRECTORY"):
        return None
    return os.open(folder, _flags("O_RDONLY", "O_DIRECTORY", "O_NOFOLLOW"))


def set_mode(fd: int, path: Path, mode: int) -> None:
    """Sets the permissions of an open file."""
    if hasattr(os, "fchmod"):
        os.fchmod(fd, mode)
    else:
        os.chmod(path, mode)


def is_of_user(status: os.stat_result) -> bool:
    """True if a file belongs to the user of this process; True where files have no user ids."""
    return not hasattr(os, "geteuid") or status.st_uid == os.geteuid()


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Reads from an offset of a file into a buffer; returns the number of bytes, 0 at the end."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    with _position:
        os.lseek(fd, offset, os.SEEK_SET)
        found = os.read(fd, min(len(buffer), _PIECE))
    buffer[: len(found)] = found
    return len(found)


class Directory:
    """An open folder; its files are found by name even if its own path changes meanwhile.

    On systems without names relative to an open folder, names are joined to its path.
    """

    def __init__(self, path: Path, fd: int | None = None) -> None:
        self.path = path
        self._owns = fd is None
        if fd is None and hasattr(os, "O_DIRECTORY") and os.open in os.supports_dir_fd:
            fd = os.open(path, _flags("O_RDONLY", "O_DIRECTORY"))
        self._fd = fd

    def __enter__(self) -> "Directory":  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        if self._owns and self._fd is not None:
            os.close(self._fd)

    def _entry(self, name: str) -> str:
        return name if self._fd is not None else os.path.join(self.path, name)

    def stat(self, name: str) -> os.stat_result:
        """The status of an entry; links are not followed."""
        return os.stat(self._entry(name), dir_fd=self._fd, follow_symlinks=False)

    def open_file(self, name: str) -> int:
        """Opens an entry that is not a link for reading; returns the descriptor."""
        flags = _flags("O_RDONLY", "O_NOCTTY", "O_NONBLOCK", "O_NOFOLLOW")
        return os.open(self._entry(name), flags, dir_fd=self._fd)

    def readlink(self, name: str) -> str:
        """The target of a link."""
        return os.readlink(self._entry(name), dir_fd=self._fd)

    def unlink(self, name: str) -> None:
        """Removes a file."""
        os.unlink(self._entry(name), dir_fd=self._fd)

    def rmdir(self, name: str) -> None:
        """Removes an empty folder."""
        os.rmdir(self._entry(name), dir_fd=self._fd)


def walk_up(path: Path) -> Iterator[tuple[str, list[str], Directory]]:
    """Yields `path` and all folders below it, deepest first, as (path, names, open folder)."""
    if hasattr(os, "fwalk"):
        for folder, folders, files, fd in os.fwalk(path, topdown=False, follow_symlinks=False):
            yield folder, [*folders, *files], Directory(Path(folder), fd)
        return
    for folder, folders, files in os.walk(path, topdown=False):
        yield folder, [*folders, *files], Directory(Path(folder))


def _renameat2(path: Path, target: Path, how: int) -> bool:
    call = _of_libc("renameat2")
    return call is not None and not call(_CWD, os.fsencode(path), _CWD, os.fsencode(target), how)


def rename_new(path: Path, target: Path) -> bool:
    """Renames in one step without replacing; False if the target exists or the system cannot."""
    return _renameat2(path, target, _NEW)


def exchange(path: Path, target: Path) -> bool:
    """Exchanges the names of two files or folders in one step; False if the system cannot."""
    return _renameat2(path, target, _EXCHANGE)


def _of_libc(name: str) -> Callable[..., int] | None:
    """A function of the C library that Python does not expose; None if the library lacks it."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
    except TypeError:  # Windows
        return None
    found: Any = getattr(library, name, None)
    return found  # type: ignore[no-any-return]


def reserve(fd: int, size: int) -> None:
    """Reserves disk space for an empty file, so that a full disk is noticed before the work begins.

    It does nothing if the file system cannot reserve space; os.posix_fallocate would write zeros.

    Raises:
        OSError: the disk, the quota or the limit of file sizes does not allow the size.
    """
    call = _of_libc("fallocate")
    if call is not None and call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        problem = ctypes.get_errno()
        if problem in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(problem, os.strerror(problem))


def flush_data(fd: int) -> None:
    """Syncs the content of a file to disk, without its times."""
    getattr(os, "fdatasync", os.fsync)(fd)


def reread(fd: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Asks the system to drop cached pages of a synced file, and to read them again from disk.

    The system reads in the background, while the caller computes. A range is an offset and a number
    of bytes; 0 bytes mean up to the end of the file.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    for advice in (os.POSIX_FADV_DONTNEED, os.POSIX_FADV_WILLNEED):
        for offset, count in ranges:
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, offset, count, advice)


def sync_folder(folder: Path) -> None:
    """Syncs the names in a folder to disk; does nothing on Windows, which has no call for it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(folder, _flags("O_RDONLY", "O_DIRECTORY"))
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
