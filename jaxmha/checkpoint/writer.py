"""Writes a checkpoint: complete and verified, or not at all."""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from dataclasses import replace as changed
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from jaxmha.checkpoint import atomic, digests, reader, shards_write, temporaries
from jaxmha.checkpoint.casting import DTYPES, Loss, Wanted
from jaxmha.checkpoint.casting import target as cast_target
from jaxmha.checkpoint.errors import (
    DestinationExists,
    UnsupportedDtype,
    UnsupportedFormat,
    WriteFailed,
    shown,
)
from jaxmha.checkpoint.folder import Folder
from jaxmha.checkpoint.formats import orbax, orbax_parts, table
from jaxmha.checkpoint.limits import UNLIMITED, Budget, is_text
from jaxmha.checkpoint.plan import UNORDERED, Progress, WriteJob
from jaxmha.checkpoint.source import Source
from jaxmha.checkpoint.tensor import TensorInfo

SHARD_SIZE = 5 * 10**9
_LARGE = 64 << 20  # bytes of tensors above which two threads read back


@dataclass(frozen=True)
class Written:
    """The result of a write.

    Attributes:
        path: the target.
        files: all files of the checkpoint; the index of a sharded checkpoint is last.
        info: name -> TensorInfo, as written.
        digests: name -> digest, as written and read back.
        losses: name -> Loss, for every tensor whose dtype was changed.
        kept: complete shards of an interrupted write, which were not written again.
        notes: messages about files that look like temporaries of the target and were not removed,
            and about shards that are larger than `shard_size`.
    """

    path: Path
    files: tuple[Path, ...]
    info: Mapping[str, TensorInfo]
    digests: Mapping[str, str]
    losses: Mapping[str, Loss] = field(default_factory=dict)
    kept: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def write(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray],
    *,
    metadata: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
    ordered: bool = True,
    force: bool = False,
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    dtype: Wanted | Mapping[str, Wanted] | None = None,
    overflow: Literal["count", "refuse"] = "count",
    shard_size: int | None = None,
    resume: str | None = None,
    part: tuple[int, int] | None = None,
    digest: str | None = "fast",
    progress: Progress | None = None,
) -> Written:
    """Writes tensors in the format that the suffix of the path names.

    At every moment, the target is the old file or the complete new one, which was read back and
    compared. If `tensors` is lazy, memory holds the largest tensor and some blocks of 1 MiB (orbax:
    more).

    Args:
        path: the target, in an existing folder. `NAME.safetensors.index.json` writes shards next to
            the index, `NAME.orbax` a folder.
        tensors: arrays by name; or an open Checkpoint or a Lazy, which load one tensor after the
            other. Strided views are written without a copy.
        metadata: strings to keep with the tensors; not in .weights.h5. torch, NumPy and the library
            of safetensors ignore them; orbax has them as custom metadata.
        names: names of Keras layers by group path; .weights.h5 only.
        ordered: False: the order of Keras layers of one class is a guess, and the file records
            this; .weights.h5 only.
        force: replace an existing target.
        source: files that the tensors came from, which are never replaced; the files of a
            Checkpoint are added automatically.
        dtype: dtype to cast floating-point tensors to; or a mapping from names of any tensors to
            dtypes.
        overflow: for values beyond the range of their new dtype: "count" them in `Written.losses`,
            or "refuse" to write, with UnsupportedDtype.
        shard_size: most bytes of each shard file of an index (default: 5 * 10**9). A tensor that
            does not fit has a shard of its own, and `Written.notes` says so.
        resume: for an index: a text that identifies the tensors, such as the digest of the source
            and of the plan. The write continues an interrupted one with the same text: complete
            shards are checked and kept. After a finished one, it checks all and writes nothing.
        part: `(i, n)`, with `resume`: write only the shards i, i + n, i + 2n, ... (counted from 0),
            and no index. Other processes write the other parts; afterwards, a call without `part`
            writes the index.
        digest: algorithm of the digest per tensor, kept in the file and checked on reading:
            "xxh3_128" or "sha256"; "fast": xxh3_128 if xxhash is installed, else sha256; None: no
            digest is kept.
        progress: called as progress(done, total) in bytes; `total` counts writing and reading back.

    Raises:
        CheckpointError: DestinationExists, UnsupportedFormat, UnsupportedDtype, WriteFailed,
            MissingDependency, and for names and shapes that are not allowed: PathEscape,
            AmbiguousFile, MalformedFile, BudgetExceeded.
    """
    target = Path(path)
    format = table.for_writing(target)
    named = {**(names or {}), **({} if ordered else dict([UNORDERED]))}
    _check_arguments(target, format, metadata or {}, named, shard_size, resume)
    _check_choices(target, overflow, resume, part)
    plan = _plan(target, tensors, dtype, overflow, digest, progress)
    plan = changed(plan, metadata=dict(metadata or {}), names=dict(names or {}), ordered=ordered)
    format.check(plan)
    return _write(plan, format, force, _sources(source, tensors), shard_size, resume, part)


