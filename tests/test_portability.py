"""Systems other than Linux: what runs there, and where POSIX may be named."""

import ast
import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from jaxmha import checkpoint
from tests import windows

ROOT = Path(__file__).parents[1]
# The modules that name what only POSIX has; each name in them is behind a test for it.
POSIX = {"jaxmha/checkpoint/system.py", "jaxmha/bench/memory.py"}
FILES = ("a.safetensors", "a.pt", "a.npz", "a.weights.h5", "a.orbax", "s.safetensors.index.json")
READS = """
import os, sys, pathlib
import h5py, jax, numpy as np, rich.progress, tensorstore, typer.testing, xxhash
import ml_dtypes, concurrent.futures.thread, multiprocessing, tempfile, tomllib, uuid
from tests.windows import act_as_windows
act_as_windows()
import jaxmha.converters.torch, jaxmha.introspect
from jaxmha import checkpoint
from jaxmha.cli.app import app
from typer.testing import CliRunner
os.chdir(sys.argv[1])
tensors = {"self_attn.in_proj_weight": np.arange(108.0, dtype="f").reshape(18, 6),
           "self_attn.out_proj.weight": np.ones((6, 6), "f")}
def run(command, code=0):
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == code, (command, done.output, done.exception)
    return done.output
"""


def in_process(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in every format, written by this system."""
    folder = tmp_path_factory.mktemp("written")
    tensors = {
        "self_attn.in_proj_weight": np.arange(108.0, dtype="f").reshape(18, 6),
        "self_attn.out_proj.weight": np.ones((6, 6), "f"),
    }
    for name in FILES:
        size = 200 if name.endswith(".json") else None
        checkpoint.write(folder / name, tensors, shard_size=size)
    return folder


@pytest.mark.slow  # a minute
def test_the_tests_of_checkpoints_hold_without_file_locks() -> None:
    """JAX first: its own locks warn without `fcntl`."""
    code = """
import sys, jax, pytest
sys.modules["fcntl"] = None
sys.exit(pytest.main(["-q", "-n0", "-p", "no:cacheprovider", "tests/checkpoint"]))
"""
    assert " skipped" in in_process(code).splitlines()[-1]


def test_a_system_as_windows_reads_and_writes_every_format(tmp_path: Path, written: Path) -> None:
    """A temporary file whose lock cannot be read stays, and is named."""
    code = """
from jaxmha.checkpoint import temporaries
for name in sys.argv[3:]:
    for mmap in (False, True):
        with checkpoint.open(name, mmap=mmap) as file:
            for key, value in tensors.items():
                assert np.array_equal(file[key], value), name
                assert np.array_equal(file.part(key, (slice(1, 3),)), value[1:3]), name
            assert file.digest()
for command in ("inspect a.pt --num-heads 2", "plan a.npz --to flax --num-heads 2",
                "verify a.pt a.safetensors --num-heads 2", "diff a.pt a.npz --num-heads 2",
                "verify s.safetensors.index.json a.weights.h5 --num-heads 2",
                "describe a.pt --num-heads 2", "explain -T 8 -N 2 -H 4", "inspect --layouts"):
    run(command)

os.chdir(sys.argv[2])
for name in sys.argv[3:]:
    options = {"shard_size": 200} if name.endswith(".json") else {}
    for force in (False, True):
        if name.endswith(".orbax") and force:
            continue
        changed = {key: value + force for key, value in tensors.items()}
        notes = checkpoint.write(name, changed, force=force, **options).notes
        assert not any("temporary" in note for note in notes), notes  # its own is no other's
        with checkpoint.open(name) as file:
            assert all(np.array_equal(file[key], value) for key, value in changed.items()), name
    try:
        checkpoint.write(name, tensors, **options)
    except checkpoint.DestinationExists:
        pass
    else:
        raise AssertionError(name)
run("convert a.pt b.npz --to flax --num-heads 2 --report b.json")
run("plan a.pt --to flax --num-heads 2 --output plan.toml")
run("convert a.pt c.safetensors.index.json --plan plan.toml --shard-size 200 --resume")
try:
    checkpoint.write("a.orbax", tensors, force=True)
except checkpoint.DestinationExists as error:
    print(error)
assert not list(pathlib.Path().glob(".*.tmp"))

stale = temporaries.fresh(pathlib.Path("d.npz").absolute())
stale.write_bytes(b"")
print(checkpoint.write("d.npz", tensors).notes)
"""
    output = in_process(READS + code, str(written), str(tmp_path), *FILES)
    assert "cannot be replaced in one step on this system" in output
    assert "no file locks" in output
    assert len(list(tmp_path.glob(".*.tmp"))) == 1


def sources() -> list[str]:
    paths = [*ROOT.glob("jaxmha/**/*.py"), *ROOT.glob("converters/**/*.py")]
    found = sorted({path.relative_to(ROOT).as_posix() for path in paths})
    return [path for path in found if not path.startswith("jaxmha/converters/")]


# In a file without any of these words there is no such name: it need not be parsed.
NAMED = re.compile(rf"\b(os|signal|renameat2|\w*dir_fd|{'|'.join(windows.MODULES)})\b")


def posix_names(tree: ast.AST) -> Iterator[str]:
    """Names in a file that Windows lacks: modules, names of `os` and `signal`, and `dir_fd`."""
    modules: Mapping[str, frozenset[str]] = {"os": windows.OS, "signal": windows.SIGNAL}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in windows.MODULES)
        elif isinstance(node, ast.ImportFrom):
            if node.module in windows.MODULES:
                yield str(node.module)
            elif node.module is not None and node.module in modules:
                names = {alias.name for alias in node.names} - modules[node.module]
                yield from (f"{node.module}.{name}" for name in names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            known = modules.get(node.value.id)
            if known is not None and node.attr not in known:
                yield f"{node.value.id}.{node.attr}"
            elif (node.value.id, node.attr) == ("os", "open"):
                yield "os.open"  # its flags: Windows opens text unless told otherwise
        elif isinstance(node, ast.keyword) and node.arg in ("dir_fd", "src_dir_fd", "dst_dir_fd"):
            yield node.arg
        elif isinstance(node, ast.Constant) and node.value == "renameat2":
            yield "renameat2"


def test_posix_is_named_in_one_module_of_a_room() -> None:
    texts = {path: (ROOT / path).read_text() for path in sources()}
    some = {path: ast.parse(text) for path, text in texts.items() if NAMED.search(text)}
    assert {path for path, tree in some.items() if any(posix_names(tree))} == POSIX


@pytest.mark.parametrize(
    "source",
    [
        "import fcntl", "from os import preadv", "os.O_NOFOLLOW", "signal.SIGPIPE",
        "os.stat(name, dir_fd=3)", "os.open(path, os.O_RDONLY)", "def f():\n    import resource",
    ],
)  # fmt: skip
def test_posix_is_noticed(source: str) -> None:
    assert NAMED.search(source)
    assert list(posix_names(ast.parse(source)))


@pytest.mark.parametrize("source", ["os.path.join(a, b)", "import os", "signal.SIGTERM"])
def test_a_portable_name_is_not(source: str) -> None:
    assert not list(posix_names(ast.parse(source)))


@pytest.mark.parametrize(("module", "names"), [(os, windows.OS), (signal, windows.SIGNAL)])
def test_the_names_of_windows_are_names(module: ModuleType, names: frozenset[str]) -> None:
    """Most of them are here too: the list is of this module, and not of another."""
    assert len(names & set(dir(importlib.import_module(module.__name__)))) > len(names) / 2
