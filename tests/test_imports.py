"""Modules that an import loads, and who may import whom."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

from jaxmha.converters.verify.comparands import FRAMEWORKS as FRAMEWORKS_OF_LAYERS

ROOT = Path(__file__).parents[1]
FRAMEWORKS = ("torch", "tensorflow", "keras", "flax", "equinox")
DRAWING = "matplotlib"
# Parts of JAX that `import jax` leaves out, since they take long to load.
OPTIONAL_PARTS = ("jax.extend", "jax._src.pallas", "jax.experimental.pallas")
LIGHT = (
    "jaxmha",
    "jaxmha.converters",
    "jaxmha.converters.torch",
    "jaxmha.converters.keras",
    "jaxmha.converters.flax",
    "jaxmha.converters.equinox",
    "jaxmha.keras",
    "jaxmha.converters.layout.base",
    "jaxmha.converters.layout.transform",
    "jaxmha.converters.verify",
    "jaxmha.converters.migrate",
    "jaxmha.checkpoint",
    "jaxmha.cli.app",
    # Its children inherit the size of this parent, and its threads would disturb them.
    "experiments.benchmarks.__main__",
    "jaxmha.converters.discovery.attention_blocks",
    "jaxmha.converters.discovery.model_families",
    *(f"jaxmha.converters.masks.{name}" for name in ("torch", "equinox", "sdpa", "nested", "keras",
        "flax", "jax", "huggingface", "handwritten", "lint", "lint_rules")),
)  # fmt: skip


def loaded(*modules: str) -> list[str]:
    """Frameworks, optional parts of JAX and its devices that a fresh process holds after importing
    the modules."""
    watched = (*FRAMEWORKS, *OPTIONAL_PARTS, DRAWING)
    code = (
        f"import sys, {', '.join(modules)}\nfrom jax._src import xla_bridge\n"
        f"print(*set({watched}) & set(sys.modules), *xla_bridge._backends)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.split()


def test_imports_load_no_framework_and_no_pallas() -> None:
    assert loaded(*LIGHT) == []


@pytest.mark.slow
def test_loading_a_framework_is_noticed() -> None:
    assert "flax" in loaded("jaxmha", "flax")


def is_lazy(node: ast.AST) -> bool:
    """True for code that does not run when the module is imported."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def found_in(tree: ast.AST, *, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Full names of the modules that a file imports, and whether that runs later."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            module = node.module or ""
            yield module, lazy
            yield from ((f"{module}.{alias.name}", lazy) for alias in node.names)
        elif not isinstance(node, ast.expr):
            yield from found_in(node, lazy=lazy or is_lazy(node))


@cache
def imports(source: str) -> list[tuple[str, bool]]:
    return [*found_in(ast.parse(source))]


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


CONVERTERS = "jaxmha.converters"
MATCHING, LOAD_INTO = f"{CONVERTERS}.matching", f"{CONVERTERS}.matching.load_into"
LIGHT_MATCHING = (LOAD_INTO, f"{MATCHING}.plan", f"{MATCHING}.proof")  # of which faces load no more
FACES = (*FRAMEWORKS_OF_LAYERS, "huggingface", "linear", "haiku")
# Rooms, each of which may import those before it.
ROOMS = (
    ("jaxmha", "jaxmha.implementations", "jaxmha.mods"),
    ("jaxmha.latent",),
    ("jaxmha.exported",),
    ("jaxmha.flax", "jaxmha.keras", "jaxmha.equinox", "jaxmha.haiku", "jaxmha.recipes"),
    ("jaxmha.checkpoint",),
    (f"{CONVERTERS}.layout",),
    (f"{CONVERTERS}.masks",),
    (f"{CONVERTERS}.discovery",),
    (f"{CONVERTERS}.matching",),
    tuple(f"{CONVERTERS}.{face}" for face in FACES),
    (f"{CONVERTERS}.migrate",),
    (f"{CONVERTERS}.sharded",),
    (f"{CONVERTERS}.verify",),
    (f"{CONVERTERS}.checkpoint",),
    ("jaxmha.bench",),
    ("jaxmha.introspect",),
    ("jaxmha.cli",),
    ("jaxmha.__main__", f"{CONVERTERS}.__main__", CONVERTERS),
)


def module(path: str) -> str:
    """Full name of the module in a file of the repository."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.startswith("jaxmha") else f"jaxmha.{name}"


def floor(name: str) -> int:
    """Of a module's room: of all whose name it starts with, the longest."""
    found = [
        (len(room), number)
        for number, rooms in enumerate(ROOMS)
        for room in rooms
        if under(name, room)
    ]
    return max(found)[1]


