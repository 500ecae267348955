"""Strict promotion and full precision for every test; how much compilers optimise."""

import os
import random
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

# Before any framework is imported.
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Property tests draw other examples in every run; workers inherit the seed.
os.environ.setdefault("JAXMHA_PROPERTY_SEED", str(random.SystemRandom().randrange(2**32)))

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")  # type: ignore[no-untyped-call]
jax.config.update("jax_numpy_rank_promotion", "raise")  # type: ignore[no-untyped-call]
jax.config.update("jax_default_matmul_precision", "highest")  # type: ignore[no-untyped-call]
# What one worker or an earlier run compiled is not compiled again.
PROGRAMS = Path(__file__).parent.parent / ".pytest_cache" / "programs"
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS))  # type: ignore[no-untyped-call]
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # type: ignore[no-untyped-call]
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True, scope="module")
def optimised(request: pytest.FixtureRequest) -> None:
    """Compiling is most of the time of a run: in half of it where nothing is optimised.

    Modules that measure rounding set OPTIMISED: they compile as users do. With JAXMHA_OPTIMISED=1
    every module does, as `make test-slow` has it.
    """
    wanted = hasattr(request.module, "OPTIMISED") or bool(os.environ.get("JAXMHA_OPTIMISED"))
    jax.config.update("jax_disable_most_optimizations", not wanted)  # type: ignore[no-untyped-call]
    if hasattr(request.module, "OPTIMISED"):
        jax.clear_caches()  # type: ignore[no-untyped-call]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How to draw the same examples again, and the kernels that this machine cannot run."""
    terminalreporter.write_line(f"JAXMHA_PROPERTY_SEED={os.environ['JAXMHA_PROPERTY_SEED']}")
    from jaxmha.implementations import KERNELS
    from jaxmha.implementations.native import library

    device = jax.devices()[0]
    here = {"gpu": "cuda"}.get(device.platform, device.platform)
    absent = [f"{name} (needs {needed})" for name, needed in KERNELS.items() if needed != here]
    native = library.unavailable()
    if native is not None:
        terminalreporter.write_line(f"the native CPU kernels are not tested: {native}")
    terminalreporter.write_line(
        f"{len(absent)} kernels are not run on {device.platform} themselves: {', '.join(absent)}"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what slow.txt lists."""
    lines = (Path(__file__).parent / "slow.txt").read_text().splitlines()
    globs = [line for line in lines if line and not line.startswith("#")]
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        fitting = [glob for glob in globs if fnmatchcase(name, glob.removeprefix("!"))]
        if fitting and not fitting[-1].startswith("!"):
            item.add_marker("slow")


@pytest.fixture
def x64() -> Iterator[None]:
    """float64 is float64 within the test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Implementations take sizes that they are not made for, where they must be right too."""
    from jaxmha.implementations import small_query

    monkeypatch.setattr(small_query, "MOST_ROWS", 10**6)
    monkeypatch.setattr(small_query, "LEAST_KEYS", 0)


@pytest.fixture
def no_shape_hook() -> Iterator[None]:
    """Lets wrong shapes reach our own checks, as they do outside the tests."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
