"""Where does each layout of one attention layer stop scaling?

Programs are compiled for simulated meshes; no array is made. What devices send is counted in the
compiled programs, and their memory is what the compiler for CPU allots; products, and the bytes
that they read and write, are counted by formula (loops that skip blocks have no fixed number of
turns). Times are predicted from both and published figures of two accelerators.
"""

import json
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "256"

from experiments import records
from experiments.scaling import page
from experiments.scaling.hlo import collectives
from experiments.scaling.layer import LAYOUTS, B, D, H, K, N, T, lowered, work
from experiments.scaling.machines import EFFICIENCY, MACHINES, seconds

EXAMPLES = """examples:
  python -m experiments.scaling                  table of every layout, minutes
  python -m experiments.scaling --devices 8 --layout ring
  python -m experiments.scaling --write          and results.json, scaling.png beside it
"""
HERE = Path(__file__).parent
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


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Efficiency by devices, one panel per machine."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(MACHINES), figsize=(9, 3.6), sharey=True)
    for panel, name in zip(panels, MACHINES, strict=True):
        for layout in LAYOUTS:
            these = [row for row in rows if row["layout"] == layout]
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
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; 0, or 2 for bad input."""
    parser = ArgumentParser(
        prog="python -m experiments.scaling",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="only these")
    parser.add_argument("--devices", action="append", type=int, choices=DEVICES, help="only these")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument("--write", action="store_true", help="keep table, figure and rows")
    options = parser.parse_args(arguments)
    rows = []
    for layout in options.layout or LAYOUTS:
        for devices in options.devices or DEVICES:
            if layout == "tensor" and devices > N:
                continue  # there are no more heads
            rows.append(measured(layout, devices))
            print(f"{layout} on {devices}", file=sys.stderr, flush=True)
    print(json.dumps(rows) if options.json else page.rows_of(rows, list(MACHINES)))
    if options.write:
        report(rows)
    return 0


def report(rows: list[dict[str, Any]]) -> None:
    """Writes rows and figure."""
    found = {
        "method": (__doc__ or "").strip().split("\n\n", 1)[1].replace("\n", " "),
        "assumptions": (
            f"One layer, forward and backward, causal, bfloat16: B={B}, T={T}, N={N}, K={K}, "
            f"H={H}, D={D}. Products reach {EFFICIENCY:.0%} of the peak. Sums of gradients (data) "
            "run beside products; sums after the output projection (tensor), moves of the ring "
            "(what arrives takes the place of what has left) and gathered keys (allgather) do "
            "not. Positions of ring and allgather are in zig-zag order. Sums over devices after the "
            "output projection, and of gradients of weights, keys and values, are in float32 by "
            "choice: nothing is rounded before it is summed, for twice the bytes; that of slopes "
            "of features (tensor, backward) is in bfloat16. float16 stands for bfloat16 in the "
            "compiled programs, since the CPU would widen what is sent. Devices are in a ring; in "
            "a torus it lies along one axis, where sums and gathers use both directions of its "
            "links, and moves of the ring one."
        ),
        "machines": {name: m.source for name, m in MACHINES.items()},
        "room": {name: m.room for name, m in MACHINES.items()},
        "rows": rows,
    }
    records.save(HERE / "results.json", found, command="python -m experiments.scaling --write")
    draw(rows, HERE / "scaling.png")


if __name__ == "__main__":
    sys.exit(main())
