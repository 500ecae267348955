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
    """An addition: new files with their contents, and edits (file -> text -> text)."""

    most: int
    files: dict[str, str]
    edits: dict[str, dict[str, str]]


TASKS = {
    "layout": Task(
        2,
        {"converters/layout/toy.py": "layout.py"},
        {
            "converters/layout/registry.py": {
                "    torch,\n)": "    torch,\n    toy,\n)",
                "    *haiku.LAYOUTS,\n": "    *haiku.LAYOUTS,\n    *toy.LAYOUTS,\n",
            }
        },
    ),
    "framework": Task(
        5 - 2,  # and those of its layout
        {"converters/masks/toy.py": "masks.py", "converters/toy.py": "face.py"},
        {
            "converters/verify/comparands.py": {
                "import equinox, flax, keras, torch\n": "import equinox, flax, keras, torch, toy\n",
                '    "torch": torch,\n': '    "torch": torch,\n    "toy": toy,\n',
            }
        },
    ),
    "implementation": Task(
        2,
        {"jaxmha/implementations/toy.py": "implementation.py"},
        {
            "jaxmha/implementations/__init__.py": {
                "import (\n    platforms,": "import (\n    toy,\n    platforms,",
                '    "reference": reference,\n': '    "reference": reference,\n    "toy": toy,\n',
            }
        },
    ),
    "format": Task(
        2,
        {"jaxmha/checkpoint/formats/toy.py": "format.py"},
        {
            "jaxmha/checkpoint/formats/table.py": {
                "import gguf,": "import toy, gguf,",
                '    Format("npz",': '    Format("toy", (".toy",), toy.read, toy.write, toy.check),\n'
                '    Format("npz",',
                "    if head.startswith(keras_h5.MAGIC):": "    if head.startswith(toy.MAGIC):\n"
                '        return _BY_NAME["toy"]\n    if head.startswith(keras_h5.MAGIC):',
            }
        },
    ),
    "command": Task(
        2,
        {"jaxmha/cli/toy.py": "command.py"},
        {
            "jaxmha/cli/app.py": {
                "    recipes,\n    verify,\n": "    recipes,\n    toy,\n    verify,\n",
                "COMMANDS = {\n": 'COMMANDS = {\n    "count": toy,\n',
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
        for old, new in edits.items():
            assert text.count(old) == 1, (path, old)
            text = text.replace(old, new)
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
