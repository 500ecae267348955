"""Tables of commands fit into 80 columns or stay whole in a pipe, and misspelt names get a suggestion."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.cli import console
from tests.converters.command_line import cli, fails, succeeds

NAMES = [f"bert.encoder.layer.{n}.attention" for n in range(2)]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.out, "_width", 80)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    state = {}
    for name in NAMES:
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            state[f"{name}.{part}.weight"] = rng.normal(size=(6, 6)).astype("f")
            state[f"{name}.{part}.bias"] = rng.normal(size=6).astype("f")
    checkpoint.write(tmp_path / "model.safetensors", state)
    return tmp_path / "model.safetensors"


@pytest.mark.usefixtures("narrow")
def test_names_of_blocks_are_whole(model: Path) -> None:
    """A column with one value stands in one line below the table."""
    other = model.with_name("flax.safetensors")
    heads = ("--num-heads", "2")
    found = {
        "inspect": cli("inspect", model, *heads),
        "convert": cli("convert", model, other, "--to", "flax", *heads),
        "verify": cli("verify", model, other, *heads),
    }
    for command, done in found.items():
        assert done.exit_code == 0, done.output
        table = [line for line in done.stdout.splitlines() if line[:1] in "┏┃┡│└"]
        assert max(map(len, table)) <= 80, command
        for name in NAMES:
            assert sum(f"│ {name} " in line for line in table) == 1, done.stdout
    assert "in all: layout bert; family BERT; heads 2; heads from " in found["inspect"].stdout
    assert "in all: layout of the source bert; layout flax\n" in found["convert"].stdout
    assert "in all: layouts bert / flax; heads 2; weights identical" in found["verify"].stdout


@pytest.mark.usefixtures("narrow")
def test_what_differs_stays_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("a", "1", "x"), ("b", "2", "x")]
    with console.out.capture() as captured:
        console.print_table("title", ("name", "differs", "same"), rows)
    shown = captured.get()
    assert "│ a    │ 1       │" in shown
    assert shown.endswith("in all: same x\n")
    with console.out.capture() as captured:
        console.print_table("", ("name", "same"), [])
    assert "in all" not in captured.get()
    long = "n" * 90  # longer than a line: broken, and nothing is lost
    with console.out.capture() as captured:
        console.print_table("", ("name", "same"), [(long, "1"), ("b", "2")])
    assert captured.get().count("n") == 91


@pytest.mark.parametrize("columns", [None, "80"])
def test_a_pipe_gets_whole_lines_unless_columns_says_otherwise(
    columns: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # colours in a pipe do not make it a terminal
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "stdout", shown := io.StringIO())
    monkeypatch.setattr(console, "out", console._console())
    names = ["n" * 90, "of.a.layer." * 9]
    console.print_table("", ("name", "why"), [(name, f"why {name}") for name in names])
    assert all((f"why {name} " in shown.getvalue()) == (columns is None) for name in names)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("recipes", "copy", "lama"), "did you mean llama?"),
        (("layouts", "brt"), "did you mean bert?"),
        (("inspekt",), "inspect"),
    ],
)
def test_suggestions(arguments: tuple[str, ...], meant: str, tmp_path: Path) -> None:
    assert meant in fails(tmp_path, *arguments)


def test_match_rounds_to_a_dtype_that_is_asked_for(model: Path, tmp_path: Path) -> None:
    target, made = tmp_path / "half.npz", tmp_path / "made.npz"
    with checkpoint.open(model) as file:
        state = {name: file[name] for name in file}
    checkpoint.write(target, {name: x.astype(np.float16) for name, x in state.items()})
    wrong = cli("match", model, target, "--to", made)
    assert wrong.exit_code == 2
    assert "pass --dtype float16 to round them" in wrong.stderr
    succeeds("match", model, target, "--to", made, "--dtype", "float16")
    with checkpoint.open(made) as file:
        for name, x in state.items():
            np.testing.assert_array_equal(file[name], x.astype(np.float16))


def test_a_block_with_nan_says_why_no_output_was_run(model: Path) -> None:
    with checkpoint.open(model) as file:
        state = {name: np.array(file[name]) for name in file}
    state[f"{NAMES[0]}.self.query.weight"][0, 0] = np.nan
    checkpoint.write(model, state, force=True)
    done = succeeds("verify", model, model, "--num-heads", "2")
    assert "│ not run" in done.stdout
    assert "query.kernel holds NaN or infinity: bits were compared, outputs were not" in done.stdout
