"""Processes that agree on the outcome of a probe. They are threads here, each with a `probe` of its own."""

import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax._src import distributed

from experiments.scaling import workers
from jaxmha.implementations import probe
from jaxmha.implementations.probe_cases import Kind
from tests.sharding.probing import probed

WORKS, BUSY, BROKEN = (
    probe.Finding(None),
    probe.Finding("busy", transient=True),
    probe.Finding("broken"),
)


class Store:
    """The key-value store of JAX's distributed client."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()

    def key_value_set(self, key: str, value: str, *, allow_overwrite: bool) -> None:
        assert allow_overwrite
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def key_value_try_get(self, key: str) -> str:
        if key not in self.values:
            raise RuntimeError("NOT_FOUND")
        return self.values[key]

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise RuntimeError("DEADLINE_EXCEEDED")
            return self.values[key]


def own_probe() -> Any:
    spec: Any = importlib.util.find_spec(probe.__name__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Process:
    """One process: the outcomes of its probes in order, the seconds that each takes, its time limit."""

    def __init__(
        self, index: int, outcomes: list[probe.Finding], takes: float = 0, limit: float = 60
    ) -> None:
        self.index, self.outcomes, self.began = index, outcomes, threading.Event()
        self.probe = own_probe()

        def tried(*_: Any) -> probe.Finding:
            self.began.set()
            time.sleep(takes)
            return outcomes.pop(0)

        self.probe._tried = tried
        self.probe.time = SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic)
        self.probe.seconds = lambda: limit

    def ask(self) -> str | None:
        LOCAL.index = self.index
        found: str | None = self.probe.failure("stub", None, None, Kind("float32"))
        return found


LOCAL = threading.local()
Together = Callable[..., list[Any]]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Iterator[Together]:
    """Lets processes ask at the same time: what each got, or what it raised."""
    monkeypatch.setattr(distributed.global_state, "client", Store())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: LOCAL.index)
    with ThreadPoolExecutor(2) as pool:

        def asked(*processes: Process) -> list[Any]:
            waiting = [pool.submit(process.ask) for process in processes]
            return [x.exception(60) or x.result() for x in waiting]

        yield asked


@pytest.mark.filterwarnings("ignore:stub does not work here")
def test_a_busy_process_is_waited_for_by_all(together: Together) -> None:
    """All fall back, for this program alone."""
    first, second = Process(0, [WORKS]), Process(1, [BUSY, BUSY, WORKS])
    assert together(first, second) == ["it fails in process 1: busy", "busy"]
    assert together(first, second) == together(second, first) == [None, None]
    assert not first.outcomes + second.outcomes


@pytest.mark.filterwarnings("ignore:stub does not work here")
def test_a_busy_process_that_asked_alone(together: Together) -> None:
    """Its outcome concerns its program, and not the one that others run later."""
    first, second = Process(0, [BUSY, BUSY, WORKS], limit=1), Process(1, [WORKS])
    assert together(first) == ["busy"]
    first.probe.seconds = second.probe.seconds
    assert together(second, first) == [None, None]


@pytest.mark.filterwarnings("ignore:stub does not work here")
def test_a_process_that_has_begun_is_waited_for(together: Together) -> None:
    first, second = Process(0, [WORKS], limit=0.6), Process(1, [BROKEN], takes=0.8)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(second.ask)
        assert second.began.wait(60)
        assert together(first) == ["it fails in process 1: broken"]
        assert late.result(60) == "broken"


def test_a_strict_process_stops_all(together: Together, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXMHA_PROBE", "strict")
    found = together(Process(0, [WORKS], limit=2), Process(1, [BROKEN]))
    assert ["strict" in str(x) and "broken" in str(x) for x in found] == [True, True]


@pytest.mark.slow
def test_processes_agree_on_a_kernel() -> None:
    """A kernel that fails in one process is used in none; a single process waits no longer than allowed."""
    first, second = workers.together(probed, 2)
    assert first["alone"] is first["not asked elsewhere"] is None
    assert first["together"].startswith("it fails in process 1: RuntimeError: no kernel image")
    assert "no kernel image" in second["together"]
    assert first["leaks"] == second["leaks"] == (None, (2, 2))
    assert first["busy"] == ["it fails in process 1: RuntimeError: RESOURCE_EXHAUSTED", None]
    assert second["busy"] == ["RuntimeError: RESOURCE_EXHAUSTED", None]
    assert 15 <= first["seconds"] < 60
