"""Writes a sharded checkpoint: first the shards under new names, then the index.

Replacing the index switches from the old checkpoint to the new one in one step. Until then a
`journal` lists the new shards.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import Any, BinaryIO

from jaxmha.checkpoint import (
    atomic,
    journal,
    reader,
    shards_index,
    shards_read,
    system,
    temporaries,
)
from jaxmha.checkpoint.casting import Loss
from jaxmha.checkpoint.errors import CheckpointError, DestinationExists, UnsupportedFormat, shown
from jaxmha.checkpoint.formats import table
from jaxmha.checkpoint.limits import UNLIMITED, Limits
from jaxmha.checkpoint.plan import WriteJob
from jaxmha.checkpoint.source import Source
from jaxmha.checkpoint.temporaries import Identity

_TAG = 12  # hexadecimal digits of the tag in shard names
_PATIENCE = 5.0  # seconds to wait for a lock; `_clean` locks a stale journal for less
WriteFile = Callable[..., None]


def write(
    plan: WriteJob,
    write_file: WriteFile,
    shard_size: int,
    force: bool,
    sources: Sequence[Path],
    resume: str | None,
    part: tuple[int, int] | None = None,
) -> tuple[list[Path], list[Path]]:
    """Writes shards and index; returns all files, and the shards kept from an interrupted write.

    With `part = (i, n)` it writes only the shards i, i + n, i + 2n, ..., and no index. Other
    processes write the other parts; a call without `part` then keeps them and writes the index.

    Raises:
        DestinationExists, WriteFailed, and the errors of writing a shard.
    """
    with atomic.typed(plan.path):
        present = atomic.check_target(plan.path, force or resume is not None, sources)
        mode = atomic.mode_of(present)
        target = Path(os.path.realpath(plan.path))
        ending = shards_read.suffix(target)
        parts = _split(plan, shard_size, table.BY_SUFFIX[ending])
        shards = _shards(plan, target, ending, parts, resume)
        names = dict(zip(shards, parts, strict=True))
        shards_index.check(plan, names)
        if finished := present is not None and not force:
            shards_index.refuse_other(target, shards_index.content(plan, names))
        mine = shards if part is None else shards[part[0] :: part[1]]
        read = temporaries.identities(sources)
        with _journal(target, mine) as (list_of_own, own):
            known = _begin(target, ending, own, mine)
            if resume is not None and not force:
                _refuse_others(target, ending, own, set(shards))
            _clean(target, ending, shards, mine, read, plan.notes, own)
            kept, placed = list[Path](), finished
            try:
                for shard in mine:
                    piece = changed(plan, path=shard, info={n: plan.info[n] for n in names[shard]})
                    if _is_complete(piece, shard, table.BY_SUFFIX[ending], known):
                        kept.append(shard)
                    else:
                        write_file(piece, table.BY_SUFFIX[ending], True, sources, mode)
                if finished:
                    return [*mine, *[target] * (part is None)], kept
                if part is not None:
                    _leave(target, mine, _noted(plan, names, mine))
                    return mine, kept
                with atomic.temporary(target, mode) as (file, path):
                    shards_index.write(file, path, plan, names)
                    try:
                        _put((file, path), target, ending, shards, force, read)
                    finally:
                        placed = atomic.is_placed(path, target)
            except BaseException:
                if placed:
                    pass  # an index refers to the shards, so they stay
                elif resume is None:
                    temporaries.remove(target.parent, [shard.name for shard in mine], read)
                else:
                    atomic.release(list_of_own)
                    os.replace(own, temporaries.fresh(target))  # stays under another name
                raise
    return [*shards, target], kept


def _put(
    temporary: tuple[BinaryIO, Path],
    target: Path,
    ending: str,
    shards: list[Path],
    force: bool,
    read: frozenset[Identity],
) -> None:
    """Replaces the index, then removes the shards that only the old index listed."""
    done_with = [shard for shard in _replaced(target, ending) if shard not in shards]
    # If this run is killed while it removes old shards, the next run finds them in this journal.
    with _journal(target, done_with):
        atomic.commit(*temporary, target, force)
        _remove(target, done_with, read)


def _shards(
    plan: WriteJob, target: Path, ending: str, parts: list[list[str]], resume: str | None
) -> list[Path]:
    """The paths of the shards.

    Raises:
        UnsupportedFormat: too many shards, or names that no reader accepts.
    """
    if len(parts) > (most := Limits().shards):
        problem = f"would have {len(parts)} shards, and at most {most} are read"
        raise UnsupportedFormat(plan.path, problem, "give a larger shard size")
    tag = _tag(plan, parts, resume)
    made = [
        journal.shard_name(target, ending, tag, k, len(parts)) for k in range(1, len(parts) + 1)
    ]
    try:
        shards_read.check_shard_name(plan.path, made[-1].name)
    except CheckpointError:
        problem = f"its shards would be named such as {shown(made[-1].name)}, which no reader takes"
        raise UnsupportedFormat(plan.path, problem, "choose a plain and shorter name") from None
    return made


def _split(plan: WriteJob, shard_size: int, format: table.Format) -> list[list[str]]:
    """The tensor names of each shard, in order, so that no file has more bytes than `shard_size`.

    A tensor whose file would be larger has a shard of its own; a note says so.
    """
    assert format.overhead is not None
    base, each = format.overhead(plan)
    parts: list[list[str]] = [[]]
    size, larger = base, list[str]()
    for name, info in plan.info.items():
        own = info.nbytes + each(name)
        if parts[-1] and size + own > shard_size:
            parts.append([])
            size = base
        parts[-1].append(name)
        size += own
        larger += [name] * (base + own > shard_size)
    if larger:
        plan.notes.append(
            f"{len(larger)} shards may be larger than {shard_size} bytes, each for one tensor, such "
            f"as {shown(larger[0])}"
        )
    return parts


def _replaced(target: Path, ending: str) -> list[Path]:
    """The shards in the existing index whose names show that this module wrote them for it."""
    with contextlib.suppress(CheckpointError):
        source = Source(target)
        try:
            listed = sorted(set(shards_read.parse(source, Limits()).shards.values()))
        finally:
            source.close()
        return [target.with_name(x) for x in listed if journal.is_shard(target, ending, x)]
    return []


def _tag(plan: WriteJob, parts: list[list[str]], resume: str | None) -> str:
    """The tag in shard names: random; given `resume`, a hash of it, names, dtypes and shapes."""
    if resume is None:
        return secrets.token_hex(_TAG // 2)
    settings = [resume, parts, plan.keep_digests, plan.algorithm, sorted(plan.texts)]
    settings.append([[name, str(info.dtype), info.shape] for name, info in plan.info.items()])
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:_TAG]


@contextlib.contextmanager
def _journal(target: Path, shards: Sequence[Path]) -> Iterator[tuple[BinaryIO, Path]]:
    """Yields a new journal of the shards, which is locked until the block ends."""
    with atomic.temporary(target) as (file, path):
        _fill(file, target, shards, {})
        yield file, path


def _leave(target: Path, shards: Sequence[Path], losses: Mapping[str, list[Any]]) -> None:
    """Writes an unlocked journal of finished shards. It keeps the casting losses, so that a resumed
    write need not cast these tensors again."""
    with atomic.temporary(target) as (file, path):
        _fill(file, target, shards, losses)
        atomic.release(file)
        os.replace(path, temporaries.fresh(target))
        system.sync_folder(target.parent)


def _fill(
    file: BinaryIO, target: Path, shards: Sequence[Path], losses: Mapping[str, list[Any]]
) -> None:
    file.write(journal.content(target, shards, losses))
    file.flush()
    os.fsync(file.fileno())


def _begin(target: Path, ending: str, own: Path, mine: list[Path]) -> dict[str, tuple[str, Loss]]:
    """Checks that the shards `mine` can be written; returns digests and losses from the journals.

    Raises:
        DestinationExists: another process writes some of these shards, or the path of one exists
            and is not a plain file of this user.
    """
    end = time.monotonic() + _PATIENCE
    # `_clean` of another part locks the journal of a killed writer for a moment, so try again.
    while _is_written(target, ending, own, mine):
        if time.monotonic() >= end:
            problem = "the same tensors are being written there by another process"
            raise DestinationExists(target, problem, "wait for it")
        time.sleep(0.02)
    for shard in mine:  # with `resume`, `_is_complete` checks an existing shard
        if os.path.lexists(shard):
            status = os.lstat(shard)
            if not stat.S_ISREG(status.st_mode) or not system.is_of_user(status):
                problem = "is there and not a file of this user"
                raise DestinationExists(shard, problem, "move it away, or choose another name")
    known: dict[str, tuple[str, Loss]] = {}
    for one in journal.all_of(target, ending).values():
        with contextlib.suppress(ValueError, TypeError):
            for name, (digest, *loss) in one.losses.items():
                known[name] = digest, Loss(*loss)
    return known


def _is_written(target: Path, ending: str, own: Path, mine: list[Path]) -> bool:
    """True if a locked journal other than `own` lists some of these shards."""
    journals = journal.all_of(target, ending)
    locked = {path for path in temporaries.alive(target) if path in journals} - {own}
    return any(not set(mine).isdisjoint(journals[path].shards) for path in locked)


def _refuse_others(target: Path, ending: str, own: Path, known: set[Path]) -> None:
    """Raises DestinationExists if an interrupted write with other settings left shards."""
    journals = journal.all_of(target, ending)
    listed = {shard for path in journals if path != own for shard in journals[path].shards}
    if left := [shard for shard in _unused(target, listed - known) if shard.exists()]:
        problem = f"an interrupted write with other settings left {len(left)} shards there"
        raise DestinationExists(
            target,
            problem,
            f"repeat it with those settings, or pass {atomic.FORCE} to discard them",
        )


def _noted(
    plan: WriteJob, names: Mapping[Path, list[str]], mine: Iterable[Path]
) -> dict[str, list[Any]]:
    """The digest and loss of every tensor in the shards `mine` whose dtype was changed, by name."""
    held = [name for shard in mine for name in names[shard] if name in plan.losses]
    return {name: [plan.digests[name], *plan.losses[name]] for name in held}


def _clean(
    target: Path,
    ending: str,
    shards: Sequence[Path],
    mine: Sequence[Path],
    read: frozenset[Identity],
    notes: list[str],
    own: Path,
) -> None:
    """Removes what killed writes of this target left, except `shards` and the journal `own`.

    The journals of other parts stay: only they hold the losses of their shards, and the last call,
    without `part`, reads them.
    """

    def before(path: Path) -> str | None:
        try:
            found = journal.read(path, target, ending)
        except journal.Unfit as e:
            return str(e)
        listed = set() if found is None else set(found.shards)
        if listed <= set(shards) and not listed <= set(mine):
            return ""
        for shard in listed:
            temporaries.clean(shard, read)
        _remove(target, listed - set(shards), read)
        return None

    temporaries.clean(target, read, notes, before=before, own=own)


def _remove(target: Path, shards: Iterable[Path], read: frozenset[Identity]) -> None:
    names = [shard.name for shard in _unused(target, shards)]
    temporaries.remove(target.parent, names, read)


def _unused(target: Path, shards: Iterable[Path]) -> list[Path]:
    """The shards that no index in the folder lists; none if an index cannot be read."""
    left = sorted(set(shards))
    for name in os.listdir(target.parent) if left else ():
        if not name.lower().endswith(shards_read.SUFFIX):
            continue
        try:
            source = Source(target.with_name(name))
            try:
                if source.size > Limits().index_bytes:
                    return []
                raw = source.read(0, source.size)
            finally:
                source.close()
        except CheckpointError:
            if os.path.isfile(target.with_name(name)):
                return []
            continue
        # Search for the tag only: the characters before it may be escaped in JSON.
        left = [shard for shard in left if not _tag_of(shard).encode() in raw]
    return left


def _tag_of(shard: Path) -> str:
    """The ASCII end of the name of a shard, from the tag on, which identifies the shard."""
    found = re.search(r"-[0-9a-f]{12}-[0-9]{5}-of-[0-9]{5}\.\w+$", shard.name)
    assert found is not None, shard
    return found[0]


def _is_complete(
    piece: WriteJob, shard: Path, format: table.Format, known: Mapping[str, tuple[str, Loss]]
) -> bool:
    """True if the shard holds the tensors of `piece`; adds digests and losses to `piece`."""
    if not shard.exists():
        return False
    found: dict[str, str] = {}
    with (
        contextlib.suppress(CheckpointError),
        contextlib.closing(Source(shard)) as source,  # nothing else closes it if `read` fails
        reader.read(source, format, UNLIMITED) as file,
    ):
        if dict(file.info) != dict(piece.info) or dict(file.metadata) != piece.metadata:
            return False
        for name in piece.info:
            found[name] = file.recompute(name, piece.algorithm, piece.advance)
        if piece.keep_digests and dict(file.digests) != found:
            return False
        for name in piece.info:
            if name in known and known[name][0] == found[name]:
                piece.losses[name] = known[name][1]
                piece.advance(piece.info[name].nbytes)
            elif piece.casts(name):  # cast again to measure the loss
                for _ in piece.blocks(name):
                    pass
                if piece.digests[name] != found[name]:
                    return False
            else:
                piece.advance(piece.info[name].nbytes)
        piece.digests.update(found)
        return True
    return False
