"""The versions, processor and memory of a run."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxmha.bench import memory

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "keras", "torch", "tensorflow", "tensorflow-cpu",
            "tokamax")  # fmt: skip


def describe() -> dict[str, Any]:
    """Processor, cores, memory and system; no names of hosts or users."""
    return {
        "processor": _processor(),
        "instructions": [flag for flag in ("avx2", "avx512f", "amx_tile") if flag in _flags()],
        "cores": memory.cores(),
        "memory_gib": round(memory.total() / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages of `PACKAGES`."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def settings() -> dict[str, str]:
    """Environment variables that affect the speed of the frameworks or the allocator.

    >>> "PATH" in settings()
    False
    """
    listened = ("XLA_FLAGS", "TF_CPP", "TF_ENABLE", "TF_NUM", "TF_XLA", "OMP_", "GOMP_", "KMP_",
                "MKL_", "MALLOC_", "JAXMHA_")  # fmt: skip
    return {name: x for name, x in sorted(os.environ.items()) if name.startswith(listened)}


def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


def _processor() -> str:
    return _cpuinfo("model name") or platform.processor() or "unknown"


def _flags() -> list[str]:
    return _cpuinfo("flags").split()