def check_destination(
    path: str | os.PathLike[str],
    force: bool,
    sources: Sequence[Path],
    shard_size: int | None,
    resume: str | None,
    part: tuple[int, int] | None,
) -> None:
    """Raises the errors of `write` about the destination; call it before reading large sources."""
    target = Path(path)
    format = table.for_writing(target)
    _check_arguments(target, format, {}, {}, shard_size, resume)
    _check_choices(target, "count", resume, part)
    with atomic.typed(target):
        # With `resume`, `shards_write` decides whether an existing index is that of this write.
        atomic.check_target(target, force or resume is not None, sources, format.folder)
        os.scandir(Path(os.path.realpath(target)).parent).close()


def _write(
    plan: WriteJob,
    format: table.Format,
    force: bool,
    sources: Sequence[Path],
    shard_size: int | None,
    resume: str | None,
    part: tuple[int, int] | None,
) -> Written:
    files, kept = [plan.path], list[Path]()
    if format.sharded:
        size = shard_size or SHARD_SIZE
        files, kept = shards_write.write(plan, _write_file, size, force, sources, resume, part)
    elif format.folder:
        _write_folder(plan, force, sources)
    else:
        _write_file(plan, format, force, sources)
    found = plan.info, plan.digests, plan.losses
    return Written(plan.path, tuple(files), *found, tuple(kept), tuple(plan.notes))


def _plan(
    target: Path,
    tensors: Mapping[str, np.ndarray],
    dtype: Wanted | Mapping[str, Wanted] | None,
    overflow: str,
    digest: str | None,
    progress: Progress | None,
) -> WriteJob:
    algorithm = digest if digest is not None and digest != "fast" else digests.usual()
    digests.hasher(algorithm, target)  # raise before anything is written
    info, declared, load = _tensors(target, tensors, dtype)
    return WriteJob(
        target,
        info,
        declared,
        load,
        algorithm=algorithm,
        keep_digests=digest is not None,
        refuses_overflow=overflow == "refuse",
        advance=_Counter(2 * sum(one.nbytes for one in info.values()), progress),
    )


def _sources(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
    tensors: Mapping[str, np.ndarray],
) -> list[Path]:
    given = [source] if isinstance(source, str | os.PathLike) else source or ()
    known = tensors.files if isinstance(tensors, reader.Checkpoint) else ()
    return [*map(Path, given), *known]


def _check_choices(
    target: Path, overflow: str, resume: str | None, part: tuple[int, int] | None
) -> None:
    if overflow not in ("count", "refuse"):
        raise UnsupportedFormat(target, f"overflow = {overflow!r}", 'give "count" or "refuse"')
    if part is not None and (resume is None or not 0 <= part[0] < part[1]):
        problem = f"part {part} of a write" if resume is not None else "a part of another write"
        raise UnsupportedFormat(target, problem, "give resume, and (i, n) with 0 <= i < n")


def _write_file(
    plan: WriteJob,
    format: table.Format,
    force: bool,
    sources: Sequence[Path] = (),
    mode: int | None = None,
) -> None:
    def emit(file: BinaryIO) -> None:
        assert format.write is not None
        format.write(file, plan)

    def verify(temporary: Path) -> None:
        with (
            atomic.reading_back(plan.path, temporary),
            contextlib.closing(Source(temporary, known_as=plan.path)) as source,
            reader.read(source, format, UNLIMITED) as written,
        ):
            compare(plan, written)

    size = sum(info.nbytes for info in plan.info.values())
    left = atomic.replace(
        plan.path, emit, verify, force=force, sources=sources, mode=mode, size=size
    )
    plan.notes.extend(left)


def _write_folder(plan: WriteJob, force: bool, sources: Sequence[Path]) -> None:
    with atomic.typed(plan.path):
        old = atomic.check_target(plan.path, force, sources, folder=True)
        target = Path(os.path.realpath(plan.path))
        if old is not None:
            _refuse_other_files(plan.path)
        temporaries.clean(target, temporaries.identities(sources), plan.notes, parts=orbax_parts.of)
        with atomic.temporary_folder(target, orbax_parts.of, plan.notes) as path:
            orbax.write(path, plan)
            atomic.settle_folder(path)
            with (
                atomic.reading_back(plan.path, path),
                reader.read(Folder(path, UNLIMITED), table.ORBAX, UNLIMITED) as written,
            ):
                compare(plan, written)
            atomic.commit_folder(path, target, old, orbax_parts.of)


def _refuse_other_files(path: Path) -> None:
    """Raises DestinationExists unless a folder holds an orbax checkpoint and nothing else."""
    problem = "is a folder that is no orbax checkpoint"
    if os.path.isfile(path / orbax.TREE):
        others = temporaries.others(path, orbax_parts.of(path))
        if not others:
            return
        problem = f"holds {shown(others[0])}, which is no part of an orbax checkpoint"
        problem += f", and {len(others) - 1} more" * (len(others) > 1)
    raise DestinationExists(path, problem, "remove or rename it, or choose another name")


