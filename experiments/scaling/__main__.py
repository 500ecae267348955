"""Where does each layout of one attention layer stop scaling?

Programs are compiled for simulated meshes; no array is made. What devices send is counted in the
compiled programs, products are counted by formula (loops that skip blocks have no fixed number of
turns), and times are predicted from published figures of two accelerators.
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
from experiments.scaling.hlo import Collective, collectives
from experiments.scaling.machines import EFFICIENCY, MACHINES, Work, seconds

EXAMPLES = """examples:
  python -m experiments.scaling                  table of every layout, minutes
  python -m experiments.scaling --devices 8 --layout ring
  python -m experiments.scaling --write          and results.json, scaling.png beside it
"""
HERE = Path(__file__).parent
LAYOUTS = ("data", "tensor", "ring", "allgather")
DEVICES = (8, 16, 32, 64, 128, 256)
# One layer of a large language model with grouped queries, causal, bfloat16; a batch of 2 million
# positions.
B, T, N, K, H = 256, 8192, 64, 8, 128
D = N * H
HIDDEN = {"data"}  # sums of gradients run beside products


def compiled(layout: str, devices: int) -> Any:
    """Forward and backward of the layer for a mesh that is not there."""
    import jax
    import jax.numpy as jnp

    import jaxmha
    from jaxmha import sharding

    axis: Any = {"ring": "context", "allgather": "context"}.get(layout, layout)
    mesh = jax.make_mesh(
        (devices,), (axis,), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices]
    )
    weights = {axis: axis} if axis != "context" else {}
    rows = {axis: axis} if axis != "tensor" else {}

    def array(shape: tuple[int, ...], spec: Any) -> Any:
        make: Any = jax.ShapeDtypeStruct
        return make(shape, jnp.bfloat16, sharding=sharding.named(mesh, spec))

    shapes = jax.eval_shape(
        lambda: jaxmha.init_params(
            jax.random.key(0), num_heads=N, num_kv_heads=K, features=D, use_bias=False
        )
    )
    specs = sharding.specs(shapes, mesh=mesh, **weights)
    params = jax.tree.map(lambda x, spec: array(x.shape, spec), shapes, specs)
    x = array((B, T, D), sharding.activations(**rows))
    name = layout if axis == "context" else None

    def step(params: Any, x: Any, slope: Any) -> Any:
        def out(params: Any, x: Any) -> Any:
            return jaxmha.multi_head_attention(params, x, is_causal=True, implementation=name)

        found, pull = jax.vjp(out, params, x)
        return found, pull(slope)

    with sharding.use(mesh, **{axis: axis}, zigzag=axis == "context"):
        return jax.jit(step).lower(params, x, x).compile()


def sent(collective: Collective, devices: int) -> float:
    """Bytes that a device sends, in rings; the CPU widens sums of bfloat16, which count 2 bytes.

    Slopes of keys and values are float32 indeed (reduce-scatter, ring).
    """
    size = float(collective.bytes)
    if collective.kind == "all-reduce":
        size /= 2
    share = (devices - 1) / devices
    return {
        "all-reduce": 2 * size * share,
        "all-gather": size * share,
        "reduce-scatter": size * (devices - 1),
        "all-to-all": size * share,
        "collective-permute": size,
    }[collective.kind]


def work(layout: str, devices: int, found: list[Collective]) -> Work:
    """Of one device. Backward is twice the products of projections, 2.5 times those of scores."""
    parts = devices if layout != "tensor" else 1
    heads = devices if layout == "tensor" else 1
    positions, own = B * T / parts, N / heads
    shared = max(K / heads, 1)  # key/value heads of a device
    projections = 3 * 2 * positions * D * H * (2 * own + 2 * shared)
    scores = 3.5 * 4 * positions * own * H * T / 2
    weights = 2 * D * H * (2 * own + 2 * shared)
    features = 2 * positions * (2 * D + H * (2 * own + 2 * shared))
    bytes_sent = sum(sent(c, devices) for c in found)
    hidden = bytes_sent if layout in HIDDEN else 0.0
    return Work(projections + scores, 3 * (weights + features), hidden, bytes_sent - hidden)


def measured(layout: str, devices: int) -> dict[str, Any]:
    """One row of the table."""
    program = compiled(layout, devices)
    found = collectives(program)
    done = work(layout, devices, found)
    memory = program.memory_analysis()
    alone = work("data", 1, [])
    times = {name: seconds(done, machine, devices) for name, machine in MACHINES.items()}
    counts: dict[str, int] = {}
    for c in found:
        counts[c.kind] = counts.get(c.kind, 0) + c.times
    return {
        "layout": layout,
        "devices": devices,
        "collectives": counts,
        "sent": done.hidden + done.exposed,
        "flops": done.flops,
        "arguments": memory.argument_size_in_bytes,
        **times,
        "efficiency": {
            name: seconds(alone, machine, 1) / times[name] / devices
            for name, machine in MACHINES.items()
        },
    }


def table(rows: list[dict[str, Any]]) -> str:
    """As markdown; speed-up is over a device alone, of which `devices` would be ideal."""
    names = list(MACHINES)
    lines = [
        f"| layout | devices | TFLOP | GB sent | {' | '.join(f'{n}: ms, efficiency' for n in names)} |",
        f"|---|---|---|---|{'---|' * len(names)}",
    ]
    for row in rows:
        times = " | ".join(f"{row[n] * 1e3:.1f}, {row['efficiency'][n]:.0%}" for n in names)
        lines.append(
            f"| {row['layout']} | {row['devices']} | {row['flops'] / 1e12:.1f} "
            f"| {row['sent'] / 1e9:.2f} | {times} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Efficiency by devices, one panel per machine."""
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(MACHINES), figsize=(9, 3.6), sharey=True)
    for panel, name in zip(panels, MACHINES, strict=True):
        for layout in LAYOUTS:
            these = [row for row in rows if row["layout"] == layout]
            xs = [row["devices"] for row in these]
            panel.plot(xs, [row["efficiency"][name] for row in these], "o-", label=layout)
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
    shown = table(rows)
    print(json.dumps(rows) if options.json else shown)
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
            "not. Positions of ring and allgather are in zig-zag order."
        ),
        "machines": {name: machine.source for name, machine in MACHINES.items()},
        "rows": rows,
    }
    records.save(HERE / "results.json", found, command="python -m experiments.scaling --write")
    draw(rows, HERE / "scaling.png")


if __name__ == "__main__":
    sys.exit(main())
