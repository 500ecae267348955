"""Putting a file in place in one step: at every moment it is the old one or the complete new one.

The new file is written beside its target under a name of its own, which carries a lock for as long
as its process lives. What a killed process left is recognised by its missing lock.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from jaxmha.converters.checkpoint.errors import DestinationExists, WriteFailed

_CWD, _EXCHANGE = -100, 2  # of renameat2(2)
_LARGE = 64 << 20
_ATTEMPTS = 100

FORCE = "--force (force=True)"


def replace(
    target: Path,
    emit: Callable[[BinaryIO], None],
    verify: Callable[[Path], None],
    *,
    force: bool,
    sources: Sequence[Path] = (),
    mode: int | None = None,
    size: int = 0,
) -> None:
    """Puts a file in place after `verify` has accepted it.

    Args:
        target: where; what is there stays until the last step, and its permissions stay.
        emit: writes the content.
        verify: raises unless the file at the given path is right.
        force: replace what is there.
        sources: files and folders that nothing may be put onto or into.
        mode: permissions of a new file; None: as the umask says.
        size: bytes that `emit` writes at least. Where they are many, their place on the disk is taken
            first, and the disk writes while `emit` and `verify` compute.

    Raises:
        DestinationExists, WriteFailed, and whatever emit and verify raise.
    """
    with typed(target):
        old = check_target(target, force, sources)
        target = Path(os.path.realpath(target))  # a link typed by the user stays a link
        for _ in stale(target):
            pass
        with temporary(target, mode if old is None else old) as (file, path):
            with _flushing(file.fileno(), size) if size > _LARGE else contextlib.nullcontext():
                emit(file)
                file.flush()
                verify(path)
            commit(file, path, target, force)


def replace_by(
    target: Path,
    content: bytes,
    *,
    force: bool,
    sources: Sequence[Path] = (),
    mode: int | None = None,
) -> None:
    """`replace` by bytes that are there already."""

    def emit(file: BinaryIO) -> None:
        file.write(content)

    replace(target, emit, lambda _: None, force=force, sources=sources, mode=mode)


@contextlib.contextmanager
def typed(target: Path) -> Iterator[None]:
    """The operating system's refusals as WriteFailed."""
    try:
        yield
    except OSError as e:
        problem = f"cannot be written ({e.strerror or e})"
        raise WriteFailed(target, problem, "check the folder and its free space") from e


@contextlib.contextmanager
def temporary(target: Path, mode: int | None = None) -> Iterator[tuple[BinaryIO, Path]]:
    """A locked file beside the target. It is gone afterwards unless it was committed."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

    def create(path: Path) -> int:
        # Without a file to replace, the umask decides.
        return os.open(path, flags, 0o666 if mode is None else 0o600)

    fd, path = _locked_new(target, create)
    try:
        with os.fdopen(fd, "w+b") as file:
            if mode is not None:
                os.fchmod(fd, mode)
            yield file, path
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _locked_new(target: Path, create: Callable[[Path], int]) -> tuple[int, Path]:
    """A temporary with its lock. One that `stale` saw before the lock is gone: then another."""
    for _ in range(_ATTEMPTS):
        path = temporary_name(target)
        try:
            fd = create(path)
        except FileNotFoundError:  # a folder, between making and opening it
            if not target.parent.is_dir():
                raise
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                return fd, path
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(fd)
        _discard(path)
    raise OSError(errno.EBUSY, "no temporary file can be made and locked", str(target.parent))


@contextlib.contextmanager
def _flushing(fd: int, size: int) -> Iterator[None]:
    """Sends what is written to the disk all the while; its errors are raised at the end."""
    _reserve(fd, size)
    done, errors = threading.Event(), []

    def flush() -> None:
        while not done.wait(0.05):
            try:
                os.fdatasync(fd)
            except OSError as e:  # the system tells of an error once
                errors.append(e)
                return

    thread = threading.Thread(target=flush, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    if errors:
        raise errors[0]


def _reserve(fd: int, size: int) -> None:
    """Gives an empty file its size: a full disk says so now, and less is left to do while writing.

    Python's own call writes zeros where the file system cannot do it.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call and call(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)):
        problem = ctypes.get_errno()
        if problem in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OSError(problem, os.strerror(problem))


def temporary_name(target: Path) -> Path:
    """A fresh name beside the target, by which `stale` will know it."""
    return target.with_name(f".{_stem(target)}.{secrets.token_hex(8)}.tmp")


def _stem(target: Path) -> str:
    """What names of temporaries begin with: names are limited in bytes."""
    return os.fsencode(target.name)[:100].decode(errors="ignore")


