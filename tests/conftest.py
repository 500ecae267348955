"""Strict promotion and full precision for every test, and the `x64` fixture."""

import os
import random
from collections.abc import Iterator

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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How to draw the same examples again."""
    terminalreporter.write_line(f"JAXMHA_PROPERTY_SEED={os.environ['JAXMHA_PROPERTY_SEED']}")


@pytest.fixture
def x64() -> Iterator[None]:
    """float64 is float64 within the test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def no_shape_hook() -> Iterator[None]:
    """Lets wrong shapes reach our own checks, as they do outside the tests."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
