"""The journal of a sharded write: a temporary file next to the index that lists the shards.

After a killed run, the next run reads from the journal which shards exist, and continues. A journal
ends with a digest of its content and of the name of its target, and lists only names that
`shard_name` can return for this target. Other journals are ignored; no name is used as a path.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxmha.checkpoint import json_text, system, temporaries
from jaxmha.checkpoint.errors import CheckpointError
from jaxmha.checkpoint.limits import Budget, Limits

_MARK = b"\njaxmha journal "


class Journal(NamedTuple):
    """The shards of a write; `losses`: cast tensor of a finished part -> its digest and `Loss`."""

    shards: list[Path]
    losses: dict[str, list[Any]]


class Unfit(Exception):  # noqa: N818
    """A file has the ending of a journal, but is not a valid journal of this target."""


def shard_name(target: Path, ending: str, tag: str, number: int, count: int) -> Path:
    """The path of shard `number` of `count`, counted from 1."""
    return target.with_name(f"{stem(target, ending)}-{tag}-{number:05}-of-{count:05}{ending}")


def stem(target: Path, ending: str) -> str:
    """The common start of the names of the shards of an index."""
    return target.name[: -len(f"{ending}.index.json")]


def is_shard(target: Path, ending: str, name: str) -> bool:
    """True if `shard_name` can return a path with this name."""
    own = re.escape(stem(target, ending)) + r"-[0-9a-f]{12}-[0-9]{5}-of-[0-9]{5}"
    return re.fullmatch(own + re.escape(ending), name) is not None


def content(
    target: Path, shards: Iterable[Path], losses: Mapping[str, list[Any]] | None = None
) -> bytes:
    """The bytes of a journal of these shards.

    `losses`: cast tensor of a finished part -> its digest and `Loss`, as in `Journal`.
    """
    body = json.dumps({"shards": [path.name for path in shards], "losses": losses or {}}).encode()
    return body + _seal(target, body)


def _seal(target: Path, body: bytes) -> bytes:
    digest = hashlib.sha256(os.fsencode(target.name) + b"\n" + body).hexdigest()
    return _MARK + digest.encode() + b"\n"


def read(path: Path, target: Path, ending: str) -> Journal | None:
    """Reads the journal in a temporary file; None if the file is not a finished journal.

    Raises:
        Unfit: its digest or its names are wrong.
        OSError: the file was removed meanwhile.
    """
    fd = system.open_plain(path)
    with open(fd, "rb") as file:
        status, most = os.fstat(fd), Limits().index_bytes
        if not stat.S_ISREG(status.st_mode) or not system.is_of_user(status):
            return None
        raw = file.read(most + 1)
    length = len(_seal(target, b""))
    body, seal = raw[:-length], raw[-length:]
    if not seal.startswith(_MARK):
        return None
    if len(raw) > most or seal != _seal(target, body):
        raise Unfit("its digest is not that of its content")
    try:
        found = json_text.parse(body, Budget(path, len(raw), Limits()), "", numbers=True)
    except CheckpointError:
        raise Unfit("it is no JSON") from None
    names, losses = found.get("shards"), found.get("losses")
    if not isinstance(names, list) or not isinstance(losses, dict):
        raise Unfit("it lists no shards")
    if not all(isinstance(name, str) and is_shard(target, ending, name) for name in names):
        raise Unfit("it lists files that are no shards of this target")
    return Journal([target.with_name(name) for name in names], losses)


def all_of(target: Path, ending: str) -> dict[Path, Journal]:
    """The journals of all writers of this target, running or not, by their paths."""
    found = {}
    for path in temporaries.named(target):
        with contextlib.suppress(OSError, Unfit):
            if (one := read(path, target, ending)) is not None:
                found[path] = one
    return found
