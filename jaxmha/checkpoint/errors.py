# ruff: noqa: N818 (the names describe the problem; only the base is named Error)
"""Errors of reading and writing checkpoints, one class per kind.

Every message names the file, the member or tensor, the problem and the remedy.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

_LONGEST_SHOWN = 120


class CheckpointError(ValueError):
    """Base of every error that reading or writing a checkpoint raises.

    Example:
        >>> print(MalformedFile("a.npz", "the file is empty", "write it again", "w"))
        a.npz: 'w': the file is empty; write it again
    """

    def __init__(
        self, path: str | os.PathLike[str], problem: str, remedy: str, member: str | None = None
    ) -> None:
        # Unpickling an exception calls its class with `args`, so `args` has all four arguments.
        super().__init__(path, problem, remedy, member)
        self.path, self.problem, self.remedy, self.member = path, problem, remedy, member

    def __str__(self) -> str:
        where = f"{os.fspath(self.path)}: "
        if self.member is not None:
            where += f"{shown(self.member)}: "
        return f"{where}{self.problem}; {self.remedy}"


class UnreadableFile(CheckpointError):
    """The path is missing, is not a regular file, or may not be read."""


class UnsupportedFormat(CheckpointError):
    """A format, or a part of a format, that is not supported."""


class MalformedFile(CheckpointError):
    """The file violates its own format."""


class AmbiguousFile(CheckpointError):
    """Readers may disagree about the content: duplicate entries, or a suffix of another format."""


class ForbiddenContent(CheckpointError):
    """The file contains code, links, encrypted data or objects, where only arrays are allowed, or
    uses a feature of its format that checkpoints of weights do not need."""


class BudgetExceeded(CheckpointError):
    """The file needs more than the limits allow; pass larger `Limits`."""


class IntegrityError(CheckpointError):
    """A checksum does not match, or the file changed while it was being read."""


class PathEscape(CheckpointError):
    """A name inside the file would lead out of its folder if it were used as a path."""


class IncompleteCheckpoint(CheckpointError):
    """A part that the file refers to is missing."""


class UnsupportedDtype(CheckpointError):
    """A dtype that NumPy with ml_dtypes, or the target format, cannot hold."""


class DestinationExists(CheckpointError):
    """Writing would replace an existing file, or a file that is being read or written."""


class WriteFailed(CheckpointError):
    """The operating system refused a write, or the file did not read back as it was written."""


class MissingDependency(CheckpointError):
    """An optional package is needed for this format."""


class UnknownTensor(CheckpointError, KeyError):
    """The checkpoint is valid and has no tensor of that name."""


@contextlib.contextmanager
def damage(
    path: str | os.PathLike[str], library: str, remedy: str, name: str | None = None
) -> Iterator[None]:
    """Converts any exception that a library raises in the block to MalformedFile.

    Example:
        >>> with damage("a.h5", "HDF5", "write it again"):  # doctest: +ELLIPSIS
        ...     raise KeyError("no symbol")
        Traceback (most recent call last):
        ...
        jaxmha.checkpoint.errors.MalformedFile: a.h5: HDF5 cannot read it...
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as e:
        reason = " ".join(str(e).split())[:300]
        raise MalformedFile(path, f"{library} cannot read it ({reason})", remedy, name) from e


def shown(name: Any) -> str:
    """A name from a file, escaped and shortened for printing."""
    text = ascii(name[: _LONGEST_SHOWN + 1] if isinstance(name, str) else name)
    return text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "...'"


def listed(names: Sequence[str], most: int = 5, separator: str = ", ") -> str:
    """The first names, and the number of the others.

    Example:
        >>> listed(["a", "b", "c"], 2)
        'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" * (len(names) > most)
    return separator.join(names[:most]) + more


def printable(text: str, keep: str = "") -> str:
    """Text from a file with control and bidirectional characters escaped, except those in `keep`.

    Example:
        >>> printable("a\\tb")
        'a\\\\tb'
    """
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
