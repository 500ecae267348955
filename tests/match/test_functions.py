"""MODULE:FUNCTION on the command line: modules in any folder, what they import, and messages."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxmha.cli import functions
from jaxmha.cli.app import app

FILES = {
    "top_functions.py": """
number = 3
def none(): return None
def needs(width): return width
def raises(): raise RuntimeError("no weights here")
def leaves(): raise SystemExit(1)
""",
    "broken_functions.py": "def f(:",
    "lacking_functions.py": "import no_such_package_anywhere",
    "half_functions.py": "raise KeyError('half way')",
    "sub/near_functions.py": "from layers_of_functions import made\ndef build(): return made",
    "sub/late_functions.py": "def build():\n    import layers_of_functions as x\n    return x.made",
    "sub/layers_of_functions.py": "made = 'sub'",
    "other/near_functions.py": "from layers_of_functions import made\ndef build(): return made",
    "other/layers_of_functions.py": "made = 'other'",
    "model_of_functions/model_of_functions.py": "def build(): return 'its folder has its name'",
    "exp.1/model.py": "def build(): return 'a dot in the folder'",
    "code/model.py": "def build(): return 'a folder named as a module of Python'",
    "loose/near.py": "from .next import made\ndef build(): return made",
    "loose/next.py": "made = 'no package'",
    "pack/__init__.py": "",
    "pack/near.py": "from .torch import made\nimport torch\ndef build(): return made, torch.Tensor",
    "pack/torch.py": "made = 'pack'",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(functions, "_folders", [])
    before = {*sys.modules}
    yield tmp_path
    for name in sys.modules.keys() - before:
        if name.partition(".")[0] in {Path(file).parts[0].removesuffix(".py") for file in FILES}:
            del sys.modules[name]
    sys.modules.pop("layers_of_functions", None)


@pytest.mark.parametrize("module", ["near", "late"])
@pytest.mark.parametrize("start", ["sub/", "./sub/", "{here}/sub/"])
def test_modules_import_those_next_to_them(module: str, start: str, here: Path) -> None:
    target = f"{start.format(here=here)}{module}_functions.py:build"
    assert functions.built(target) == "sub"
    assert functions.built("other/near_functions.py:build") == "other"


def test_a_module_of_a_package_hides_no_library() -> None:
    made, tensor = functions.built("pack/near.py:build")
    assert made == "pack"
    assert tensor.__module__ == "torch"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model_of_functions/model_of_functions.py", "its folder has its name"),
        ("exp.1/model.py", "a dot in the folder"),
        ("code/model.py", "a folder named as a module of Python"),
        ("loose/near.py", "no package"),
    ],
)
def test_a_file_is_found_whatever_its_folder_is_called(path: str, expected: str) -> None:
    assert functions.built(f"{path}:build") == expected


@pytest.mark.parametrize("start", ["{here}/", "../{here.name}/"])
def test_a_package_imports_its_own_modules_from_anywhere(start: str, here: Path) -> None:
    assert functions.built(f"{start.format(here=here)}pack/near.py:build")[0] == "pack"


WRONG = {
    "nowhere_functions:build": "there is no module nowhere_functions",
    "sub/nowhere.py:build": "there is no file .*nowhere.py",
    "top_functions.py:build": "top_functions.py has no function build",
    "top_functions.py:raise": "did you mean raises?",
    "top_functions.py:number": "number is int, expected a function",
    "top_functions.py:none": "returned None: return the model",
    "top_functions.py:needs": "called without arguments, raised TypeError: .*'width'",
    "top_functions.py:raises": "raised RuntimeError: no weights here",
    "top_functions.py:leaves": "raised SystemExit: 1",
    "top_functions.py:": r"expected a file, or MODULE:FUNCTION .* my_model.py:build",
    ":build": "expected a file, or MODULE:FUNCTION",
    "top_functions.py": "name the function that builds the model, as in top_functions.py:build",
    "broken_functions.py:f": "the import of broken_functions.py raised SyntaxError",
    "lacking_functions.py:f": "raised ModuleNotFoundError: .*no_such_package_anywhere",
    "half_functions.py:f": "raised KeyError: 'half way'",
    "file:///a%20b.npz": "is a URL; give the path alone: /a b.npz",
}


@pytest.mark.parametrize("target", WRONG)
def test_wrong_targets_get_a_message(target: str) -> None:
    with pytest.raises((ValueError, TypeError), match=WRONG[target]):
        functions.built(target)


def test_the_command_prints_one_message(here: Path) -> None:
    Path("a.npz").write_bytes(b"")
    for given in (["a.npz", "broken_functions.py:f"], ["top_functions.py", "a.npz"]):
        done = CliRunner().invoke(app, ["match", *given])
        assert done.exit_code == 2
        assert "unexpected" not in done.output
    done = CliRunner().invoke(app, ["inspect", f"file://{here}/a.npz"])
    assert f"give the path alone: {here}/a.npz" in done.output
