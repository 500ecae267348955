"""Help and printing of the command line."""

import io
import re

import pytest
from rich.console import Console

from jaxmha import checkpoint
from jaxmha.cli.app import COMMANDS, app
from jaxmha.cli.console import print_line
from tests.converters.command_line import cli, succeeds


def test_a_command_is_one_module_of_its_name() -> None:
    modules = {name: module.__name__ for name, module in COMMANDS.items()}
    assert modules == {name: f"jaxmha.cli.{name}" for name in COMMANDS}
    assert [command.name for command in app.registered_commands] == list(COMMANDS)


def test_help_names_every_format() -> None:
    formats = {format.suffixes[0] for format in checkpoint.FORMATS}
    assert all(suffix in cli("--help").stdout for suffix in formats)
    written = " ".join(cli("convert", "--help").stdout.replace("│", " ").split())
    read_only = {".keras", ".gguf"}
    assert all(suffix in written for suffix in formats - read_only)
    assert not any(suffix in written for suffix in read_only)


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help(command: list[str]) -> None:
    assert ("Examples" if command else "Exit codes") in succeeds(*command, "--help").stdout


def test_help_shows_no_value_for_flags_and_whole_choices() -> None:
    text = cli("convert", "--help").stdout
    assert "<bool>" not in text + cli("--help").stdout
    assert "TARGET" in text
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        assert re.search(rf"(^|[ │<]){dtype}($|[ │>])", text, re.MULTILINE), dtype


def test_a_terminal_gets_lines_between_words_and_a_file_whole_ones() -> None:
    path, prose = "/".join(["folder"] * 20), "one word after another " * 9
    for terminal in (True, False):
        console = Console(file=io.StringIO(), width=80, force_terminal=terminal, no_color=True)
        print_line(f"{prose}{path} {prose}", console)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert any(path in line for line in lines)
        assert (len(lines) > 1) == terminal
        assert not terminal or all(len(line.rstrip()) <= 80 or path in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["convert", f"--{'x' * 90}", "a", "b"], f"No such option: --{'x' * 90}"),
        (["x" * 90], f"No such command '{'x' * 90}'."),
        (["convert", "", "b"], "expected a path or name (is a variable of the shell unset?)"),
    ],
)
def test_errors_of_usage_are_whole_in_a_file(arguments: list[str], problem: str) -> None:
    done = cli(*arguments)
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("Error: ")
    assert problem in done.stderr.splitlines()[-1]
    assert "│" in cli("--help").stdout
