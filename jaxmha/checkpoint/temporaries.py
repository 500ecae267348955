"""Temporary files and folders next to their target: their names, locks and removal.

A name is `.TARGET.<16 digits>.tmp`: eight random digits, and eight digits of a hash of the
first eight and the name of the target. A file of another program has such a name by chance once in
four billion. A writer locks its temporary until it ends, so an unlocked one was left by a killed
writer.

A temporary is removed only if it has such a name, is a plain file (a folder, if the target is one)
of this user, has no second hard link, and is neither being read nor locked. Others stay; unlocked
ones are reported.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jaxmha.checkpoint import system
from jaxmha.checkpoint.errors import printable

Identity = tuple[int, int]  # device and inode
IsPart = Callable[[str], bool]
_ATTEMPTS = 100
_MOST_NOTES = 10


def fresh(target: Path) -> Path:
    """A new path next to the target, with a name that `clean` recognises."""
    start = secrets.token_hex(4)
    return target.with_name(f".{_stem(target)}.{start}{_proof(target, start)}.tmp")


def _stem(target: Path) -> str:
    """The start of the name of a temporary, shortened because names are limited in bytes."""
    return os.fsencode(target.name)[:100].decode(errors="ignore")


def _proof(target: Path, start: str) -> str:
    text = f"jaxmha temporary {start} ".encode() + os.fsencode(target.name)
    return hashlib.sha256(text).hexdigest()[:8]


def _digits(target: Path) -> re.Pattern[str]:
    return re.compile(re.escape(f".{_stem(target)}.") + r"([0-9a-f]{8})([0-9a-f]{8})\.tmp")


def _is_proven(target: Path, name: str) -> bool:
    found = _digits(target).fullmatch(name)
    return found is not None and _proof(target, found[1]) == found[2]


def create(target: Path, make: Callable[[Path], int | None]) -> tuple[int | None, Path]:
    """Creates and locks a temporary; returns the descriptor that holds the lock, and the path.

    The descriptor is None if the system cannot open folders. Until the temporary is locked, `clean`
    in another process may remove it as stale; then this function creates another one.

    Args:
        target: the file or folder that the temporary will become.
        make: creates and opens the file or folder at a path.
    """
    for _ in range(_ATTEMPTS):
        path = fresh(target)
        try:
            fd = make(path)
        except FileExistsError:
            continue
        except FileNotFoundError:  # another process removed the folder before it was opened
            if not target.parent.is_dir():
                raise
            continue
        if fd is None:
            return None, path
        try:
            system.lock(fd)
            if os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):
                return fd, path
        except (BlockingIOError, FileNotFoundError):
            pass
        status = os.fstat(fd)
        os.close(fd)
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(status.st_mode):
                os.rmdir(path)
            else:
                unlink(path, status)
    raise OSError(errno.EBUSY, "no temporary file can be made and locked", str(target.parent))


def alive(target: Path) -> list[Path]:
    """The temporaries of running writers of the same target; none on systems without file locks."""
    found = []
    for path in named(target) if system.has_locks() else ():
        try:
            with locked(path):
                pass
        except BlockingIOError:
            found.append(path)
        except OSError:
            continue
    return found


def named(target: Path) -> list[Path]:
    """Files and folders whose names have the hash of a temporary of this target."""
    return [path for path in _alike(target) if _is_proven(target, path.name)]


def _alike(target: Path) -> list[Path]:
    digits = _digits(target)
    with os.scandir(target.parent) as entries:
        names = sorted(entry.name for entry in entries if digits.fullmatch(entry.name))
    return [target.with_name(name) for name in names]


def clean(
    target: Path,
    read: frozenset[Identity] = frozenset(),
    notes: list[str] | None = None,
    parts: Callable[[Path], IsPart] | None = None,
    before: Callable[[Path], str | None] = lambda path: None,
    own: Path | None = None,
) -> list[Path]:
    """Removes the temporaries that killed writers of the same target left.

    Args:
        target: the file or folder that the temporaries were for.
        read: `identities` of the files and folders being read, which stay.
        notes: receives messages about unlocked files that look like temporaries and stay.
        parts: None if the target is a file. For folders: called with each temporary folder, it
            returns a predicate that is True for the paths inside that may be removed.
        before: called with each temporary while it is locked here; returns a reason to keep it, or
            None. An empty reason gives no message.
        own: the caller's own temporary, which stays, even where no lock says that it is in use.

    Returns:
        the temporaries that were removed.
    """
    removed, left = [], []
    for path in (path for path in _alike(target) if path != own):
        try:
            why = _not_ours(target, path, read, folder=parts is not None)
            if why is None and not system.has_locks():
                why = system.NO_LOCKS
            if why is None:
                with locked(path) as status:
                    why = before(path)
                    if why is None and parts is not None:
                        why = None if remove_folder(path, parts(path)) else "holds other files"
                    elif why is None:
                        unlink(path, status)
                if why is None:
                    removed.append(path)
        except OSError:  # locked, or removed meanwhile
            continue
        if why:
            left.append(f"{printable(path.name)} stays: it has the form of a temporary, and {why}")
    if notes is not None:
        notes += left[:_MOST_NOTES]
        if more := len(left) - _MOST_NOTES:
            notes += [f"{more} more such files stay"] * (more > 0)
    return removed


def _not_ours(target: Path, path: Path, read: frozenset[Identity], folder: bool) -> str | None:
    """The reason not to remove `path`; None if it is an unused temporary of this user."""
    status = os.stat(path, follow_symlinks=False)
    if not _is_proven(target, path.name):
        return "another program gave it its name"
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(status.st_mode):
        return "is not a folder" if folder else "is not a plain file"
    if not system.is_of_user(status):
        return "belongs to another user"
    if (status.st_dev, status.st_ino) in read:
        return "is being read"
    # A writer may have been killed after it linked the target and before it removed this name.
    placed = os.path.lexists(target) and os.path.samestat(status, os.lstat(target))
    if not folder and status.st_nlink > 1 and not placed:
        return "has a second name"
    return None


def identities(paths: Iterable[Path]) -> frozenset[Identity]:
    """The identities of files and of all folders above them, with links resolved."""
    found = set()
    for path in paths:
        real = Path(os.path.realpath(path))
        for one in (real, *real.parents):
            with contextlib.suppress(OSError):
                status = os.stat(one)
                found.add((status.st_dev, status.st_ino))
    return frozenset(found)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[os.stat_result]:
    """Locks a file or folder, and yields its status.

    Raises:
        BlockingIOError: another process locked it.  OSError: it is missing, a link or a device.
    """
    before = os.stat(path, follow_symlinks=False)  # opening a device can have side effects
    if not (stat.S_ISREG(before.st_mode) or stat.S_ISDIR(before.st_mode)):
        raise OSError(errno.EINVAL, "is not a plain file", str(path))
    fd = system.open_plain(path)
    try:
        system.lock(fd)
        yield os.fstat(fd)
    finally:
        os.close(fd)


def unlink(path: Path, status: os.stat_result) -> None:
    """Removes `path` if it still refers to the file with this status."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(path, follow_symlinks=False), status):
            os.unlink(path)


