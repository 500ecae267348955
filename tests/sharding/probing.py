"""One of two processes that probe kernels, which work in process 0 only, or at first only there."""

import os
import time
import warnings
from typing import Any

import numpy as np


def probed(index: int) -> dict[str, Any]:
    os.environ["JAXMHA_PROBE_SECONDS"] = "300"  # the machine may be busy
    from jaxmha.implementations import probe, reference
    from jaxmha.implementations.base import EVERYTHING_LEAKS, Leaks
    from jaxmha.implementations.probe_cases import Kind

    def attend(request: Any, *, leaks: Leaks) -> Any:
        if index == 1:
            raise RuntimeError("no kernel image is available")
        return reference.attend(request)

    def leaky(request: Any, *, leaks: Leaks) -> Any:
        found = reference.attend(request)
        return (
            found
            if leaks == EVERYTHING_LEAKS or index == 0
            else found._replace(out=found.out * np.nan)
        )

    failing = [2 * index]

    def busy(request: Any, *, leaks: Leaks) -> Any:
        failing[0] -= 1
        if failing[0] >= 0:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return reference.attend(request)

    kind = Kind("float32", True)

    def failure(name: str, attend: Any = attend, **how: Any) -> str | None:
        return probe.failure(name, attend, reference.unsupported_reason, kind, **how)

    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    if index == 0:
        found["alone"] = failure("stub", agree=False)
    found["together"] = failure("stub")
    found["leaks"] = failure("leaky", leaky), tuple(probe.leaks("leaky", kind))
    found["busy"] = [failure("busy", busy) for _ in range(2)]
    if index == 0:  # the other process runs something else
        failure("other", agree=False)  # what follows only waits
        os.environ["JAXMHA_PROBE_SECONDS"] = "15"
        began = time.monotonic()
        found["not asked elsewhere"] = failure("other")
        found["seconds"] = time.monotonic() - began
    return found
