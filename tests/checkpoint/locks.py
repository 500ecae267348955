"""The tests that tell a running writer from a killed one, which needs file locks."""

import pytest

from jaxmha.checkpoint import system

needs_locks = pytest.mark.skipif(not system.has_locks(), reason="this system has no file locks")