def remove(folder: Path, names: Iterable[str], read: frozenset[Identity]) -> None:
    """Removes plain files of this user in a folder, except those being read (`identities`)."""
    with system.Directory(folder) as directory:
        for name in names:
            with contextlib.suppress(OSError):
                status = directory.stat(name)
                plain = os.path.basename(name) == name and stat.S_ISREG(status.st_mode)
                identity = (status.st_dev, status.st_ino)
                if plain and system.is_of_user(status) and identity not in read:
                    directory.unlink(name)


def others(path: Path, is_part: IsPart) -> list[str]:
    """Relative paths in a folder that `is_part` rejects, and all links and special files."""
    found = []
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            inside = os.path.join(folder, name)
            mode = os.lstat(inside).st_mode
            plain = stat.S_ISDIR(mode) if name in folders else stat.S_ISREG(mode)
            if not plain or not is_part(os.path.relpath(inside, path)):
                found.append(os.path.relpath(inside, path))
    return sorted(found)


def remove_folder(path: Path, is_part: IsPart) -> bool:
    """Removes paths in a folder that `is_part` accepts, then the empty folder; True if it is gone.

    No link is followed. Files named "_..." are removed last, because they describe the others.
    """
    for folder, names, directory in system.walk_up(path):
        inside = os.path.relpath(folder, path)
        with directory:
            for name in sorted(names, key=lambda name: (name.startswith("_"), name)):
                with contextlib.suppress(OSError):
                    status = directory.stat(name)
                    if not is_part(os.path.normpath(os.path.join(inside, name))):
                        continue
                    if stat.S_ISDIR(status.st_mode):
                        directory.rmdir(name)
                    elif stat.S_ISREG(status.st_mode):
                        directory.unlink(name)
    with contextlib.suppress(OSError):
        os.rmdir(path)
    return not os.path.lexists(path)
