"""Implementations that a benchmark on the same kind of device found fastest: `jaxmha bench --save`.

JAXMHA_PREFERENCES names a folder with one JSON file per kind of device (default
`~/.config/jaxmha/preferences`; 0: no file is read or written). A call with the `key` of a benchmark
prefers the implementations that were fastest in it; other calls are not affected. A call that is
not in the user's file is looked up in SHIPPED, whose files have the same format. Files are read
once per process, and again after `save`.
"""

import errno
import json
import os
import platform
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jaxmha.implementations import platforms
from jaxmha.implementations.base import Request

Entries = dict[str, dict[str, Any]]
# Folder with files for the devices that we measured.
SHIPPED = Path(__file__).parent / "measured"


def folder() -> Path | None:
    """The user's folder of files; None: JAXMHA_PREFERENCES is 0, or the user has no home."""
    named = os.environ.get("JAXMHA_PREFERENCES")
    if named == "0":
        return None
    if named:
        return Path(named)
    config = os.environ.get("XDG_CONFIG_HOME")
    try:
        base = Path(config) if config else Path.home() / ".config"
    except RuntimeError:  # the user has no home directory
        return None
    return base / "jaxmha" / "preferences"


def path() -> Path | None:
    """The user's file for the device of `platforms.current()`; None: there is no folder."""
    where = folder()
    return None if where is None else where / f"{_device()}.json"


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1] for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or "cpu"


def _device() -> str:
    device = platforms.current().device
    if device == "cpu":
        device = f"{_processor()} {os.cpu_count()} cores"
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def key(request: Request) -> str:
    """The key of the request's entry in a file: a text of its shapes, dtype and given arguments. Of
    lengths, other arrays of the mask, soft cap and functions it has the names alone."""
    (B, T, N, H), (_, S, K, h) = request.query.shape, request.value.shape
    mask, semantics = request.mask, request.semantics
    parts = [f"B{B} T{T} S{S} N{N} K{K} H{H} h{h} {request.query.dtype.name}"]
    if mask.causal_offset is not None:
        offset = mask.causal_offset
        parts.append(f"causal {offset}" if isinstance(offset, int) else "causal by row")
    if mask.window_size is not None:
        parts.append("window {} {}".format(*mask.window_size))
    arrays = {
        "query lengths": mask.query_lengths,
        "lengths": mask.key_value_lengths,
        "query padding": mask.query_padding,
        "padding": mask.key_value_padding,
        "segments": mask.query_segments,
        "dense mask": mask.array,
        "soft cap": semantics.logits_soft_cap,
        "score_mod": request.score_mod,
        "mask_mod": request.mask_mod,
    }
    parts += [name for name, given in arrays.items() if given is not None]
    if request.bias is not None:
        parts.append(f"bias {'x'.join(map(str, request.bias.shape))}")
    parts += ["lse"] * request.return_lse + ["dropout"] * request.drops
    return ", ".join(parts)


class Preference(NamedTuple):
    """`order`: implementations, fastest first in a benchmark; empty: no benchmark has the call.
    `source`: the benchmark, in words."""

    order: tuple[str, ...] = ()
    source: str = ""


def preferred(request: Request) -> Preference:
    """The preference by a benchmark with the request's `key`, saved or else shipped. It is empty
    without one, and in `lowering_for`, which has no device to ask."""
    where = path() if platforms.current().present else None
    if where is None:
        return Preference()
    for file, source in (
        (where, "a saved benchmark"),
        (SHIPPED / where.name, "a benchmark shipped for this device"),
    ):
        entries = _read(file)
        found = entries.get(key(request)) if entries else None
        if found is not None:
            return Preference(tuple(found["order"]), source)
    return Preference()


def save(call: str, entry: dict[str, Any]) -> Path:
    """Adds an entry `{"order": names, ...}` for `call`, the `key` of a request, to the user's file
    for this device, and returns the path of the file.

    Raises:
      ValueError, OSError: as `check`.
    """
    check()
    where = path()
    assert where is not None
    entries = _parsed(where) | {call: entry}
    part = where.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(entries, indent=1) + "\n")
    part.replace(where)
    forget()
    return where


def check() -> None:
    """Makes the user's folder. Raises ValueError if nothing may be saved or the file is damaged, and
    OSError if the folder cannot be made or written to."""
    where = path()
    if os.environ.get("JAXMHA_PREFERENCES") == "0":
        raise ValueError("JAXMHA_PREFERENCES=0 forbids saved benchmarks: unset it")
    if where is None:
        raise ValueError("you have no home: set JAXMHA_PREFERENCES to a folder for benchmarks")
    where.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(where.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(where.parent))
    _parsed(where)


def forget() -> None:
    """Clears the cache of files: the next look-up reads them again."""
    _read.cache_clear()


@cache
def _read(where: Path) -> Entries:
    try:
        return _parsed(where)
    except ValueError as error:
        warnings.warn(f"a saved benchmark is ignored: {error}", RuntimeWarning, stacklevel=2)
        return {}


def _parsed(where: Path) -> Entries:
    """Reads a file that `save` wrote: key of a call -> entry; {} if the file is missing.

    Raises:
      ValueError: the file is unreadable or has other contents.
    """
    try:
        text = where.read_text()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror}") from error
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from error
    orders = [x.get("order") if isinstance(x, dict) else None for x in found.values()] if (
        isinstance(found, dict)
    ) else [None]  # fmt: skip
    if not all(isinstance(x, list) and all(isinstance(y, str) for y in x) for x in orders):
        raise ValueError(f"{where} holds other things than orders of implementations")
    entries: Entries = found
    return entries
