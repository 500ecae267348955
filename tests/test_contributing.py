"""A newcomer can add one of everything, each in as few files as CONTRIBUTING.md names."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
TOYS = Path(__file__).parent / "contributing"


class Task(NamedTuple):
    """An addition: new files with their contents, and edits (file -> line -> what follows it)."""

    most: int
    files: dict[str, str]
    edits: dict[str, dict[str, str]]


# Edits are made where a list begins: what others add to it does not move them.
TASKS = {
    "layout": Task(
        2,
        {"converters/layout/toy.py": "layout.py"},
        {
            "converters/layout/registry.py": {
                "from jaxmha.converters.layout import (\n": "    toy,\n",
                "LAYOUTS: tuple[Layout, ...] = (\n": "    *toy.LAYOUTS,\n",
            }
        },
    ),
    "framework": Task(
        5 - 2,  # and those of its layout
        {"converters/masks/toy.py": "masks.py", "converters/toy.py": "face.py"},
        {
            "converters/verify/comparands.py": {
                "from jaxmha.converters import ": "toy, ",
                "FRAMEWORKS: dict[str, ModuleType] = {\n": '    "toy": toy,\n',
            }
        },
    ),
    "implementation": Task(
        2,
        {"jaxmha/implementations/toy.py": "implementation.py"},
        {
            "jaxmha/implementations/__init__.py": {
                "from jaxmha.implementations import (\n": "    toy,\n",
                "IMPLEMENTATIONS: dict[str, ModuleType] = {\n": '    "toy": toy,\n',
            }
        },
    ),
    "format": Task(
        2,
        {"jaxmha/checkpoint/formats/toy.py": "format.py"},
        {
            "jaxmha/checkpoint/formats/table.py": {
                "from jaxmha.checkpoint.formats import ": "toy, ",
                "FORMATS: tuple[Format, ...] = (\n": (
                    '    Format("toy", (".toy",), toy.read, toy.write, toy.check),\n'
                ),
                "    head = source.read(0, min(source.size, 512))\n": (
                    '    if head.startswith(toy.MAGIC):\n        return _BY_NAME["toy"]\n'
                ),
            }
        },
    ),
    "command": Task(
        2,
        {"jaxmha/cli/toy.py": "command.py"},
        {
            "jaxmha/cli/app.py": {
                "from jaxmha.cli import (\n": "    toy,\n",
                "COMMANDS = {\n": '    "toy": toy,\n',
            }
        },
    ),
}


def added(task: Task, folder: Path) -> None:
    """Adds the files and edits to a copy of the package."""
    for path, toy in task.files.items():
        assert not (folder / path).exists()
        shutil.copy(TOYS / toy, folder / path)
    for path, edits in task.edits.items():
        text = (folder / path).read_text()
        for line, new in edits.items():
            assert line in text, (path, line)
            text = text.replace(line, line + new, 1)
        (folder / path).write_text(text)


@pytest.mark.parametrize("name", TASKS)
def test_few_files_are_touched(name: str) -> None:
    task = TASKS[name]
    assert len(task.files) + len(task.edits) <= task.most


@pytest.mark.parametrize("name", TASKS)
def test_the_page_names_the_files(name: str) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    for path in (*TASKS[name].files, *TASKS[name].edits):
        assert path.replace("toy", "<name>") in page, path


# Tests that hold for all that is registered, and the name of what they must have run, if they name it.
SUITES = {
    "tests/test_imports.py": "",
    "tests/test_errors.py": "",
    "tests/converters/test_cli_help.py": "test_help[command",
    "tests/converters/test_every_layout.py": "toy",
    "tests/checkpoint/test_checkpoint_roundtrip.py": ".toy",
    "tests/test_conformance.py": "toy",
}


@pytest.mark.slow
def test_the_suites_hold_with_one_of_everything(tmp_path: Path) -> None:
    for path in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        if (ROOT / path).is_file():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "jaxmha" / "converters").symlink_to(Path("../converters"))
    for task in TASKS.values():
        added(task, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", *SUITES],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    passed = [line for line in done.stdout.splitlines() if " PASSED" in line]
    for suite, name in SUITES.items():
        assert any(line.startswith(suite) and name in line for line in passed), suite


@pytest.mark.long
def test_one_of_everything(tmp_path: Path) -> None:
    # With the bytecode of files that are not edited, which takes as long to make as all the rest.
    shutil.copytree(
        ROOT / "jaxmha", tmp_path / "jaxmha", ignore=shutil.ignore_patterns("converters")
    )
    shutil.copytree(ROOT / "converters", tmp_path / "converters")
    for task in TASKS.values():
        added(task, tmp_path)
    # As in a checkout whose link to the converters is a text file.
    (tmp_path / "jaxmha" / "converters").write_text("../converters")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(TOYS / "framework.py", tmp_path / "toy.py")
    done = subprocess.run(
        [sys.executable, str(TOYS / "use.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("used\n", 0), done.stderr[-3000:]
