"""A sharded model is filled with little more memory than the model itself."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.match import filled_in_parts

LARGEST, ALLOWED = 64, 256  # MiB


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process as Linux has it")
@pytest.mark.parametrize("kind", ["tree", "nnx"])
def test_a_model_in_parts(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    filled_in_parts.write(path)
    for processes in (1, 2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [sys.executable, "-m", filled_in_parts.__name__, kind, str(path)]
        running = [
            subprocess.Popen([*command, str(n), str(processes), port], stdout=subprocess.PIPE)
            for n in range(processes)
        ]
        for one in running:
            out, _ = one.communicate(timeout=300)
            assert one.returncode == 0
            found = json.loads(out)
            assert found["own"] == 312 / processes
            assert found["beyond"] <= LARGEST + ALLOWED
