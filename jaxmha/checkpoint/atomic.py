"""Replaces a file in one step: its path always holds the complete old or the complete new file.

The new file is written under a temporary name next to its target; see `temporaries`.
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
    """Writes a temporary file, verifies it, and renames it to the target.

    Args:
        target: the file to write. The last step replaces an existing file, keeping its permissions.
        emit: writes the content to the given file.
        verify: raises unless the file at the given path has the right content.
        force: replace an existing file.
        sources: files and folders being read; the target may not be one of them or inside one.
        mode: permissions of a new file; None: the umask decides.
        size: lower bound of the bytes that `emit` writes. If it is large, disk space is reserved
            first, and the data is flushed to the disk while `emit` runs.

    Returns:
        messages about files that look like temporary files of the target and were not removed.

    Raises:
        DestinationExists, WriteFailed, and the errors of emit and verify.
    """
    with typed(target):
        old = check_target(target, force, sources)
        target = Path(os.path.realpath(target))  # a link stays; the file it refers to is replaced
        notes: list[str] = []
        temporaries.clean(target, temporaries.identities(sources), notes)
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
    """Replaces the target with a file that has the given content; see `replace`."""

    def emit(file: BinaryIO) -> None:
        file.write(content)

    return replace(target, emit, lambda _: None, force=force, sources=sources, mode=mode)


@contextlib.contextmanager
def typed(target: Path) -> Iterator[None]:
    """Converts an OSError in the block to WriteFailed."""
    try:
        yield
    except OSError as e:
        problem = f"cannot be written ({e.strerror or e})"
        raise WriteFailed(target, problem, "check the folder and its free space") from e


@contextlib.contextmanager
def reading_back(target: Path, path: Path) -> Iterator[None]:
    """Converts a CheckpointError while reading back `path` to WriteFailed of `target`."""
    try:
        yield
    except WriteFailed:
        raise
    except CheckpointError as e:
        reason = e.problem.replace(path.name, target.name)
        raise unlike(target, f" ({reason})", e.member) from e


def unlike(target: Path, why: str = "", member: str | None = None) -> WriteFailed:
    """The error to raise if a file does not read back as it was written."""
    return WriteFailed(
        target, f"does not read back as it was written{why}", "check the disk", member
    )


def mode_of(status: os.stat_result | None) -> int | None:
    """The permission bits of a file to replace; None if `status` is None."""
    return None if status is None else stat.S_IMODE(status.st_mode)


@contextlib.contextmanager
def temporary(target: Path, mode: int | None = None) -> Iterator[tuple[BinaryIO, Path]]:
    """Yields a new, locked file next to the target; removes it afterwards unless it was renamed."""

    def create(path: Path) -> int:
        # The umask applies only if no mode is given; a given mode is set after creation.
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
    """Renames a temporary file that was synced to disk to its target, then syncs the folder."""
    release(file)
    put(path, target, force)
    system.sync_folder(target.parent)


def release(file: BinaryIO) -> None:
    """Closes a temporary file before its rename on systems without file locks.

    Windows cannot rename an open file. On other systems the file stays open and locked.
    """
    if not system.has_locks():
        file.close()


@contextlib.contextmanager
def temporary_folder(
    target: Path, parts: Callable[[Path], temporaries.IsPart], notes: list[str]
) -> Iterator[Path]:
    """Yields a new, locked folder next to the target.

    Afterwards the folder with the temporary name is removed: the new folder, or the old target if
    the two were exchanged. Files that the predicate `parts(path)` rejects stay, and `notes` gets a
    message.
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
    """Calls `settle` for every file below a folder, and syncs all folders."""
    for folder, _, files in os.walk(path):
        for file in files:
            # On Windows, os.fsync requires a file that is open for writing.
            with open(os.path.join(folder, file), "r+b") as content:
                settle(content.fileno())
        system.sync_folder(Path(folder))


def commit_folder(
    path: Path,
    target: Path,
    old: os.stat_result | None,
    parts: Callable[[Path], temporaries.IsPart],
) -> None:
    """Renames a folder that was synced to disk to its target, or exchanges it with the old target.

    `old` is the status of the old target, or None. The exchange is undone if the old target holds
    files that the predicate `parts(path)` rejects.

    Raises:
        DestinationExists: another process created or replaced the target, the old target holds
            other files, or the system cannot exchange two folders in one step.
    """
    if old is None:
        if not system.rename_new(path, target):
            try:
                os.rename(path, target)  # fails if the target is a file or a nonempty folder
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
    """Renames `path` to `target`; without `force`, refuses to replace an existing target."""
    if not force:
        try:
            os.link(path, target)  # link fails if the target exists; rename would replace it
            return  # `temporary` removes the name `path`
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
    """True if `path` was renamed to `target`, or linked to it but not removed yet."""
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
        DestinationExists: the target exists and `force` is False, is a dangling link, is not a
            folder (with `folder`) or a regular file (without), or overlaps one of `sources`.
        WriteFailed: the target is not a valid path.
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
