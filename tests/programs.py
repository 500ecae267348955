"""Compiled programs of earlier runs and of other workers: compiling takes a third of a run."""

import os
import platform
import shutil
import zlib
from pathlib import Path
from typing import Any

import jax
from jax._src import lru_cache


def _processor() -> str:
    """Its instructions; JAX's key of a program does not name them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".pytest_cache" / "programs" / f"{zlib.crc32(_processor().encode()):08x}"
MOST = 60_000  # about five times those of one run


def keep() -> None:
    """From here on programs are read from the folder, or compiled and written into it."""
    setting: Any = jax.config.update
    setting("jax_compilation_cache_dir", str(FOLDER))
    setting("jax_persistent_cache_min_compile_time_secs", 0)
    setting("jax_persistent_cache_min_entry_size_bytes", -1)
    lru_cache.LRUCache.put = _put  # type: ignore[method-assign]


def _put(self: lru_cache.LRUCache, key: str, value: bytes) -> None:
    """Whole or not at all: others read while this process writes."""
    path = FOLDER / f"{key}-cache"
    part = path.with_name(f"{os.getpid()}-part")
    try:
        part.write_bytes(value)
        part.replace(path)
    except OSError:  # where a disk is full, or the folder was just emptied
        part.unlink(missing_ok=True)


def drop() -> None:
    """Empties the folder where earlier versions of the code have filled it."""
    if FOLDER.is_dir() and len(os.listdir(FOLDER)) > MOST:
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir(exist_ok=True)
