"""Peak and limits of a process's memory."""

import contextlib
import resource
import sys
from pathlib import Path

# Of what is available: beyond it an allocation fails, before the machine begins to swap.
SHARE = 0.8


def peak() -> int:
    """Largest resident size of this process so far, in bytes.

    Where Linux offers it, its own count: that of getrusage starts at the size of the parent.
    """
    with contextlib.suppress(OSError, ValueError):
        return counted("VmHWM") * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget() -> None:
    """Takes what is in use now as the peak, where Linux offers it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def limit() -> None:
    """Lets an allocation fail where it would take the machine down."""
    with contextlib.suppress(OSError, ValueError):
        now = counted("VmSize")
        free = counted("MemAvailable", "/proc/meminfo")
        soft = int((now + SHARE * free) * 1024)
        resource.setrlimit(resource.RLIMIT_AS, (soft, resource.RLIM_INFINITY))


def counted(field: str, path: str = "/proc/self/status") -> int:
    """A number from a file in Linux's /proc; by default a memory field of this process, in KiB."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise ValueError(f"{path} has no {field}")
