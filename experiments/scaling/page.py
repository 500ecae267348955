"""What was found, in words; every number from results.json."""

from typing import Any

from experiments.benchmarks.report import table

QUESTION = "Where does each layout of one layer stop scaling?"
COMMAND = "python -m experiments.scaling --write"
ENOUGH = 0.9
LAYOUTS = ("data", "tensor", "ring", "allgather")


def conclusion(found: dict[str, Any]) -> str:
    """Two sentences."""
    last = {
        (layout, machine): most(found, layout, machine)
        for layout in LAYOUTS
        for machine in found["machines"]
    }
    parts = "; ".join(
        f"on {machine} "
        + ", ".join(f"{layout} {last[layout, machine] or 'nowhere'}" for layout in LAYOUTS)
        for machine in found["machines"]
    )
    return (
        "Predicted from compiled programs and published bandwidths, not measured: devices up to "
        f"which {ENOUGH:.0%} of ideal are kept: {parts}."
    )


def most(found: dict[str, Any], layout: str, machine: str) -> int:
    """Devices up to which a layout scales; 0: not even on the fewest."""
    rows = [row for row in found["rows"] if row["layout"] == layout]
    enough = [row["devices"] for row in rows if row["efficiency"][machine] >= ENOUGH]
    return max(enough, default=0)


def text(found: dict[str, Any]) -> str:
    """The page, in Markdown."""
    machines = found["machines"]
    head = ["layout", "devices", "TFLOP", "GB sent", *(f"{m}: ms, efficiency" for m in machines)]
    rows = [
        [
            row["layout"],
            str(row["devices"]),
            f"{row['flops'] / 1e12:.1f}",
            f"{row['sent'] / 1e9:.2f}",
            *(f"{1e3 * row[m]:.1f}, {row['efficiency'][m]:.0%}" for m in machines),
        ]
        for row in found["rows"]
    ]
    sources = "\n".join(f"- {name}: {source}." for name, source in machines.items())
    return f"""![Predicted efficiency of every layout by the number of devices](scaling.png)

## What was done

{found["method"]}

{found["assumptions"]}

{sources}

{table(head, rows)}
"""
