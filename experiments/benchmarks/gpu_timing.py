"""Seconds of programs of a GPU, side by side."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

from experiments.benchmarks import gpu_peers
from experiments.benchmarks.gpu_peers import Program

ROUNDS, ROUND_SECONDS, MOST_CALLS = 7, 0.03, 200
# Before ceilings are measured the device works so long: clocks rise with work.
WARM = 0.5


def why(error: Exception) -> str:
    """One line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def time_all(programs: Mapping[str, Program]) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of a call by peer, in rounds that begin with another peer each; and who failed."""
    calls: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    for turn in range(-1, ROUNDS):
        names = [name for name in programs if name not in failed]
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            program = programs[name]
            try:
                if turn < 0:
                    program.run(1)
                    start = perf_counter()
                    program.run(2)
                    each = (perf_counter() - start) / 2
                    calls[name] = max(1, min(MOST_CALLS, int(ROUND_SECONDS / each)))
                    continue
                start = perf_counter()
                program.run(calls[name])
            except Exception as error:  # noqa: BLE001  whatever a framework raises is a result
                failed[name] = why(error)
            else:
                seconds.setdefault(name, []).append((perf_counter() - start) / calls[name])
    return {name: x for name, x in seconds.items() if name not in failed}, failed


def entry(
    makers: Mapping[str, Callable[[], Program]], *, flop: float = 0.0, moved: float = 0.0
) -> dict[str, Any]:
    """By peer: median and all seconds, rates, bytes; or why it failed. JAX compiles side by side."""

    def make(item: tuple[str, Callable[[], Program]]) -> Program | str:
        try:
            return item[1]()
        except Exception as error:  # noqa: BLE001  whatever a framework raises is a result
            return why(error)

    # torch chooses its backend for the whole process: one after the other.
    others = {name: maker for name, maker in makers.items() if not name.startswith("torch")}
    with ThreadPoolExecutor(max(1, len(others))) as pool:
        made = dict(zip(others, pool.map(make, others.items()), strict=True))
    made |= {name: make((name, makers[name])) for name in makers if name not in others}
    seconds, failed = time_all({name: x for name, x in made.items() if isinstance(x, Program)})
    failed |= {name: x for name, x in made.items() if isinstance(x, str)}
    found: dict[str, dict[str, Any]] = {}
    for name in makers:
        if name in failed:
            found[name] = {"failed": failed[name]}
            continue
        middle, program = median(seconds[name]), made[name]
        assert isinstance(program, Program)
        found[name] = {"seconds": middle, "rounds": seconds[name], "bytes": program.bytes}
        if flop:
            found[name]["tflops"] = flop / middle * 1e-12
        if moved:
            found[name]["gb_per_second"] = moved / middle * 1e-9
    return {"peers": found}


def peaks(size: int) -> dict[str, float]:
    """TFLOP/s of a square product in bfloat16, GB/s of a copy (read and written)."""
    a, b = (gpu_peers.normal(i, size, size) for i in range(2))
    long = jnp.zeros((size * size * 8,), jnp.bfloat16)
    programs = {
        "product": gpu_peers.compiled(lambda a, b: a @ b, a, b),
        "copy": gpu_peers.compiled(lambda x: x + 1, long),
    }
    start = perf_counter()
    while jax.default_backend() != "cpu" and perf_counter() - start < WARM:
        programs["product"].run(10)
    seconds, failed = time_all(programs)
    if failed:
        raise RuntimeError(f"the device cannot even multiply and copy: {failed}")
    return {
        "tflops": 2.0 * size**3 / median(seconds["product"]) * 1e-12,
        "gb_per_second": 2.0 * long.nbytes / median(seconds["copy"]) * 1e-9,
    }
