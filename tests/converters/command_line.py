"""The command line in this process, and what it is tried on."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from jaxmha.cli.app import app

runner = CliRunner()
N, D = 3, 15
LAYERS = 2


def cli(*arguments: Any) -> Any:
    """Runs the command line in this process."""
    return runner.invoke(app, [str(argument) for argument in arguments])


def succeeds(*arguments: Any) -> Any:
    """Asserts exit code 0."""
    done = cli(*arguments)
    assert done.exit_code == 0, done.output
    return done


def message(done: Any) -> str:
    """All words on stderr."""
    return " ".join(done.stderr.split())


def printed(done: Any) -> str:
    """All words of a command, on stdout and stderr."""
    return " ".join((done.stdout + done.stderr).split())


def fails(folder: Path, *arguments: Any) -> str:
    """Asserts exit code 2, one message, no traceback and nothing written; returns the message."""
    before = contents(folder)
    result = cli(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error") >= 1 or "Error" in result.stderr
    assert contents(folder) == before
    return " ".join(result.stderr.split())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes."""
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@cache
def torch_encoder() -> Any:
    """A torch encoder of two layers with random biases."""
    import torch as framework

    framework.manual_seed(0)
    block = framework.nn.TransformerEncoderLayer(D, N, 17, batch_first=True)
    model = framework.nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False).eval()
    rng = np.random.default_rng(0)
    with framework.no_grad():
        for parameter in model.parameters():
            drawn = 0.3 * rng.normal(size=tuple(parameter.shape))
            parameter.copy_(framework.from_numpy(drawn.astype(np.float32)))
    return model
