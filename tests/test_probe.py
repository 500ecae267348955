"""The probe of a kernel: threads, traces and devices from which it is asked. The kernel is a stub."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmha.implementations import platforms, probe, probe_cases, reference
from jaxmha.implementations.base import Leaks
from jaxmha.implementations.probe_cases import Kind

KIND = Kind("float32", dense=True)


class Stub:
    """A kernel that is right in its first calls; it records the threads that call it."""

    def __init__(self, right: float = np.inf) -> None:
        self.right = right
        self.asked: list[str] = []

    def attend(self, request: Any, *, leaks: Any) -> Any:
        self.asked.append(threading.current_thread().name)
        found = reference.attend(request)
        return found if len(self.asked) <= self.right else found._replace(out=2 * found.out)

    def failure(self) -> str | None:
        return probe.failure("stub", self.attend, reference.unsupported_reason, KIND)


@cache
def calls_of_a_probe() -> int:
    """How often a probe calls a kernel that is right."""
    alone = Stub()
    assert alone.failure() is None
    probe.forget()
    assert alone.asked
    return len(alone.asked)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("JAXMHA_PROBE_SECONDS", "600")  # the machine may be busy
    # The first case alone: the others take as long, and `test_probed_kernel` has them all.
    every = probe_cases.cases
    monkeypatch.setattr(probe_cases, "cases", lambda kind: islice(every(kind), 1))
    probe.forget()
    yield
    probe.forget()


def test_threads_that_ask_at_once_share_one_probe() -> None:
    alone, shared = calls_of_a_probe(), Stub()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: shared.failure(), range(8))) == [None] * 8
    assert len(shared.asked) == alone
    assert set(shared.asked) == {"jaxmha-probe"}


def test_likely_leaks_are_tried_first() -> None:
    """Each try compiles its cases anew, and a kernel that zeroes nothing itself takes several."""
    tried: list[Any] = []

    def attend(request: Any, *, leaks: Any) -> Any:
        tried.append(leaks)
        return reference.attend(request)

    likely = Leaks(1, 2)
    known = probe.failure("stub", attend, reference.unsupported_reason, KIND, likely=likely)
    assert (known, set(tried), probe.leaks("stub", KIND)) == (None, {likely}, likely)


def test_a_probe_under_abstract_traces_computes() -> None:
    """Shapes alone are evaluated, under jit, vmap and a gradient: the kernel runs all the same."""
    stub, found = Stub(), list[Any]()

    def value(x: Any) -> Any:
        found.append(stub.failure())
        return (x * x).sum()

    function = jax.jit(jax.vmap(jax.grad(jax.checkpoint(value))))
    with jax.numpy_rank_promotion("raise"), jax.debug_nans(True):
        shape: Any = jax.eval_shape(function, jnp.ones((3, 2)))
    assert shape.shape == (3, 2)
    assert set(found) == {None}
    assert stub.asked


def test_a_kernel_must_work_on_every_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = calls_of_a_probe()
    devices = platforms.devices()
    assert len(devices) == 1
    monkeypatch.setattr(platforms, "devices", lambda: 2 * devices)
    stub = Stub(right=alone)  # wrong on the second
    with pytest.warns(RuntimeWarning, match="output is wrong"):
        assert stub.failure()
    assert len(stub.asked) > alone


def test_a_busy_device_does_not_hide_a_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, broken = probe.Finding("busy", transient=True), probe.Finding("broken")
    outcomes = [busy, busy, broken]
    monkeypatch.setattr(probe, "_tried", lambda *_: outcomes.pop(0))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    devices = platforms.devices()
    monkeypatch.setattr(platforms, "devices", lambda: 2 * devices)
    with pytest.warns(RuntimeWarning, match="broken"):
        assert [Stub().failure() for _ in range(2)] == ["broken", "broken"]


def test_the_least_of_several_gpus_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gpu:
        platform = "gpu"

        def __init__(self, device_kind: str, capability: str) -> None:
            self.device_kind, self.compute_capability = device_kind, capability

    gpus = [Gpu("NVIDIA H100", "9.0"), Gpu("NVIDIA H100", "9.0"), Gpu("NVIDIA A100", "8.0")]
    monkeypatch.setattr(jax, "local_devices", lambda: gpus)
    monkeypatch.setattr(jax, "devices", lambda: gpus)
    assert platforms.devices() == [gpus[0], gpus[2]]
    assert platforms.current() == platforms.Platform("cuda", "NVIDIA A100", (8, 0), present=True)
    monkeypatch.setattr(jax, "local_devices", lambda: gpus[:2])  # the last is another process's
    assert platforms.devices() == gpus[:1]
    assert platforms.current().device == "NVIDIA A100"
    gpus[:] = [Gpu("AMD Instinct MI300X", "gfx942")]
    assert platforms.current().name == "rocm"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        MemoryError("Unable to allocate 3 GiB"),
        TypeError("no such dtype"),
    ],
)
def test_arrays_of_a_case_that_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The error is the reason; a lack of memory is tried again, and not remembered."""
    asked: list[str] = []

    def case(name: str, *_: Any, **__: Any) -> Any:
        asked.append(name)
        raise error

    monkeypatch.setattr(probe_cases, "_case", case)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.warns(RuntimeWarning, match=str(error)):
        found = [Stub().failure() for _ in range(2)]
    assert found == 2 * [f"{type(error).__name__}: {error}"]
    assert len(asked) == (1 if isinstance(error, TypeError) else 4)


@pytest.mark.slow
def test_a_probe_that_is_late_does_not_abort_the_process() -> None:
    """It still compiles when the process ends: XLA's threads do not survive the interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.slow_probe"], capture_output=True, check=False, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "it did not finish within 1 s" in done.stdout
    assert "asked: 2" in done.stdout  # one case, without and with a gradient


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_wrong_limit_names_its_variable(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("JAXMHA_PROBE_SECONDS", text)
    with pytest.raises(ValueError, match="JAXMHA_PROBE_SECONDS must be a number"):
        Stub().failure()


def test_the_trial_runs_on_the_device_of_the_caller() -> None:
    seen: list[Any] = []

    def attend(request: Any, *, leaks: Any) -> Any:
        seen.append(jax.config.jax_default_device)  # type: ignore[attr-defined]
        return reference.attend(request)

    device = jax.devices("cpu")[-1]
    with jax.default_device(device):
        found = probe.failure("stub", attend, reference.unsupported_reason, KIND)
    assert found is None
    assert set(seen) == {device}
