"""The README is true: its examples run, and its generated parts are what the data says."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxmha import checkpoint
from jaxmha.cli.app import app
from tests.generated import PARTS, ROOT, commands, filled, notebooks, versions

TEXT = (ROOT / "README.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.usefixtures("implicit_promotion")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("block", BLOCKS)
def test_python_examples_run(block: str, tmp_path: Path) -> None:
    """With its own names alone; `test_site` has an everyday one in a process of its own."""
    (tmp_path / "example.py").write_text(block)
    runpy.run_path(str(tmp_path / "example.py"))


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_python_examples_run_alone(block: str) -> None:
    """In a process of its own, with JAX's defaults: a reader copies one of them."""
    done = subprocess.run(
        [sys.executable, "-c", block], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_console_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    layers = {f"attention.self.{name}" for name in ("query", "key", "value")}
    state = {}
    for layer in layers | {"attention.output.dense"}:
        state[f"{layer}.weight"] = rng.normal(size=(6, 6)).astype("f")
        state[f"{layer}.bias"] = rng.normal(size=6).astype("f")
    checkpoint.write(tmp_path / "model.safetensors", state)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    lines = re.findall(r"^\$ (jaxmha .*?)(?:  #.*)?$", TEXT, flags=re.MULTILINE)
    assert len(lines) >= 2
    for line in lines:
        done = CliRunner().invoke(app, line.split()[1:])
        assert done.exit_code == 0, (line, done.output)
    assert (tmp_path / "flax.safetensors").exists()


@pytest.mark.parametrize(("path", "name", "make"), PARTS, ids=[part[1] for part in PARTS])
def test_generated_parts_are_current(path: Path, name: str, make: Callable[[], str]) -> None:
    text = path.read_text()
    assert filled(text, name, make()) == text, "run `python -m tests.generated`"


def test_commands_have_the_values_and_defaults_of_options() -> None:
    """The same as `--help` shows."""
    rows = {line for line in commands().splitlines() if line.startswith("| `--")}
    for option, shown in (
        ("--check", "Values: `all`, `weights`, `none`.  [default: all] |"),
        ("--others", "Values: `pass`, `refuse`. |"),
        ("--fill-bias", "Values: `zeros`. |"),
        ("--rounds", "[default: 7] |"),
        ("--seed", "[default: 0] |"),
        ("--to LAYOUT", "[required] |"),
        ("--keep-unused", "Leave out arrays that the model does not have. |"),
    ):
        assert any(row.startswith(f"| `{option}` |") and row.endswith(shown) for row in rows), (
            option
        )


def test_versions_are_those_of_the_tests_however_a_name_is_written() -> None:
    untested = [row.split(" | ")[0] for row in versions().splitlines() if " | not run | " in row]
    assert untested == ["| `tokamax`, extra `tokamax`"]


def test_notebooks_are_current() -> None:
    made = notebooks()
    assert {path for path in made if path.read_text() != made[path]} == set()
    assert made.keys() == set((ROOT / "docs").rglob("*.ipynb"))
    assert len(made) == 5


def test_slower_where_the_readme_says_so() -> None:
    """The README says "in most shapes" without a number."""
    from experiments.benchmarks.report import RESULTS, WITHOUT_NATIVE, headlines

    path = RESULTS / WITHOUT_NATIVE / "full.json"
    layers = list(headlines(json.loads(path.read_text())))[:2]
    slower, shapes = (sum(one[key] for one in layers) for key in ("slower", "shapes"))
    assert "in pure JAX, such layers are\nslower than torch's in most shapes" in TEXT
    assert slower > shapes / 2


CODE = re.compile(r"```.*?```", re.DOTALL)
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs" / "pages").rglob("*.md")]


def test_links_to_files_lead_somewhere() -> None:
    """As they are read in the repository. The site checks its own, anchors included."""
    made = {"changelog.md"}  # of the site alone
    lost = [
        f"{path.relative_to(ROOT)}: {link}"
        for path in DOCUMENTS
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", CODE.sub("", path.read_text()))
        if link not in made and not (path.parent / link).exists()
    ]
    assert lost == []
    assert len(DOCUMENTS) > 40
