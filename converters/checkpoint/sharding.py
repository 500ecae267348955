"""Writing a sharded checkpoint: shards under fresh names first, the index last.

The index is the one file that makes shards a checkpoint, so that putting it in place is the step
from the old checkpoint to the new one. Until then its temporary lists the shards that are being
written: by it, the next run finds what a killed one left.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import BinaryIO

from jaxmha.converters.checkpoint import formats, reading, replacing, sharded
from jaxmha.converters.checkpoint.casting import Loss
from jaxmha.converters.checkpoint.contents import Plan
from jaxmha.converters.checkpoint.errors import CheckpointError, DestinationExists, WriteFailed
from jaxmha.converters.checkpoint.limits import UNLIMITED, Limits
from jaxmha.converters.checkpoint.source import Source

_TAG = 12  # hexadecimal digits
_LOSSES = "losses"
WriteFile = Callable[..., None]


def write(
    plan: Plan,
    write_file: WriteFile,
    shard_size: int,
    force: bool,
    sources: Sequence[Path],
    resume: str | None,
    part: tuple[int, int] | None = None,
) -> tuple[list[Path], list[Path]]:
    """Writes shards and index; the files in order, and those kept from an interrupted write.

    `part`: of an interrupted write, every n-th shard from the i-th on, and no index: another
    process writes the others, and one that has no part finds them and puts the index in place.

    Raises:
        DestinationExists, WriteFailed, and what writing a shard raises.
    """
    with replacing.typed(plan.path):
        mode = replacing.check_target(plan.path, force, sources)
        target = Path(os.path.realpath(plan.path))
        ending = sharded.suffix(target)
        format, parts = formats.BY_SUFFIX[ending], _split(plan, shard_size)
        stem, tag = target.name[: -len(ending + sharded.SUFFIX)], _tag(plan, parts, resume)
        shards = [
            target.with_name(f"{stem}-{tag}-{k:05}-of-{len(parts):05}{ending}")
            for k in range(1, len(parts) + 1)
        ]
        old = _listed(target)
        mine = shards if part is None else shards[part[0] :: part[1]]
        with replacing.temporary(target, mode) as (file, path):
            names = dict(zip(shards, parts, strict=True))
            where = {name: shard for shard in mine for name in names[shard]}
            total = sum(info.nbytes for info in plan.info.values())
            file.write(_index(where, {**plan.metadata, "total_size": total}))
            file.flush()
            os.fsync(file.fileno())
            _refuse_two(target, path, mine)
            if resume is not None and not force:
                _refuse_others(target, path, {*shards, *old})
            known = _losses(target)
            if part is None:
                _clean(target, shards, old)
            kept: list[Path] = []
            try:
                for shard in mine:
                    piece = changed(plan, path=shard, info={n: plan.info[n] for n in names[shard]})
                    if _is_complete(piece, shard, format, known):
                        kept.append(shard)
                    else:
                        write_file(piece, format, True, sources, mode)
                if part is not None:  # what lists the shards stays with them
                    _keep_losses(file, plan, where)
                    os.replace(path, replacing.temporary_name(target))
                    return mine, kept
                _compare(plan, path)
                done_with = _replaced(_listed(target), shards, stem, ending, sources)
                # Lists what goes, for the next run, should this one be killed while it removes it.
                with replacing.temporary(target) as (leaving, _):
                    leaving.write(_index({str(i): p for i, p in enumerate(done_with)}))
                    leaving.flush()
                    replacing.commit(file, path, target, force)
                    _remove(done_with)
            except BaseException:
                if replacing.is_placed(path, target):
                    pass  # the shards are in use
                elif resume is None:
                    _remove(shards)
                else:  # what lists the shards stays with them
                    os.replace(path, replacing.temporary_name(target))
                raise
    return [*shards, target], kept


def _split(plan: Plan, shard_size: int) -> list[list[str]]:
    """Names by shard, in their order; a larger tensor has a shard of its own."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, info in plan.info.items():
        if parts[-1] and size + info.nbytes > shard_size:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += info.nbytes
    return parts


def _replaced(
    old: list[Path],
    shards: list[Path],
    stem: str,
    ending: str,
    sources: Sequence[Path],
) -> list[Path]:
    """The shards of the old index that were written here, as their names show, for this index."""
    mine = re.compile(re.escape(stem) + r"-[0-9a-f]{12}-\d{5}-of-\d{5}" + re.escape(ending))
    ours = [p for p in old if mine.fullmatch(p.name) and p not in shards]
    return [p for p in ours if not any(replacing.is_same(p, one) for one in sources)]


