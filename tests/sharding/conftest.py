"""These tests need eight devices: `JAX_NUM_CPU_DEVICES=8 python -m pytest tests/sharding`.

`tests/test_many_devices.py` runs them so; in a process with one device they are not collected.
"""

import os

import jax
import pytest

collect_ignore_glob = [] if os.environ.get("JAX_NUM_CPU_DEVICES") == "8" else ["test_*.py"]


@pytest.fixture(autouse=True)
def eight_devices() -> None:
    """A module that is named on the command line is collected all the same."""
    if jax.device_count() < 8:
        pytest.skip("needs eight devices: run with JAX_NUM_CPU_DEVICES=8")