def commit(file: BinaryIO, path: Path, target: Path, force: bool) -> None:
    """Makes the content durable, gives it the target's name, and makes that durable."""
    file.flush()
    os.fsync(file.fileno())
    put(path, target, force)
    sync_folder(target.parent)


@contextlib.contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """A locked folder beside the target. It, or what it was exchanged for, is gone afterwards."""

    def create(path: Path) -> int:
        os.mkdir(path)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    fd, path = _locked_new(target, create)
    try:
        yield path
    finally:
        _discard(path)
        os.close(fd)


def commit_folder(path: Path, target: Path, mode: int | None) -> None:
    """Makes a folder durable and gives it the target's name; what had it gets the other name.

    Raises:
        DestinationExists: another process was faster, or the system cannot exchange two folders in
            one step.
    """
    for folder, _, files in os.walk(path):
        for file in files:
            with open(os.path.join(folder, file), "rb") as content:
                os.fsync(content.fileno())
        sync_folder(Path(folder))
    if mode is None:
        try:
            os.rename(
                path, target
            )  # fails on what has come meanwhile, unless it is an empty folder
        except OSError as e:
            if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            problem = "came there meanwhile, from another process"
            raise DestinationExists(target, problem, "look at it, or choose another name") from e
    else:
        os.chmod(path, mode)
        _exchange(path, target)
    sync_folder(target.parent)


def _exchange(path: Path, target: Path) -> None:
    """Linux renames in both directions at once; Python has no name for it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(path), os.fsencode(target)
    if call is None or call(_CWD, names[0], _CWD, names[1], _EXCHANGE):
        problem = "cannot be replaced in one step on this system"
        raise DestinationExists(target, problem, "remove it first, or choose another name")


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def put(path: Path, target: Path, force: bool) -> None:
    """Renames; without force, fails where another process was faster."""
    if not force:
        try:
            os.link(path, target)  # unlike a rename, it fails on what is there
            return  # the temporary name goes with the temporary
        except FileExistsError:
            raise DestinationExists(target, "is already there", "choose another name") from None
        except OSError:  # a file system without hard links
            if os.path.lexists(target):
                raise DestinationExists(
                    target, "is already there", f"replace it with {FORCE}"
                ) from None
    os.replace(path, target)


def is_placed(path: Path, target: Path) -> bool:
    """Whether a temporary has become its target, wherever the writer was interrupted."""
    try:
        return os.path.samefile(path, target)
    except FileNotFoundError:
        return not os.path.lexists(path)


def is_same(path: Path, other: Path) -> bool:
    """Whether two paths lead to one file or folder that is there."""
    try:
        return os.path.samefile(path, other)
    except FileNotFoundError:
        return False


def check_target(
    target: Path, force: bool, sources: Sequence[Path], folder: bool = False
) -> int | None:
    """The mode of the file, or folder, to replace; None where there is none.

    Raises:
        DestinationExists, WriteFailed.
    """
    try:
        place = Path(os.path.realpath(target))
        status = None if not os.path.lexists(target) else os.stat(target)
    except FileNotFoundError:
        raise DestinationExists(target, "is a dangling link", "remove it first") from None
    except ValueError as e:
        raise WriteFailed(target, f"is not a path ({e})", "choose another name") from e
    for source in sources:
        read = Path(os.path.realpath(source))
        for found, what in (
            (place == read or is_same(target, source), "is being read or written here"),
            (folder and place in read.parents, "holds the file being read"),
            (read in place.parents, "is inside the folder being read"),
        ):
            if found:
                raise DestinationExists(target, what, "choose another name")
    if status is None:
        return None
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(status.st_mode):
        what = "is there and not a folder" if folder else "is there and not a regular file"
        raise DestinationExists(target, what, "choose another name")
    if not force:
        raise DestinationExists(
            target, "is already there", f"choose another name, or replace it with {FORCE}"
        )
    return stat.S_IMODE(status.st_mode)


def stale(target: Path) -> Iterator[Path]:
    """Temporaries of killed writers of the same target; each is removed after it was yielded."""
    for path in temporaries(target):
        with contextlib.suppress(OSError), _locked(path):
            yield path
            _discard(path)


def alive(target: Path) -> Iterator[Path]:
    """Temporaries of writers of the same target that are at work."""
    for path in temporaries(target):
        try:
            with _locked(path):
                pass
        except BlockingIOError:
            yield path
        except OSError:
            continue


def temporaries(target: Path) -> list[Path]:
    """Those of all writers of the same target."""
    ours = re.compile(re.escape(f".{_stem(target)}.") + r"[0-9a-f]{16}\.tmp")
    return [Path(entry.path) for entry in os.scandir(target.parent) if ours.fullmatch(entry.name)]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises OSError where the lock is taken, or the file gone or a link."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
