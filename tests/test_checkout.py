"""A checkout whose link to the converters is a text file, as in archives and on systems without links; recipes have none."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
# Without `site`, so that no editable install of another checkout is found.
CODE = """
import sys
sys.path[:0], sys.path[len(sys.path):] = [sys.argv[1]], [sys.argv[2]]
import {module}
print({module}.__file__)
"""


def without_link(folder: Path) -> Path:
    """A copy of what the package is built from, with the link as a text file."""
    tree = folder / "checkout"
    for name in ("jaxmha", "converters", "experiments/recipes"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("converters"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tree)
    (tree / "jaxmha" / "converters").write_text("../converters")
    return tree


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_link(tmp_path_factory.mktemp("without-link"))


@pytest.mark.slow  # `test_one_of_everything` converts in such a checkout, with `site`
@pytest.mark.parametrize(
    "module",
    [
        "jaxmha.converters.torch",
        "jaxmha.converters.checkpoint",
        "jaxmha.cli.app",
        "jaxmha.recipes.bert",
    ],
)
def test_the_converters_are_found_without_the_link(module: str, tree: Path) -> None:
    command = [sys.executable, "-S", "-c", CODE.format(module=module)]
    done = subprocess.run(
        [*command, str(tree), str(Path(jax.__file__).parents[1])],
        capture_output=True,
        text=True,
        check=False,
        cwd=tree,
        env={name: text for name, text in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tree))


def test_every_package_is_installed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    places = {"jaxmha": "jaxmha"} | settings["package-dir"]
    found = {
        ".".join([name, *init.parent.relative_to(ROOT / place).parts])
        for name, place in places.items()
        for init in (ROOT / place).rglob("__init__.py")
        if name == "jaxmha.converters" or "converters" not in init.relative_to(ROOT).parts
    }
    assert set(settings["packages"]) == found
