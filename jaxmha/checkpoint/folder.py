"""A folder of plain files, listed once and watched for changes."""

import bisect
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from jaxmha.checkpoint.errors import (
    ForbiddenContent,
    IncompleteCheckpoint,
    IntegrityError,
    UnreadableFile,
)
from jaxmha.checkpoint.limits import Budget, Limits
from jaxmha.checkpoint.source import Source

UNFINISHED = ".orbax-checkpoint-tmp"
_DEPTH = 6  # maximal nesting depth of folders
_AGAIN = "copy the whole folder again"
_State = tuple[int, int, int]  # inode, size and time of change of a file


class Folder:
    """A folder of plain files, none of which may change while it is read.

    Raises:
        UnreadableFile, IncompleteCheckpoint, ForbiddenContent, BudgetExceeded.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        self.path = path
        if UNFINISHED in path.name:
            remedy = "wait for its writer, or name another step"
            raise IncompleteCheckpoint(path, "the writing of this folder never ended", remedy)
        self._limits = limits
        self._files = self._walk()
        self.size = sum(size for _, size, _ in self._files.values())
        self._sorted = sorted(self._files)

    def _walk(self, part: str = "") -> dict[str, _State]:
        """The states of all files, or of the files below `part`, by path inside this folder."""
        budget, found = Budget(self.path, 0, self._limits), dict[str, _State]()
        todo, seen = [(str(self.path / part), f"{part}/" if part else "", 1 if part else 0)], 0
        try:
            while todo:
                folder, inside, depth = todo.pop()
                budget.spend("the depth of folders", depth, _DEPTH)
                with os.scandir(folder) as entries:
                    for entry in entries:
                        seen += 1
                        budget.spend("the number of files", seen, self._limits.files)
                        name, status = inside + entry.name, entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(status.st_mode):
                            todo.append((entry.path, f"{name}/", depth + 1))
                        elif not stat.S_ISREG(status.st_mode):
                            problem = "is a link or device, not a plain file"
                            raise ForbiddenContent(self.path, problem, "copy the files here", name)
                        else:
                            found[name] = _state(status)
        except OSError as e:
            problem = f"cannot be listed ({e.strerror or e})"
            raise UnreadableFile(self.path, problem, "check its permissions") from e
        return found

    def __contains__(self, file: str) -> bool:
        return file in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def read(self, file: str, most: int) -> bytes:
        """Reads a whole file of the folder, which may have at most `most` bytes.

        Raises:
            IncompleteCheckpoint, BudgetExceeded, UnreadableFile.
        """
        source = self._open(file)
        try:
            Budget(self.path, 0, self._limits).spend("the file", source.size, most, file)
            return source.read(0, source.size)
        finally:
            source.close()

    def read_part(self, file: str, part: slice) -> bytes:
        """Reads a slice of a file, clipped to its size; a negative start counts from the end.

        Raises:
            IncompleteCheckpoint, UnreadableFile.
        """
        source = self._open(file)
        try:
            begin, end, _ = part.indices(source.size)
            return source.read(begin, max(0, end - begin))
        finally:
            source.close()

    def _open(self, file: str) -> Source:
        if file not in self:
            raise IncompleteCheckpoint(self.path, "the file is missing", _AGAIN, file)
        return Source(self.path / file)

    def check_unchanged(self, places: Iterable[str] = ("",)) -> None:
        """Raises IntegrityError if a file in `places` was added, removed or changed.

        `places` are files and folders inside this folder; "" is the whole folder. Listing the whole
        folder after each tensor would take time quadratic in the number of files.
        """
        if not all(map(self._same, places)):
            problem = "the folder changed while it was being read"
            raise IntegrityError(self.path, problem, "wait for its writer, read again")

    def _same(self, place: str) -> bool:
        try:
            if place in self._files:
                return _state(os.lstat(self.path / place)) == self._files[place]
            return self._walk(place) == self._below(place)
        except OSError:  # removed since: it existed on opening
            return False
        except UnreadableFile:  # it was readable on opening
            return False

    def _below(self, place: str) -> dict[str, _State]:
        """The states of the files below `place` when the folder was opened."""
        if not place:
            return self._files
        start, end = (bisect.bisect_left(self._sorted, place + sign) for sign in "/0")
        return {file: self._files[file] for file in self._sorted[start:end]}

    def close(self) -> None:
        """Does nothing: no file is held open."""


def _state(status: os.stat_result) -> _State:
    return status.st_ino, status.st_size, status.st_mtime_ns
