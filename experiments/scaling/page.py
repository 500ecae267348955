"""What was found, in words; every number from results.json."""

from typing import Any

from experiments.pages import Tables, fill

QUESTION = "Where does each layout of one layer stop scaling?"
COMMAND = "python -m experiments.scaling --write"
ENOUGH = 0.9


def conclusion(found: dict[str, Any]) -> str:
    """Two sentences."""
    layouts = dict.fromkeys(row["layout"] for row in found["rows"])
    last = {
        (layout, machine): most(found, layout, machine)
        for layout in layouts
        for machine in found["machines"]
    }
    parts = "; ".join(
        f"on {machine} "
        + ", ".join(f"{layout} {last[layout, machine] or 'nowhere'}" for layout in layouts)
        for machine in found["machines"]
    )
    first = {layout: fewest(found, layout) for layout in layouts}
    needs = ", ".join(f"{name} from {n}" if n else f"{name} nowhere" for name, n in first.items())
    return (
        "Predicted from messages of compiled programs, formulas of products and published "
        f"bandwidths, not measured: devices up to which {ENOUGH:.0%} of ideal are kept: {parts}. "
        f"As compiled for CPU there is room for it on either machine: {needs}."
    )


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


def tables(found: dict[str, Any]) -> Tables:
    """Of every layout; efficiency: speed-up over a device alone by the number of devices."""
    machines = list(found["machines"])
    rows = [["layout", "devices", "TFLOP", "GB sent", "GB arguments", "GB in all"]]
    rows[0] += [f"{m}: ms, efficiency" for m in machines]
    for row in found["rows"]:
        gigabytes = (f"{row[name] / 1e9:.2f}" for name in ("sent", "arguments", "memory"))
        times = (f"{1e3 * row[m]:.1f}, {row['efficiency'][m]:.0%}" for m in machines)
        flops = f"{row['flops'] / 1e12:.1f}"
        rows.append([row["layout"], str(row["devices"]), flops, *gigabytes, *times])
    return {"Layouts": rows}


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown."""
    return fill(globals(), found=found)
