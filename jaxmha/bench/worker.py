"""One process for one peer: a line of JSON in, a line of JSON out.

    python -m jaxmha.bench.worker PEER THREADS

PEER is a name of `peers.PEERS`, `sgemm-xla`, `sgemm-torch`, `limits` or `oracle`. A request is
`{"do": ..., ...}` with a key of `REQUESTS`; the reply is an object, `{"failed": reason}` after an
error.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# No framework is imported here: `pin` sets their threads first, and `sgemm` needs only one of them.
from jaxmha.bench import memory
from jaxmha.bench.case import Case

# A round has about as many calls as take ROUND_SECONDS, at most MOST_CALLS. If a call takes less than
# SHORT seconds, an untimed call precedes each round.
ROUND_SECONDS, MOST_CALLS, SHORT = 0.05, 200, 0.25


class State:
    """Inputs that are drawn, and the program that is prepared, between requests to a worker."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.drawn: Any = None
        self.run: Callable[..., None] | None = None
        self.calls, self.seconds = 1, 0.0


def draw(state: State, case: dict[str, Any]) -> dict[str, Any]:
    """Draws the inputs of the case that is prepared next, and opens the device."""
    from jaxmha.bench import data

    state.drawn = data.make(Case(**case))
    return device(state) if "torch" not in state.peer else {}


def prepare(state: State, case: dict[str, Any], expected: str) -> dict[str, Any]:
    """Compiles the program of a case, and checks it against the float64 output in `expected`.
    Returns its errors, the seconds of compilation and of a call, and the calls per round."""
    from jaxmha.bench import data, exact, peers, programs

    limit()
    this = Case(**case)
    inputs, state.drawn = state.drawn or data.make(this), None
    program = programs.program(state.peer, this, inputs)
    start = time.perf_counter()
    program.compile()
    compiled = time.perf_counter() - start
    reply = program.outputs(data.only_compared(this, inputs.cotangent))
    rounded = this.tf32 and os.environ.get("JAX_PLATFORMS") != "cpu"
    stored, kept = peers.stored_by(state.peer), Path(expected)
    found = exact.errors(this, inputs, kept, *reply, rounded_products=rounded, stored=stored)
    state.run, state.seconds = program.run, timed(program.run, 1)
    if state.seconds < SHORT:
        state.seconds = timed(program.run, 1)
    state.calls = min(MOST_CALLS, max(1, int(ROUND_SECONDS / state.seconds)))
    if program.nbytes is not None:
        found["bytes"] = program.nbytes()
    return {"compile": compiled, "estimate": state.seconds, "calls": state.calls, **found}


def round_(state: State) -> dict[str, Any]:
    """Times one round; returns the mean seconds of a call."""
    if state.run is None:
        raise RuntimeError("nothing is prepared")
    if state.seconds < SHORT:
        state.run()
    return {"seconds": timed(state.run, state.calls)}


def release(state: State) -> dict[str, Any]:
    """Frees the case; returns the bytes of the device that JAX still reserves ({} without JAX)."""
    state.run = None
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
    if state.peer.startswith("torch") or state.peer == "keras-tf":
        return {}
    import jax

    return {"held": (jax.devices()[0].memory_stats() or {}).get("pool_bytes", 0)}


def grown(state: State, case: dict[str, Any]) -> dict[str, Any]:
    """Returns by how many bytes compiling and running the case raises the peak of memory, without
    the memory that the framework takes for its first program of any kind.
    """
    from jaxmha.bench import data, programs

    limit()
    this = Case(**case)
    program = programs.program(state.peer, this, data.make(this))
    programs.small(state.peer)
    memory.forget()
    before = memory.peak()
    program.compile()
    for _ in range(2):
        program.run()
    return {"bytes": memory.peak() - before}


def limit() -> None:
    """Limits the address space of this process on a CPU. With a GPU it sets no limit: the driver
    reserves more addresses than the machine has memory."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        memory.limit()


def expect(state: State, case: dict[str, Any], path: str) -> dict[str, Any]:
    """Writes the float64 output of a case to `path`, for `prepare` of other workers."""
    from jaxmha.bench import exact

    exact.write(Case(**case), Path(path))
    return {}


def sgemm(state: State, shape: list[int]) -> dict[str, Any]:
    """GFLOP/s of one plain product."""
    from jaxmha.bench.sgemm import rate

    m, k, n = shape
    return {"rate": rate(state.peer.removeprefix("sgemm-"), (m, k, n))}


def limits(state: State, products: str) -> dict[str, Any]:
    """The device of JAX, TFLOP/s of a product of matrices on it, and GB/s of its memory."""
    from jaxmha.bench.limits import measure

    return measure(products)


def device(state: State) -> dict[str, Any]:
    """The platform of JAX, and the kind of its device."""
    import jax

    return {"platform": jax.default_backend(), "device": jax.devices()[0].device_kind}


def explain(state: State, case: dict[str, Any]) -> dict[str, Any]:
    """Returns `choice.explain` of a case: the implementations of jaxmha that can compute it."""
    from jaxmha.bench import choice

    return choice.explain(Case(**case))


REQUESTS: dict[str, Callable[..., dict[str, Any]]] = {
    "draw": draw,
    "prepare": prepare,
    "round": round_,
    "release": release,
    "memory": grown,
    "expect": expect,
    "sgemm": sgemm,
    "limits": limits,
    "device": device,
    "explain": explain,
}


def timed(run: Callable[[int], None], calls: int) -> float:
    """Mean seconds of `calls` calls."""
    start = time.perf_counter()
    run(calls)
    return (time.perf_counter() - start) / calls


def pin(peer: str, threads: int) -> None:
    """Restricts the process to `threads` cores, and sets the threads of frameworks that do not read
    them from the environment."""
    memory.keep_cores(threads)
    if "torch" in peer:
        import torch

        torch.set_num_threads(threads)
    if peer == "keras-tf":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)


def reason(error: Exception) -> str:
    """The first line of an error, after its type unless that is `UnsupportedError`."""
    text = str(error).strip().splitlines() or ["no message"]
    known = type(error).__name__ == "UnsupportedError"
    return (text[0] if known else f"{type(error).__name__}: {text[0]}")[:200]


def main() -> None:
    """Replies to requests until standard input ends."""
    # Frameworks print to standard output: their text is redirected to standard error.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    state = State(sys.argv[1])
    pin(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = REQUESTS[request.pop("do")](state, **request)
        except Exception as error:  # noqa: BLE001  whatever a framework raises is a result
            reply = {"failed": reason(error)}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
