"""Implementations that a benchmark on this machine found fastest: `jaxmha bench --save`.

One JSON file per kind of device, in the folder that JAXMHA_PREFERENCES names (default
`~/.config/jaxmha/preferences`; 0: none are read). A call whose shapes, dtype and arguments are those of
a benchmark prefers what won there; other calls are not affected. Files are read once per process.
"""

import json
import os
import platform
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from jaxmha.implementations import platforms
from jaxmha.implementations.base import Request

Entries = dict[str, dict[str, Any]]


def folder() -> Path | None:
    """The folder of the files; None: none are read or written."""
    named = os.environ.get("JAXMHA_PREFERENCES")
    if named == "0":
        return None
    if named:
        return Path(named)
    config = os.environ.get("XDG_CONFIG_HOME")
    try:
        base = Path(config) if config else Path.home() / ".config"
    except RuntimeError:  # a user without a home
        return None
    return base / "jaxmha" / "preferences"


def path() -> Path | None:
    """The file of this machine's default device."""
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
    """Shapes, dtype and arguments of a request, as text."""
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


def preferred(request: Request) -> tuple[str, ...]:
    """The implementations of a saved benchmark of this very call, fastest first; () if none."""
    where = path() if platforms.current().present else None
    if where is None:
        return ()
    entries = _read(where)
    if not entries:
        return ()
    return tuple(entries.get(key(request), {}).get("order", ()))


def save(call: str, entry: dict[str, Any]) -> Path:
    """Adds an entry `{"order": names, ...}` for the call `key(request)` to the file.

    Raises:
      ValueError: the environment forbids files.
    """
    where = path()
    if where is None:
        raise ValueError("JAXMHA_PREFERENCES=0 forbids saved benchmarks: unset it")
    where.parent.mkdir(parents=True, exist_ok=True)
    entries = _parsed(where) | {call: entry}
    part = where.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(entries, indent=1) + "\n")
    part.replace(where)
    forget()
    return where


def forget() -> None:
    """Reads the files again when they are next needed."""
    _read.cache_clear()


@cache
def _read(where: Path) -> Entries:
    try:
        return _parsed(where)
    except ValueError as error:
        warnings.warn(f"a saved benchmark is ignored: {error}", RuntimeWarning, stacklevel=2)
        return {}


def _parsed(where: Path) -> Entries:
    """Raises ValueError where a file is not what `save` writes."""
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
