"""One attention layer on several processes of this machine, and on one process alone.

Processes speak over loopback (`jax.distributed`). Each reads its own part of a checkpoint, runs
the layer and its gradient, and compares with what it computes alone.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments import frame
from experiments.scaling import workers

EXAMPLES = """examples:
  python -m experiments.scaling.processes                      two processes, every layout
  python -m experiments.scaling.processes --mask window --mask segments
  python -m experiments.scaling.processes --processes 4 --json
"""
# Of one float32 unit of rounding at the largest value: two results that sum in other orders.
ALLOWED = 64.0
LAYOUTS = ("data", "tensor", "fsdp", "ring", "allgather", "mixed")
B, T, N, K, H = 4, 256, 8, 4, 16
MASKS = ("padded", "window", "segments")


def main(arguments: list[str] | None = None) -> int:
    """0: all layouts agree with one process; 1: one differs; 2: bad input, or a process died."""
    parser = frame.bare("scaling.processes", __doc__, EXAMPLES)
    parser.add_argument("--json", action="store_true", help="results as JSON")
    parser.add_argument("--processes", type=int, default=2, choices=(2, 4, 8), help="default 2")
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="only these")
    about = "besides causal (default: padded); several: each"
    parser.add_argument("--mask", action="append", choices=MASKS, help=about)
    options = parser.parse_args(arguments)
    layouts, masks = options.layout or LAYOUTS, options.mask or MASKS[:1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layer.safetensors"
        write(path)
        try:
            replies = workers.together(work, options.processes, path, layouts, masks)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 2
    rows = [
        {"layout": layout, "error": max(reply[layout] for reply in replies)} for layout in layouts
    ]
    share = [reply["share"] for reply in replies]
    good = all(row["error"] <= ALLOWED for row in rows)
    if options.json:
        print(json.dumps({"processes": options.processes, "layouts": rows, "read": share}))
        return 0 if good else 1
    print(f"{options.processes} processes, one device each; largest error in units of rounding")
    for row in rows:
        verdict = "as one process" if row["error"] <= ALLOWED else "DIFFERS"
        print(f"  {row['layout']:<10} {row['error']:6.1f}  {verdict}")
    read = ", ".join(f"{x:.0%}" for x in share)
    print(f"  read of the checkpoint by each process, heads spread: {read}")
    return 0 if good else 1


def write(path: Path) -> None:
    """A layer as a checkpoint by canonical names."""
    import numpy as np

    from jaxmha import checkpoint
    from jaxmha.params import CANONICAL, field_of

    sizes = {"N": N, "K": K, "H": H, "h": H, **dict.fromkeys(("Dq", "Dk", "Dv", "Do"), N * H)}
    rng = np.random.default_rng(0)
    names = [name for name in CANONICAL if "." in name and field_of(name) == name]
    shapes = {name: [sizes[letter] for letter in CANONICAL[name].split()] for name in names}
    checkpoint.write(
        path,
        {
            name: (rng.standard_normal(shape) * sizes["Dq"] ** -0.5).astype(np.float32)
            for name, shape in shapes.items()
        },
    )


def work(_: int, path: Path, layouts: Sequence[str], masks: Sequence[str]) -> dict[str, float]:
    """One process: errors by layout, and the share of the checkpoint that it read."""
    found = {layout: max(error(layout, mask, path) for mask in masks) for layout in layouts}
    return {**found, "share": share(path)}


def mesh_of(layout: str) -> tuple[Any, dict[str, Any]]:
    """A mesh of one device per process, and what its axes are for."""
    import jax

    count = jax.device_count()
    names = {"ring": "context", "allgather": "context"}
    sizes = {names.get(layout, layout): count}
    if layout == "mixed":
        sizes = {"tensor": 2, "context": count // 2}
    mesh: Any = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), (jax.sharding.AxisType.Auto,) * len(sizes)
    )
    return mesh, {name: name for name in sizes}


def error(layout: str, masked: str, path: Path) -> float:
    """Largest difference of output and gradients from one device's, in units of rounding.

    Infinite where the same call gives other bits when it is run again.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxmha
    from jaxmha import Mask, checkpoint, sharding
    from jaxmha.converters.sharded.distributed import load_sharded
    from jaxmha.params import from_leaves, leaves

    mesh, names = mesh_of(layout)
    rng = np.random.default_rng(1)
    x, cotangent = (rng.standard_normal((B, T, N * H)).astype(np.float32) for _ in range(2))
    segments = np.repeat([[0, 1, 2]], B, axis=0).repeat([T // 2, T // 3, T - T // 2 - T // 3], 1)
    masks = {
        "padded": Mask.lengths(key_value=np.asarray([T, T // 2, 7, T - 1])),
        "window": Mask.window(T // 3, None),
        "segments": Mask.segments(query_ids=segments, key_value_ids=segments),
    }
    mask = Mask.causal() & masks[masked]
    implementation = layout if layout in ("ring", "allgather") else None

    def run(params: Any, x: Any, cotangent: Any) -> Any:
        semantics = jaxmha.Semantics(dropout_rate=0.1)
        options: Any = {"mask": mask, "semantics": semantics, "dropout_key": jax.random.key(5)}
        options["implementation"] = implementation
        attend = partial(jaxmha.multi_head_attention, **options)
        out, pull = jax.vjp(lambda params, x: attend(params, x), params, x)
        return out, *pull(cotangent)

    with checkpoint.open(path) as file:
        whole = from_leaves({name: jnp.asarray(file[name]) for name in file})
    weights = {key: name for key, name in names.items() if key != "context"}
    features = {key: name for key, name in names.items() if key != "tensor"}
    specs = leaves(sharding.specs(whole, mesh=mesh, **weights))
    arrays = load_sharded(path, mesh, specs)
    own = [
        jax.make_array_from_callback(y.shape, place, y.__getitem__)
        for y in (x, cotangent)
        for place in [jax.NamedSharding(mesh, sharding.activations(**features))]
    ]
    with sharding.use(mesh, **names):
        sharded = jax.jit(run)
        got, again = (sharded(from_leaves({**arrays}), *own) for _ in range(2))
    implementation = None
    expected = jax.jit(run)(whole, x, cotangent)
    flat = [{"out": out, "x": dx, **leaves(d)} for out, d, dx in (got, again, expected)]
    return largest(*flat)


def largest(got: dict[str, Any], again: dict[str, Any], expected: dict[str, Any]) -> float:
    """Largest difference of this process's shards, infinite where two runs differ."""
    import numpy as np

    worst = 0.0
    scales = {"key.bias": "query.bias"}  # a constant added to all keys changes nothing
    for name, array in got.items():
        whole = np.asarray(expected[name])
        scale = np.abs(np.asarray(expected[scales.get(name, name)])).max() * 2.0**-24
        pairs = zip(array.addressable_shards, again[name].addressable_shards, strict=True)
        for one, other in pairs:
            if not np.array_equal(one.data, other.data):
                return float("inf")
            difference = np.abs(np.asarray(one.data) - whole[one.index]).max()
            worst = max(worst, float(difference / scale))
    return worst


def share(path: Path) -> float:
    """Of the bytes of a checkpoint, those this process reads where heads are spread."""
    from jaxmha import sharding
    from jaxmha.converters.sharded import distributed
    from jaxmha.params import from_leaves, leaves

    mesh, names = mesh_of("tensor")
    read: list[int] = []
    workers.watch(lambda _, part: read.append(part.nbytes))

    def specs(state: Any) -> Any:
        return leaves(sharding.specs(from_leaves(state), mesh=mesh, **names))

    arrays = distributed.load_sharded(path, mesh, specs)
    return float(sum(read) / sum(x.nbytes for x in arrays.values()))


if __name__ == "__main__":
    sys.exit(main())
