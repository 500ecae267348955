"""The command `jaxmha explain`."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from jaxmha.cli.app import app

# The command line.


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["explain", *arguments])


def test_command() -> None:
    done = run("-T", "8192", "-N", "16", "-H", "128", "--causal", "--platform", "h200")
    assert done.exit_code == 0
    assert "cudnn" in done.stdout
    assert "chosen" in done.stdout


@pytest.mark.usefixtures("no_shape_hook")
def test_command_as_json() -> None:
    sizes = ("-B", "2", "-T", "5", "-S", "7", "-N", "4", "-K", "2", "-H", "8", "-h", "3")
    flags = ("--lengths", "--query-lengths", "--padding", "--segments", "--window", "2,0", "--lse")
    done = run(
        *sizes, *flags, "--mask", "2,1,5,7", "--bias", "4,1,1", "--platform", "gpu", "--json"
    )
    found = json.loads(done.stdout)
    assert found["chosen"] == "blocked"
    assert "offsets" in found["reasons"]["cudnn"]


@pytest.mark.usefixtures("no_shape_hook")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dtype", "nope"), "--dtype must be a dtype"),
        (("--dtype", "int32"), "floating"),
        (("--platform", "warp"), "platform must be among"),
        (("--window", "a"), "--window must be integers"),
        (("--mask", "3,3"), "mask: expected axes"),
        (("--implementation", "flash"), "implementation must be among"),
        (("-K", "3"), "must be a multiple"),
    ],
)
def test_command_with_wrong_arguments(arguments: tuple[str, ...], message: str) -> None:
    done = run("-T", "5", "-N", "4", "-H", "8", *arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert message in " ".join(done.stderr.split())


def test_command_says_by_its_code_that_none_can() -> None:
    done = run("-T", "5", "-N", "4", "-H", "8", "--weights", "--implementation", "cudnn")
    assert done.exit_code == 1