def _tag(plan: Plan, parts: list[list[str]], resume: str | None) -> str:
    """What makes the names of the shards fresh; the same for the same write, to resume it."""
    if resume is None:
        return secrets.token_hex(_TAG // 2)
    said = [resume, parts, plan.keep_digests, plan.algorithm, sorted(plan.texts)]
    said.append([[name, str(info.dtype), info.shape] for name, info in plan.info.items()])
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:_TAG]


def _index(where: Mapping[str, Path], metadata: Mapping[str, str | int] | None = None) -> bytes:
    weight_map = {name: shard.name for name, shard in where.items()}
    index = {"metadata": metadata or {}, "weight_map": weight_map}
    return json.dumps(index, indent=1, ensure_ascii=False).encode()


def _listed(index: Path) -> list[Path]:
    """The shards of an index; none where it cannot be read."""
    with contextlib.suppress(CheckpointError):
        shards = set(_parsed(index).shards.values())
        for shard in shards:
            sharded.check_shard_name(index, shard)
        return [index.with_name(shard) for shard in shards]
    return []


def _parsed(index: Path) -> sharded.Index:
    source = Source(index)
    try:
        return sharded.parse(source, Limits())
    finally:
        source.close()


def _refuse_two(target: Path, own: Path, shards: list[Path]) -> None:
    """Raises DestinationExists where another process writes some of these shards."""
    for other in replacing.alive(target):
        if other != own and set(_listed(other)) & set(shards):
            problem = "the same tensors are being written there by another process"
            raise DestinationExists(target, problem, "wait for it")


def _refuse_others(target: Path, own: Path, known: set[Path]) -> None:
    """Raises DestinationExists where an interrupted write with other settings left shards."""
    listed = {
        shard for path in replacing.temporaries(target) if path != own for shard in _listed(path)
    }
    if left := [shard for shard in listed - known if shard.exists()]:
        problem = f"an interrupted write with other settings left {len(left)} shards there"
        raise DestinationExists(
            target, problem, f"repeat it as it was, or give them up with {replacing.FORCE}"
        )


def _keep_losses(file: BinaryIO, plan: Plan, where: Mapping[str, Path]) -> None:
    """Notes what casting lost beside the shards of a part, so that nobody need cast again."""
    losses = {n: [plan.digests[n], *plan.losses[n]] for n in where if n in plan.losses}
    file.seek(0)
    file.truncate()
    file.write(_index(where, {_LOSSES: json.dumps(losses)}))
    file.flush()
    os.fsync(file.fileno())


def _losses(target: Path) -> dict[str, tuple[str, Loss]]:
    """Digest and loss by tensor, as parts noted them."""
    found: dict[str, tuple[str, Loss]] = {}
    for journal in replacing.temporaries(target):
        with contextlib.suppress(CheckpointError, ValueError, TypeError, AttributeError):
            text = _parsed(journal).metadata.get(_LOSSES, "{}")
            for name, (digest, *loss) in json.loads(text).items():
                found[name] = digest, Loss(*loss)
    return found


def _clean(target: Path, shards: list[Path], old: list[Path]) -> None:
    """Removes what killed writes of this target left, except what can be continued."""
    for journal in replacing.stale(target):
        listed = _listed(journal)
        for shard in listed:
            for _ in replacing.stale(shard):
                pass
        _remove(set(listed) - set(shards) - set(old))


def _is_complete(
    piece: Plan, shard: Path, format: formats.Format, known: Mapping[str, tuple[str, Loss]]
) -> bool:
    """Whether a shard of an interrupted write is there and sound; takes over its digests."""
    if not shard.exists():
        return False
    found: dict[str, str] = {}
    with (
        contextlib.suppress(CheckpointError),
        reading.read(Source(shard), format, UNLIMITED) as file,
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
            elif piece.casts(name):  # what it lost is known by doing it again
                for _ in piece.blocks(name):
                    pass
                if piece.digests[name] != found[name]:
                    return False
            else:
                piece.advance(piece.info[name].nbytes)
        piece.digests.update(found)
        return True
    return False


def _compare(plan: Plan, index: Path) -> None:
    source = Source(index)
    try:
        with reading.read(source, formats.SHARDED, UNLIMITED) as file:
            if dict(file.info) != dict(plan.info):
                problem = "does not read back as it was written"
                raise WriteFailed(plan.path, problem, "check the disk")
    finally:
        source.close()


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)
