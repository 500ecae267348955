"""What importing loads, and who may import whom."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FRAMEWORKS = ("torch", "tensorflow", "keras", "flax")
LIGHT = (
    "jaxmha",
    "jaxmha.converters",
    "jaxmha.converters.torch",
    "jaxmha.converters.keras",
    "jaxmha.converters.flax",
    "jaxmha.converters.layout",
    "jaxmha.converters.engine",
    "jaxmha.converters.blocks",
    "jaxmha.converters.families",
    *(
        f"jaxmha.converters.masks.{name}"
        for name in (
            "torch",
            "sdpa",
            "nested",
            "keras",
            "flax",
            "jax",
            "huggingface",
            "seeds",
            "lint",
            "suspicions",
        )
    ),
)


def loaded(*modules: str) -> list[str]:
    """The frameworks that a fresh process holds after importing the modules."""
    code = f"import sys, {', '.join(modules)}\nprint(*set({FRAMEWORKS}) & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.split()


def test_imports_load_no_framework() -> None:
    assert loaded(*LIGHT) == []


def test_loading_a_framework_is_noticed() -> None:
    assert "flax" in loaded("jaxmha", "flax")


def imports(tree: ast.AST, *, inside_functions: bool) -> Iterator[str]:
    """Full names of the modules that a file imports."""
    for node in ast.iter_child_nodes(tree):
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if function and not inside_functions:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            module = node.module or ""
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        yield from imports(node, inside_functions=inside_functions)


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def violations(path: str, source: str) -> list[str]:
    """Imports of a file of the repository that its layer may not have.

    tests, experiments -> jaxmha.converters -> jaxmha -> jax.
    """
    tree = ast.parse(source)
    everywhere = list(imports(tree, inside_functions=True))
    top = list(imports(tree, inside_functions=False))
    found = [name for name in everywhere if under(name, "converters")]
    if path.startswith("jaxmha/"):
        forbidden = ["jaxmha.converters", "tests", "experiments", *FRAMEWORKS]
        if path.startswith("jaxmha/flax"):
            forbidden.remove("flax")
        found += [name for name in everywhere if under(name, *forbidden)]
    if path.startswith("converters/"):
        found += [name for name in everywhere if under(name, "tests", "experiments")]
        found += [name for name in top if under(name, *FRAMEWORKS)]
    if path.startswith("converters/checkpoint/"):
        # File formats know nothing of attention.
        found += [
            name
            for name in everywhere
            if under(name, "jaxmha") and not under(name, "jaxmha.converters.checkpoint")
            if name not in ("jaxmha.converters", "jaxmha")
        ]
    return found


def sources() -> list[str]:
    files = [*ROOT.glob("jaxmha/**/*.py"), *ROOT.glob("converters/**/*.py")]
    paths = sorted({path.relative_to(ROOT).as_posix() for path in files})
    return [path for path in paths if not path.startswith("jaxmha/converters/")]


@pytest.mark.parametrize("path", sources())
def test_direction(path: str) -> None:
    assert violations(path, (ROOT / path).read_text()) == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("jaxmha/a.py", "import torch"),
        ("jaxmha/a.py", "def f():\n    from flax import nnx"),
        ("jaxmha/a.py", "from jaxmha.converters import layout"),
        ("jaxmha/a.py", "from jaxmha import converters"),
        ("jaxmha/implementations/a.py", "import tests.reference"),
        ("converters/torch.py", "import torch"),
        ("converters/torch.py", "if True:\n    from torch import nn"),
        ("converters/torch.py", "class A:\n    import keras.layers"),
        ("converters/torch.py", "from tests import reference"),
        ("converters/torch.py", "from converters import layout"),
        ("converters/checkpoint/a.py", "from jaxmha.converters.layout import Layout"),
        ("converters/checkpoint/a.py", "def f():\n    from jaxmha import params"),
    ],
)
def test_wrong_direction_is_noticed(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("jaxmha/a.py", "import jax\nfrom jaxmha.mask import Mask"),
        ("jaxmha/flax.py", "from flax import nnx"),
        ("converters/torch.py", "from jaxmha.params import MHAParams\ndef f():\n    import torch"),
        ("converters/checkpoint/a.py", "from jaxmha.converters.checkpoint import npz"),
    ],
)
def test_right_direction_is_not(path: str, source: str) -> None:
    assert violations(path, source) == []
