"""Writing a checkpoint: all of it, verified, or nothing.

The file is written beside its target, read back and compared, and put in place in one step. At
every moment the target is the old file or the complete new one.
"""

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxmha.converters.checkpoint import formats, reading
from jaxmha.converters.checkpoint.contents import Plan
from jaxmha.converters.checkpoint.errors import (
    DestinationExists,
    UnsupportedDtype,
    UnsupportedFormat,
    WriteFailed,
)
from jaxmha.converters.checkpoint.limits import Budget, Limits
from jaxmha.converters.checkpoint.source import Source
from jaxmha.converters.checkpoint.tensor import BFLOAT16, FLOAT8, NUMPY, to_bytes

_DTYPES = frozenset((*NUMPY, BFLOAT16, *FLOAT8))
_UNLIMITED = Limits(logical_bytes=2**63 - 1)


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray],
    *,
    metadata: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
    force: bool = False,
    source: str | os.PathLike[str] | None = None,
) -> None:
    """Writes tensors in the format that the suffix of the path names.

    Args:
        path: the target; its folder must exist.
        tensors: NumPy arrays by name, or an open Checkpoint, which is copied tensor by tensor.
            A lazy mapping is asked for each tensor three times: size, data, comparison.
        metadata: strings to keep with the tensors; .safetensors only.
        names: names of Keras layers by group path; .weights.h5 only.
        force: replace an existing file.
        source: the file that the tensors came from, which is never replaced.

    Raises:
        DestinationExists: the file is there, and is not to be replaced.
        UnsupportedFormat: no format that is written here has this suffix.
        UnsupportedDtype: the format cannot hold a tensor.
        WriteFailed: the operating system refused, or what was written reads back otherwise.
        MissingDependency: the format needs an optional package.
        CheckpointError: a name does not fit, as PathEscape, AmbiguousFile, MalformedFile or
            BudgetExceeded.

    Example:
        >>> import numpy, tempfile
        >>> from jaxmha.converters import checkpoint
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint.write(f"{folder}/a.npz", {"bias": numpy.zeros(4)})
        ...     checkpoint.write(f"{folder}/a.npz", {"bias": numpy.ones(4)}, force=True)
        ...     print(checkpoint.open(f"{folder}/a.npz")["bias"])
        [1. 1. 1. 1.]
    """
    target = Path(path)
    format = formats.for_writing(target)
    metadata, names = dict(metadata or {}), dict(names or {})
    for given, held, what in (
        (metadata, format.holds_metadata, "metadata"),
        (names, format.holds_names, "layer names"),
    ):
        if given and not held:
            raise UnsupportedFormat(
                target, f"{format.name} has no place for {what}", "leave it out"
            )
        if any(type(text) is not str for pair in given.items() for text in pair):
            raise UnsupportedFormat(target, f"{what} must be strings", "convert them with str()")
    if isinstance(tensors, reading.Checkpoint):
        source = tensors.path
    plan = _plan(target, tensors)

    def emit(file: BinaryIO) -> None:
        format.write(file, plan, metadata, names)

    def verify(temporary: Path) -> None:
        _compare(plan, metadata, names, temporary, format)

    replace(target, emit, verify, force=force, source=source)


def replace(
    target: Path,
    emit: Callable[[BinaryIO], None],
    verify: Callable[[Path], None],
    *,
    force: bool,
    source: str | os.PathLike[str] | None = None,
) -> None:
    """Puts a file in place in one step, after `verify` has accepted it.

    Raises:
        DestinationExists, WriteFailed, and whatever emit and verify raise.
    """
    temporary: Path | None = None
    try:
        mode = _check_target(target, force, source)
        target = Path(os.path.realpath(target))  # a link typed by the user stays a link
        _remove_stale(target)
        temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.tmp")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        # Without a file to replace, the umask decides.
        fd = os.open(temporary, flags, 0o666 if mode is None else 0o600)
        with os.fdopen(fd, "w+b") as file:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # alive: not stale
            emit(file)
            file.flush()
            if mode is not None:
                os.fchmod(fd, mode)
            verify(temporary)
            os.fsync(fd)
            _commit(temporary, target, force)
            temporary = None
        _sync_folder(target.parent)
    except OSError as e:
        raise WriteFailed(
            target, f"cannot be written ({e.strerror or e})", "check the folder and its free space"
        ) from e
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _plan(target: Path, tensors: Mapping[str, np.ndarray]) -> Plan:
    """Checks names, shapes and dtypes before anything is written."""
    budget = Budget(target, 0, _UNLIMITED)
    known = tensors.info if isinstance(tensors, reading.Checkpoint) else None
    for name in tensors:
        if not isinstance(name, str):
            raise UnsupportedFormat(target, f"the name {name!r} is not a string", "use strings")
        given = known[name] if known is not None else np.asarray(tensors[name])
        dtype = given.dtype.newbyteorder("=")
        if dtype not in _DTYPES:
            raise UnsupportedDtype(
                target, f"the dtype {given.dtype} is not numeric", "convert the tensor first", name
            )
        budget.tensor(name, tuple(given.shape), dtype)

    def load(name: str) -> np.ndarray:
        array = np.asarray(tensors[name])
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    return Plan(target, budget.info, load)


def _compare(
    plan: Plan,
    metadata: Mapping[str, str],
    names: Mapping[str, str],
    temporary: Path,
    format: formats.Format,
) -> None:
    def same() -> Iterator[bool]:
        with reading.read(Source(temporary), format, _UNLIMITED) as written:
            yield dict(written.info) == dict(plan.info)
            yield dict(written.metadata) == metadata and dict(written.names) == names
            for name in plan.info:
                yield np.array_equal(to_bytes(written[name]), to_bytes(plan.load(name)))

    if not all(same()):
        raise WriteFailed(plan.path, "does not read back as it was written", "check the disk")


def _check_target(target: Path, force: bool, source: str | os.PathLike[str] | None) -> int | None:
    """The mode of the file to replace, None where there is none."""
    try:
        status = os.stat(target)
    except FileNotFoundError:
        if target.is_symlink():
            raise DestinationExists(target, "is a dangling link", "remove it first") from None
        return None
    except ValueError as e:
        raise WriteFailed(target, f"is not a path ({e})", "choose another name") from e
    if not stat.S_ISREG(status.st_mode):
        raise DestinationExists(target, "is there and not a regular file", "choose another name")
    if source is not None and os.path.exists(source) and os.path.samefile(source, target):
        raise DestinationExists(target, "is the file being read", "choose another name")
    if not force:
        raise DestinationExists(target, "is already there", "choose another name, or force it")
    return stat.S_IMODE(status.st_mode)


def _commit(temporary: Path, target: Path, force: bool) -> None:
    if not force:
        try:
            # Unlike a rename, a link fails where another process was faster.
            os.link(temporary, target)
        except FileExistsError:
            raise DestinationExists(target, "is already there", "choose another name") from None
        except OSError:  # a file system without hard links
            if os.path.lexists(target):
                raise DestinationExists(target, "is already there", "force it") from None
        else:
            os.unlink(temporary)
            return
    os.replace(temporary, target)


def _remove_stale(target: Path) -> None:
    """Removes what a killed writer of the same target left: a temporary that nobody locks."""
    ours = re.compile(re.escape(f".{target.name[:100]}.") + r"[0-9a-f]{16}\.tmp")
    for entry in os.scandir(target.parent):
        if not ours.fullmatch(entry.name):
            continue
        with contextlib.suppress(OSError):
            fd = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            finally:
                os.close(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
