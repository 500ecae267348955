"""A process whose probe did not finish in time, and still compiles when the process ends."""

import atexit
import os
import time
import warnings
from typing import Any

ASKED: list[float] = []
# Before the probe's: what is registered first runs last.
atexit.register(lambda: print(f"asked: {len(ASKED)}"))

import jax

from jaxmha.implementations import probe, probe_cases, reference
from jaxmha.implementations.probe_cases import Kind


def attend(request: Any, *, leaks: Any) -> Any:
    ASKED.append(time.monotonic())
    while time.monotonic() < ASKED[0] + 2:  # each is a program of its own
        jax.jit(lambda x: jax.numpy.tanh(x) @ x).lower(jax.numpy.ones((9, 9))).compile()
    return reference.attend(request)


if __name__ == "__main__":
    os.environ["JAXMHA_PROBE_SECONDS"] = "1"
    warnings.simplefilter("ignore")
    kind = Kind("float32")
    list(probe_cases.cases(kind))  # a busy machine would spend the second on arrays
    print(probe.failure("stub", attend, reference.unsupported_reason, kind))
