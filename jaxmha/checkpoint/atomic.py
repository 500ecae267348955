"""Replaces a file in one step: at every moment it is the old one or the complete new one.

The new file is written next to its target as one of its `temporaries`.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from jaxmha.checkpoint import system, temporaries
from jaxmha.checkpoint.errors import CheckpointError, DestinationExists, WriteFailed
from jaxmha.checkpoint.settling import flushing, settle

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
) -> list[str]:
    """Writes a file under another name, verifies it, and gives it the name of the target.

    Args:
        target: the file to write. An existing file stays until the last step; its permissions are kept.
        emit: writes the content.
        verify: raises unless the file at the given path is right.
        force: replace an existing file.
        sources: files and folders that nothing may be put onto or into.
        mode: permissions of a new file; None: as the umask says.
        size: lower bound of the bytes that `emit` writes. If it is large, space on the disk is reserved
            first, and the disk writes while `emit` computes.

    Returns:
        one line for each file that looks like a temporary of the target and was not removed.

    Raises:
        DestinationExists, WriteFailed, and the errors of emit and verify.
    """
    with typed(target):
        old = check_target(target, force, sources)
        target = Path(os.path.realpath(target))  # a link typed by the user stays a link
        notes: list[str] = []
        temporaries.clean(target, sources, notes)
        with temporary(target, mode if old is None else mode_of(old)) as (file, path):
            with flushing(file.fileno(), size):
                emit(file)
                file.flush()
            settle(file.fileno())
            verify(path)
            commit(file, path, target, force)
    return notes


def replace_by(
    target: Path,
    content: bytes,
    *,
    force: bool,
    sources: Sequence[Path] = (),
    mode: int | None = None,
) -> list[str]:
    """`replace` with the given bytes."""

    def emit(file: BinaryIO) -> None:
        file.write(content)

    return replace(target, emit, lambda _: None, force=force, sources=sources, mode=mode)


@contextlib.contextmanager
def typed(target: Path) -> Iterator[None]:
    """Raises errors of the operating system as WriteFailed."""
    try:
        yield
    except OSError as e:
        problem = f"cannot be written ({e.strerror or e})"
        raise WriteFailed(target, problem, "check the folder and its free space") from e


@contextlib.contextmanager
def reading_back(target: Path, path: Path) -> Iterator[None]:
    """Raises errors of reading back the temporary `path` as WriteFailed of its target."""
    try:
        yield
    except WriteFailed:
        raise
    except CheckpointError as e:
        reason = e.problem.replace(path.name, target.name)
        raise unlike(target, f" ({reason})", e.member) from e


def unlike(target: Path, why: str = "", member: str | None = None) -> WriteFailed:
    """The error to raise if a file does not hold the written bytes."""
    return WriteFailed(
        target, f"does not read back as it was written{why}", "check the disk", member
    )


def mode_of(status: os.stat_result | None) -> int | None:
    """The permissions of a file to replace; None if there is none."""
    return None if status is None else stat.S_IMODE(status.st_mode)


@contextlib.contextmanager
def temporary(target: Path, mode: int | None = None) -> Iterator[tuple[BinaryIO, Path]]:
    """A new, locked file next to the target; it is removed afterwards unless it was committed."""

    def create(path: Path) -> int:
        # Without a file to replace, the umask decides.
        return system.create(path, 0o666 if mode is None else 0o600)

    fd, path = temporaries.create(target, create)
    assert fd is not None
    status = os.fstat(fd)
    try:
        with os.fdopen(fd, "w+b") as file:
            if mode is not None:
                system.set_mode(fd, path, mode)
            yield file, path
    finally:
        temporaries.unlink(path, status)


def commit(file: BinaryIO, path: Path, target: Path, force: bool) -> None:
    """Renames a durable temporary to its target, and makes the name durable."""
    release(file)
    put(path, target, force)
    system.sync_folder(target.parent)


def release(file: BinaryIO) -> None:
    """Closes a temporary before it is renamed where its lock would do nothing.

    Windows renames no open file; elsewhere the file stays open, and so locked, to the end.
    """
    if not system.has_locks():
        file.close()


@contextlib.contextmanager
def temporary_folder(
    target: Path, parts: Callable[[Path], temporaries.IsPart], notes: list[str]
) -> Iterator[Path]:
    """A new, locked folder next to the target.

    Afterwards the folder of this name is removed: the temporary, or the old target that it was
    exchanged for. Files that are no `parts` of it stay, with a line in `notes`.
    """

    def create(path: Path) -> int | None:
        os.mkdir(path)
        return system.open_created(path)

    fd, path = temporaries.create(target, create)
    try:
        yield path
    finally:
        if os.path.lexists(path) and not temporaries.remove_folder(path, parts(path)):
            notes.append(f"{path.name} stays: it holds other files")
        if fd is not None:
            os.close(fd)


def settle_folder(path: Path) -> None:
    """Applies `settle` to every file of a folder, and makes the names durable."""
    for folder, _, files in os.walk(path):
        for file in files:
            # Windows makes only files durable that are open for writing.
            with open(os.path.join(folder, file), "r+b") as content:
                settle(content.fileno())
        system.sync_folder(Path(folder))


def commit_folder(
    path: Path,
    target: Path,
    old: os.stat_result | None,
    parts: Callable[[Path], temporaries.IsPart],
) -> None:
    """Renames a durable folder to its target; exchanges the names if there is an old folder.

    Raises:
        DestinationExists: another process was faster, or put a file of its own into the old folder,
            or the system cannot exchange two folders in one step.
    """
    if old is None:
        if not system.rename_new(path, target):
            try:
                os.rename(path, target)  # fails on a file or a folder that is not empty
            except OSError as e:
                if e.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                problem = "came there meanwhile, from another process"
                remedy = "look at it, or choose another name"
                raise DestinationExists(target, problem, remedy) from e
    else:
        os.chmod(path, stat.S_IMODE(old.st_mode))
        if not system.exchange(path, target):
            problem = "cannot be replaced in one step on this system"
            raise DestinationExists(target, problem, "remove it first, or choose another name")
        same = os.path.samestat(os.lstat(path), old)
        if not same or temporaries.others(path, parts(path)):
            system.exchange(path, target)
            problem = "was replaced, or got other files, meanwhile"
            raise DestinationExists(target, problem, "look at it, or choose another name")
    system.sync_folder(target.parent)


def put(path: Path, target: Path, force: bool) -> None:
    """Renames; without force, fails where another process was faster."""
    if not force:
        try:
            os.link(path, target)  # link fails if the target exists; rename would replace it
            return  # `temporary` removes the other name
        except FileExistsError:
            raise DestinationExists(target, "is already there", "choose another name") from None
        except OSError:  # the file system has no hard links
            if system.rename_new(path, target):
                return
            if os.path.lexists(target):
                raise DestinationExists(
                    target, "is already there", f"replace it with {FORCE}"
                ) from None
    os.replace(path, target)


def is_placed(path: Path, target: Path) -> bool:
    """True if a temporary has become its target, also if the writer was interrupted in between."""
    try:
        return os.path.samefile(path, target)
    except FileNotFoundError:
        return not os.path.lexists(path)


def is_same(path: Path, other: Path) -> bool:
    """True if two paths lead to the same existing file or folder."""
    try:
        return os.path.samefile(path, other)
    except FileNotFoundError:
        return False


def check_target(
    target: Path, force: bool, sources: Sequence[Path], folder: bool = False
) -> os.stat_result | None:
    """The status of the file or folder to replace; None if it does not exist.

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
    return status
