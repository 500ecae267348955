"""Where does each layout of one attention layer stop scaling?

Programs are compiled for simulated meshes; no array is made. Messages of devices are counted in the
compiled programs, and their memory is what the compiler for CPU allots; products, and the bytes
that they read and write, are counted by formula (loops that skip blocks have no fixed number of
turns). Times are predicted from both and published figures of two accelerators.
"""

import os
from argparse import Namespace
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "256"

from experiments import frame
from experiments.scaling.layer import LAYOUTS, B, D, H, K, N, T, lowered, work
from experiments.scaling.machines import EFFICIENCY, MACHINES, seconds
from tests.sharding.hlo import collectives

EXAMPLES = """examples:
  python -m experiments.scaling                  table of every layout, minutes
  python -m experiments.scaling --devices 8 --layout ring
  python -m experiments.scaling --write          and results.json, scaling.png
"""
DEVICES = (8, 16, 32, 64, 128, 256)
MARKS = {"data": "o-", "tensor": "s-", "ring": "^-", "allgather": "v--"}


def measured(layout: str, devices: int) -> dict[str, Any]:
    """One row of the table."""
    program = lowered(layout, devices).compile()
    found = collectives(program)
    done = work(layout, devices, found)
    m = program.memory_analysis()
    results = m.output_size_in_bytes - m.alias_size_in_bytes
    alone = work("data", 1, [])
    times = {name: seconds(done, machine, devices) for name, machine in MACHINES.items()}
    counts: dict[str, int] = {}
    for c in found:
        counts[c.kind] = counts.get(c.kind, 0) + c.times
    return {
        "layout": layout,
        "devices": devices,
        "collectives": counts,
        "sent": done.hidden + done.exposed + done.moves,
        "flops": done.flops,
        "arguments": m.argument_size_in_bytes,
        "memory": m.argument_size_in_bytes + results + m.temp_size_in_bytes,
        **times,
        "efficiency": {
            name: seconds(alone, machine, 1) / times[name] / devices
            for name, machine in MACHINES.items()
        },
    }


def efficiency(found: dict[str, Any]) -> Any:
    """Predicted efficiency of every layout."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(MACHINES), figsize=(9, 3.6), sharey=True)
    for panel, name in zip(panels, MACHINES, strict=True):
        for layout in LAYOUTS:
            these = [row for row in found["rows"] if row["layout"] == layout]
            xs = [row["devices"] for row in these]
            ys = [row["efficiency"][name] for row in these]
            panel.plot(xs, ys, MARKS[layout], label=layout)
        panel.set_xscale("log", base=2)
        panel.set_title(f"{name} (predicted)")
        panel.set_xlabel("devices")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("efficiency")
    panels[0].set_ylim(0, 1.05)
    panels[0].legend()
    figure.tight_layout()
    return figure


def measure(chosen: Namespace) -> dict[str, Any]:
    """Every layout on every number of devices; no more than heads where these are spread."""
    if chosen.write and (chosen.layout or chosen.devices):
        raise ValueError("--write stores all of it: leave --layout and --devices out")
    jobs = [
        (layout, devices)
        for layout in chosen.layout or LAYOUTS
        for devices in chosen.devices or DEVICES
        if layout != "tensor" or devices <= N
    ]
    rows = []
    with frame.bars(layouts=len(jobs)) as tick:
        for layout, devices in jobs:
            rows.append(measured(layout, devices))
            tick("layouts", f"{layout} on {devices}")
    sizes = {"B": B, "T": T, "N": N, "K": K, "H": H, "D": D, "efficiency": EFFICIENCY}
    return {
        "sizes": sizes,
        "machines": {name: m.source for name, m in MACHINES.items()},
        "room": {name: m.room for name, m in MACHINES.items()},
        "rows": rows,
    }


EXPERIMENT = frame.of(
    measure,
    EXAMPLES,
    options={
        "--layout": {"action": "append", "choices": LAYOUTS, "help": "only these"},
        "--devices": {"action": "append", "type": int, "choices": DEVICES, "help": "only these"},
    },
    figures={"scaling.png": efficiency},
)

if __name__ == "__main__":
    frame.main(EXPERIMENT)
