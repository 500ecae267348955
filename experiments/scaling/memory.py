"""Memory of ring attention, forward and backward: one process alone, and one of several.

Processes have one device each and speak over loopback (`jax.distributed`). Compiled: what XLA
allots to arguments, results and what is between. Measured: how far the process grows at most, from
before its arguments are made.
"""

import ctypes
import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from experiments.scaling import workers
from experiments.scaling.loading import resident

EXAMPLES = """examples:
  python -m experiments.scaling.memory                  1 and 8 processes, 32768 positions, minutes
  python -m experiments.scaling.memory --processes 4 -T 8192
  python -m experiments.scaling.memory -T 65536         what no T changes weighs less, 7 minutes
"""
N, H = 8, 64
MIB = 2**20


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; 0, or 2 for bad input or where a process died."""
    parser = ArgumentParser(
        prog="python -m experiments.scaling.memory",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("-T", type=int, default=32768, help="positions (default 32768)")
    parser.add_argument("--json", action="store_true", help="bytes as JSON")
    options = workers.parsed(parser, arguments, default=8)
    if options.worker is not None:
        print(json.dumps(work(options)))
        return 0
    rows = {}
    for count in (1, options.processes):
        answers = workers.started(__spec__.name, count, ["-T", options.T])
        if answers is None:
            return 2
        rows[count] = {kind: max(x[kind] for x in answers) for kind in answers[0]}
    if options.json:
        print(json.dumps(rows))
        return 0
    print(f"ring attention, B=1, T={options.T}, N={N}, H={H}, bfloat16, causal, with gradients")
    first, last = rows.values()
    for kind in first:
        fell = first[kind] / last[kind]
        print(
            f"{kind:<10}{first[kind] / MIB:8.1f} MiB alone, {last[kind] / MIB:8.1f} MiB on one of "
            f"{options.processes}: {fell:.2f} times less ({fell / options.processes:.0%} of ideal)"
        )
    return 0


def work(options: Namespace) -> dict[str, int]:
    """One process: bytes compiled and measured."""
    with workers.joined(options):
        import jax
        import jax.numpy as jnp
        import numpy as np

        import jaxmha
        from jaxmha import sharding

        ready: Any = jax.block_until_ready
        axis: Any = jax.sharding.AxisType.Auto
        mesh: Any = jax.make_mesh((jax.device_count(),), ("context",), (axis,))
        place = sharding.named(mesh, sharding.spec(None, "context"))

        def run(q: Any, k: Any, v: Any, slope: Any) -> Any:
            def out(*heads: Any) -> Any:
                return jaxmha.dot_product_attention(*heads, is_causal=True, implementation="ring")

            found, pull = jax.vjp(out, q, k, v)
            return found, pull(slope)

        def made(seed: int, T: int) -> Any:
            def part(index: Any) -> Any:
                rows = len(range(*index[1].indices(T)))
                rng = np.random.default_rng([seed, index[1].start or 0])
                heads = np.empty((1, rows, N, H), jnp.bfloat16)
                for i in range(rows):  # numbers of more width would be held as well
                    heads[:, i] = rng.standard_normal((N, H), np.float32)
                return heads

            return jax.make_array_from_callback((1, T, N, H), place, part)

        with sharding.use(mesh, context="context"):
            shape: Any = jax.ShapeDtypeStruct
            heads = [shape((1, options.T, N, H), jnp.bfloat16, sharding=place)] * 4
            program = jax.jit(run).lower(*heads).compile()
            # What libraries and their threads take on first use.
            ready(jax.jit(run)(*(made(i, options.T // 4) for i in range(4))))
            # What it gave back belongs to the system again.
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            before = resident("VmRSS")
            arrays = [made(i, options.T) for i in range(4)]
            ready(program(*arrays))
            peak = resident("VmHWM")
        m: Any = program.memory_analysis()
        sizes = m.temp_size_in_bytes, m.argument_size_in_bytes, m.output_size_in_bytes
        return {"compiled": sum(sizes) - m.alias_size_in_bytes, "measured": peak - before}


if __name__ == "__main__":
    sys.exit(main())
