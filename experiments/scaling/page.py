"""Functions for page.md: up to how many devices a layout scales, and on how many it fits."""

from typing import Any

ENOUGH = 0.9


def most(found: dict[str, Any], layout: str, machine: str) -> int:
    """Devices up to which a layout scales; 0: not even on the fewest."""
    rows = [row for row in found["rows"] if row["layout"] == layout]
    enough = [row["devices"] for row in rows if row["efficiency"][machine] >= ENOUGH]
    return max(enough, default=0)


def fewest(found: dict[str, Any], layout: str) -> int:
    """Devices from which a layout has room on every machine; 0: not even on the most."""
    room = min(found["room"].values())
    rows = [row for row in found["rows"] if row["layout"] == layout]
    return min((row["devices"] for row in rows if row["memory"] <= room), default=0)
