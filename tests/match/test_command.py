"""`jaxmha match` prints the plan, writes it and the model's arrays, and asks by its exit code."""

import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxmha import checkpoint
from jaxmha.cli.app import app

BUILD = """
import jax
import numpy as np


def build():
    return {"dense": {"kernel": jax.ShapeDtypeStruct((5, 3), np.float32)}}


def two():
    return {name: {"kernel": jax.ShapeDtypeStruct((5, 3), np.float32)} for name in ("left", "right")}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "builders_for_match.py").write_text(BUILD)
    one = {"fc.weight": rng.normal(size=(3, 5)).astype(np.float32)}
    checkpoint.write(tmp_path / "one.safetensors", one)
    checkpoint.write(tmp_path / "two.safetensors", one | {"other.weight": one["fc.weight"] + 1})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_model_is_written_and_its_plan_used_again(here: Path) -> None:
    command = ["match", "one.safetensors", "builders_for_match.py:build"]
    done = CliRunner().invoke(app, [*command, "--save", "plan.toml", "--to", "mine.safetensors"])
    assert done.exit_code == 0, done.output
    with (
        checkpoint.open(here / "mine.safetensors") as mine,
        checkpoint.open(here / "one.safetensors") as one,
    ):
        np.testing.assert_array_equal(mine["dense/kernel"], one["fc.weight"].T)
    done = CliRunner().invoke(app, [*command, "--plan", "plan.toml", "--to", "again.npz"])
    assert done.exit_code == 0, done.output
    assert (here / "again.npz").exists()


def test_questions_exit_with_one_and_write_no_model(here: Path) -> None:
    done = CliRunner().invoke(
        app, ["match", "two.safetensors", "builders_for_match:two", "--to", "mine.safetensors"]
    )
    assert done.exit_code == 1, done.output
    assert "? left/kernel" in done.output
    assert not (here / "mine.safetensors").exists()


def test_arrays_left_over_exit_with_one(here: Path) -> None:
    done = CliRunner().invoke(app, ["match", "two.safetensors", "one.safetensors"])
    assert done.exit_code == 1, done.output


MORE = """
import jax
import numpy as np


def build():
    return {"dense": {"kernel": np.zeros((5, 3), "f")}, "head": np.full((7,), 2, np.float32)}


def shapes():
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), build())
"""


def test_own_values_are_written_where_the_plan_has_no_line(here: Path) -> None:
    (here / "more_for_match.py").write_text(MORE)
    run = CliRunner().invoke
    run(app, ["match", "one.safetensors", "builders_for_match:build", "--save", "plan.toml"])
    command = ["match", "one.safetensors", "more_for_match:build", "--plan", "plan.toml"]
    done = run(app, [*command, "--to", "mine.npz"])
    assert (done.exit_code, (here / "mine.npz").exists()) == (2, False)
    assert "--keep-missing leaves them as they are" in done.output
    done = run(app, [*command, "--to", "mine.npz", "--keep-missing", "--dtype", "float16"])
    assert done.exit_code == 0, done.output
    with checkpoint.open(here / "mine.npz") as mine:
        assert set(mine) == {"dense/kernel", "head"}
        np.testing.assert_array_equal(mine["head"], np.full(7, 2, np.float16), strict=True)
        assert mine["dense/kernel"].any()
    command[2] = "more_for_match:shapes"
    done = run(app, [*command, "--to", "none.npz", "--keep-missing"])
    assert (done.exit_code, (here / "none.npz").exists()) == (2, False)
    assert "head" in done.output


@pytest.mark.parametrize(
    "target", ["nothing.npz", "builders_for_match:nothing", "no_such_module:build"]
)
def test_bad_targets_exit_with_two(here: Path, target: str) -> None:
    assert here
    assert CliRunner().invoke(app, ["match", "one.safetensors", target]).exit_code == 2


@pytest.mark.parametrize(
    "form", ["{folder}/builders.py", "../builders.py", "./builders.py", "../builders"]
)
def test_the_module_may_be_any_file(form: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files of one name are two modules."""
    folder = here / "inner"
    folder.mkdir()
    wrong = "def build():\n    return {}\n"
    of_folder = form.startswith("./")
    (here / "builders.py").write_text(wrong if of_folder else BUILD)
    (folder / "builders.py").write_text(BUILD if of_folder else wrong)
    monkeypatch.chdir(folder)
    monkeypatch.delitem(sys.modules, "builders", raising=False)
    target = f"{form.format(folder=here)}:build"
    done = CliRunner().invoke(app, ["match", "../one.safetensors", target])
    assert done.exit_code == 0, done.output
    monkeypatch.delitem(sys.modules, "builders", raising=False)