def violations(path: str, source: str) -> list[str]:
    """Imports of a file of the repository that its room may not have."""
    everywhere = [name for name, _ in imports(source)]
    top = [name for name, lazy in imports(source) if not lazy]
    own = module(path)
    above = floor(
        "jaxmha.exported" if own == "jaxmha" else own
    )  # the package itself has both layers
    forbidden = ["tests", "experiments", "converters"]
    found = [name for name in everywhere if under(name, *forbidden)]
    found += [
        name
        for name in everywhere
        if under(name, "jaxmha") and name not in ("jaxmha", CONVERTERS) and floor(name) > above
    ]
    if under(own, "jaxmha.checkpoint"):  # file formats know nothing of attention
        found += [
            name
            for name in everywhere
            if under(name, "jaxmha") and name != "jaxmha" and not under(name, "jaxmha.checkpoint")
        ]
    if own in (MATCHING, LOAD_INTO, *(f"{CONVERTERS}.{face}" for face in FACES)):  # 20 ms
        found += [
            name for name in top if under(name, MATCHING) and not under(name, *LIGHT_MATCHING)
        ]
    others = (*FRAMEWORKS, "haiku", "transformers", DRAWING)
    frameworks = [name for name in others if not under(own, f"jaxmha.{name}")]
    of_core = above <= floor("jaxmha.checkpoint")  # converters may, inside functions
    return found + [name for name in (everywhere if of_core else top) if under(name, *frameworks)]


def sources() -> list[str]:
    files = [*ROOT.glob("jaxmha/**/*.py"), *ROOT.glob("converters/**/*.py")]
    paths = sorted({path.relative_to(ROOT).as_posix() for path in files})
    return [path for path in paths if not path.startswith("jaxmha/converters/")]


def test_direction() -> None:
    found = {path: violations(path, (ROOT / path).read_text()) for path in sources()}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("jaxmha/a.py", "import torch"),
        ("jaxmha/a.py", "def f():\n    from flax import nnx"),
        ("jaxmha/a.py", "if TYPE_CHECKING:\n    import torch"),
        ("jaxmha/a.py", "from jaxmha.converters import layout"),
        ("jaxmha/a.py", "from jaxmha import checkpoint"),
        ("jaxmha/a.py", "from jaxmha.recipes import gpt2"),
        ("jaxmha/mask.py", "from jaxmha.keras import use"),
        ("jaxmha/implementations/a.py", "from jaxmha.flax import nnx"),
        ("jaxmha/implementations/a.py", "from jaxmha import latent"),
        ("jaxmha/a.py", "import haiku"),
        ("jaxmha/a.py", "import transformers"),
        ("jaxmha/a.py", "import matplotlib"),
        ("jaxmha/implementations/a.py", "import tests.reference"),
        ("converters/torch.py", "import torch"),
        ("converters/torch.py", "if True:\n    from torch import nn"),
        ("converters/torch.py", "class A:\n    import keras.layers"),
        ("converters/torch.py", "from tests import reference"),
        ("converters/torch.py", "from jaxmha.converters.matching import Plan"),
        ("converters/torch.py", "from converters import layout"),
        ("jaxmha/checkpoint/a.py", "from jaxmha.converters.layout.base import Layout"),
        ("jaxmha/checkpoint/a.py", "def f():\n    from jaxmha import params"),
    ],
)
def test_wrong_direction_is_noticed(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("jaxmha/a.py", "import jax\nfrom jaxmha.mask import Mask"),
        ("jaxmha/flax/a.py", "from flax import nnx"),
        ("converters/torch.py", "from jaxmha.params import MHAParams\ndef f():\n    import torch"),
        ("converters/torch.py", "if TYPE_CHECKING:\n    import torch"),
        ("jaxmha/checkpoint/a.py", "from jaxmha.checkpoint.formats import npz"),
    ],
)
def test_right_direction_is_not(path: str, source: str) -> None:
    assert violations(path, source) == []


def imported_modules(source: str, known: Collection[str]) -> set[str]:
    """The modules that a file imports, in functions too; a submodule does not count as its package."""
    names = [name for name, _ in imports(source)]
    inner = {name.rpartition(".")[0] for name in names if name in known}
    return {name for name in names if name in known and name not in inner}


def test_no_circle_of_imports() -> None:
    known = {module(path): path for path in sources()}
    graph = {
        name: imported_modules((ROOT / path).read_text(), known.keys())
        for name, path in known.items()
    }
    assert len(graph) > 200
    graphlib.TopologicalSorter(graph).prepare()


def test_a_circle_is_noticed() -> None:
    known = {"jaxmha", "jaxmha.a", "jaxmha.b"}
    sources_of = {"jaxmha.a": "from jaxmha import b", "jaxmha.b": "def f():\n    import jaxmha.a"}
    graph = {name: imported_modules(source, known) for name, source in sources_of.items()}
    assert graph == {"jaxmha.a": {"jaxmha.b"}, "jaxmha.b": {"jaxmha.a"}}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    "path",
    [
        "jaxmha/__init__.py",
        "jaxmha/flax/__init__.py",
        "jaxmha/latent/__init__.py",
        "jaxmha/mods/__init__.py",
        "converters/__init__.py",
    ],
)
def test_a_face_lists_its_names(path: str) -> None:
    """Those imported under their own name (`from a import b as b`), and its functions."""
    public, listed = set(), set[str]()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            public.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            public |= {alias.name for alias in node.names if alias.name == alias.asname}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = set(ast.literal_eval(node.value))
    assert listed - {"__version__"} == public


def test_converters_hold_rooms_and_faces_alone() -> None:
    folder = ROOT / "converters"
    assert {path.stem for path in folder.glob("*.py")} == {"__init__", "__main__", *FACES}
    assert len([*folder.glob("*/__init__.py")]) <= 8