def compare(plan: WriteJob, written: reader.Checkpoint) -> None:
    """Raises WriteFailed unless `written` has the contents and the digests of `plan`."""
    same = dict(written.info) == dict(plan.info) and written.ordered == plan.ordered
    same = same and dict(written.metadata) == plan.metadata and dict(written.names) == plan.names
    if plan.keep_digests:
        same = same and dict(written.digests) == {n: plan.digests[n] for n in plan.info}
    if not same or not _has_digests(plan, written):
        raise atomic.unlike(plan.path)


def _has_digests(plan: WriteJob, written: reader.Checkpoint) -> bool:
    """True if all tensors of a written file have the digests of the plan.

    Two threads read a large file, because copying from the page cache takes longer than hashing.
    If tensors are not read in pieces, one thread reads, so that memory holds one tensor.
    """
    stopped, counting = threading.Event(), threading.Lock()

    def advance(count: int) -> None:
        with counting:
            plan.advance(count)

    def check(names: Sequence[str]) -> bool:
        for name in names:
            if stopped.is_set():
                return False
            if written.recompute(name, plan.algorithm, advance) != plan.digests[name]:
                stopped.set()
        return not stopped.is_set()

    names = list(plan.info)
    if not written.streams or sum(info.nbytes for info in plan.info.values()) <= _LARGE:
        return check(names)
    with ThreadPoolExecutor(2) as threads:
        try:
            return all(threads.map(check, (names[::2], names[1::2])))
        finally:
            stopped.set()


def _check_arguments(
    target: Path,
    format: table.Format,
    metadata: Mapping[str, str],
    names: Mapping[str, str],
    shard_size: int | None,
    resume: str | None,
) -> None:
    if (shard_size is not None or resume is not None) and not format.sharded:
        remedy = "write it as one file, or name an index, such as NAME.safetensors.index.json"
        raise UnsupportedFormat(target, f"{format.name} has no place for shards", remedy)
    for given, held, what in (
        (metadata, format.holds_metadata, "metadata"),
        (names, format.holds_names, "layer names"),
    ):
        if given and not held:
            problem = f"{format.name} has no place for {what}"
            raise UnsupportedFormat(target, problem, "leave it out")
        if any(type(text) is not str for pair in given.items() for text in pair):
            raise UnsupportedFormat(target, f"{what} must be strings", "convert them with str()")
        if any(not is_text(text) for pair in given.items() for text in pair):
            raise UnsupportedFormat(target, f"{what} hold surrogates", "give text that is UTF-8")
    if format.sharded and not is_text(target.name):
        problem = "the name is not UTF-8, and an index names its shards in JSON"
        raise UnsupportedFormat(target, problem, "choose another name")
    if digests.KEY in metadata:
        raise UnsupportedFormat(target, f"the key {digests.KEY!r} is reserved", "leave it out")
    if shard_size is not None and shard_size < 1:
        raise UnsupportedFormat(target, f"shards of {shard_size} bytes", "give a positive size")


def _tensors(
    target: Path,
    tensors: Mapping[str, np.ndarray],
    dtype: Wanted | Mapping[str, Wanted] | None,
) -> tuple[Mapping[str, TensorInfo], Mapping[str, TensorInfo], Callable[[str], np.ndarray]]:
    """Checks names, shapes and dtypes; returns the info after and before casting, and a loader."""
    budget = Budget(target, 0, UNLIMITED)
    declared: dict[str, TensorInfo] = {}
    known = tensors.info if isinstance(tensors, reader.Lazy) else None
    for name in tensors:
        if not isinstance(name, str):
            raise UnsupportedFormat(target, f"the name {name!r} is not a string", "use strings")
        given = known[name] if known is not None else np.asarray(tensors[name])
        before = given.dtype.newbyteorder("=")
        if before not in DTYPES.values():
            raise UnsupportedDtype(
                target, f"the dtype {given.dtype} is not numeric", "convert the tensor first", name
            )
        declared[name] = TensorInfo(tuple(given.shape), before)
        try:
            after = cast_target(dtype, name, before)
        except TypeError:
            after = np.dtype(object)
        if after not in DTYPES.values() or (before.kind == "c" and after.kind != "c"):
            raise UnsupportedDtype(
                target,
                f"{before} cannot become {dtype if after == object else after}",
                "choose another dtype",
                name,
            )
        budget.tensor(name, declared[name].shape, after)
    if isinstance(dtype, Mapping) and not dtype.keys() <= declared.keys():
        unknown = min(dtype.keys() - declared.keys())
        raise UnsupportedFormat(target, f"a dtype is given for {unknown!r}", "there is none such")

    def load(name: str) -> np.ndarray:
        array = np.asarray(tensors[name])
        if TensorInfo(array.shape, array.dtype.newbyteorder("=")) != declared[name]:
            problem = f"is {array.dtype} {array.shape}, and was declared otherwise"
            raise WriteFailed(target, problem, "give the same tensor every time", name)
        return array

    return budget.info, declared, load


class _Counter:
    """Counts bytes and reports them to `progress`."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def __call__(self, count: int) -> None:
        self.done += count
        if self.progress:
            self.progress(self.done, self.total)
