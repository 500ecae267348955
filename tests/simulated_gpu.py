"""A machine that takes itself for one with a GPU, whose cuDNN is its contract."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmha import implementations
from jaxmha.implementations import KERNELS, cache_kernels, platforms, probe
from tests import cudnn_contract, jit_cache
from tests.drawn import to_jax


def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The calls of that cuDNN; nothing is known of its kernels yet."""
    present = platforms.named("h200")._replace(present=True)
    monkeypatch.setattr(platforms, "_default", lambda: present)
    # Programs that run are lowered for the CPU at hand.
    monkeypatch.setattr(implementations, "KERNELS", dict.fromkeys(KERNELS, "cpu"))
    monkeypatch.setattr(cache_kernels, "on_kernels_platform", lambda kernel, _: kernel())
    monkeypatch.setenv("JAXMHA_PROBE_SECONDS", "600")  # the machine may be busy
    calls = cudnn_contract.install(monkeypatch)
    jit_cache.forget()
    probe.forget()
    yield calls
    probe.forget()


def small() -> Any:
    """One array for query, key and value, in the dtype of the kernel."""
    rng = np.random.default_rng(0)
    return to_jax(rng.standard_normal((1, 6, 2, 8)), jnp.bfloat16)
