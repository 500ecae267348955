"""Reading runs no code, imports nothing it does not need, and notices changes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.checkpoint.source import Source
from tests.checkpoint import hostile
from tests.checkpoint.hostile import keras_archives, torch_files

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("torch", "keras", "tensorflow", "safetensors", "flax")

_AUDITED = """
import os, sys
import jaxmha.converters.checkpoint as checkpoint
frameworks = {frameworks!r}
assert "h5py" not in sys.modules, "h5py"
# What importing jaxmha itself brings is not the reader's doing.
before = set(sys.modules)
import h5py, tensorstore
seen = []
def hook(event, args):
    if event.startswith(("pickle.", "os.system", "subprocess.", "socket.", "marshal.", "exec")):
        seen.append((event, str(args)[:200]))
    if event == "open" and recording and not isinstance(args[0], int):
        # The file or folder given, its folder, and the files that an index lists.
        opened = os.path.realpath(os.path.join(folder, os.fsdecode(args[0])))
        if opened != folder and not opened.startswith(stem):
            seen.append((event, args[0]))
    if event in ("import", "compile") and recording:
        seen.append((event, str(args[0])[:80]))
recording, path = False, None
sys.addaudithook(hook)
for warm in (True, False):
    for path in sys.argv[1:]:
        folder = os.path.realpath(os.path.dirname(path))
        stem = os.path.join(folder, os.path.basename(path).partition(".")[0])
        recording = not warm
        try:
            with checkpoint.open(path) as file:
                for name in file:
                    file[name]
        except checkpoint.CheckpointError:
            pass
        recording = False
assert not seen, seen
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}} & set(frameworks)
assert not loaded, loaded
print("fine")
"""


def _python(code: str, *args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *args],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )


@pytest.mark.slow
def test_nothing_runs_while_reading(tmp_path: Path) -> None:
    """Sound and hostile files alike: no unpickler, no code, no import, no other file."""
    paths = []
    for name, case in (hostile.SOUND | hostile.CASES).items():
        path = tmp_path / f"{name}{case.suffix}"
        case.build(path)
        if path.exists() and not path.is_symlink():
            paths.append(str(path))
    assert len(paths) > 200
    done = _python(_AUDITED.format(frameworks=FRAMEWORKS), *paths)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.slow
def test_the_audit_can_fail(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, w=np.ones(2))
    code = _AUDITED.format(frameworks=FRAMEWORKS)
    unpickles = code.replace(
        "file[name]", "import pickle; pickle.loads(pickle.dumps(checkpoint.open))"
    )
    assert "pickle.find_class" in _python(unpickles, str(path)).stderr
    imports = code.replace("file[name]", "import this")
    assert "AssertionError" in _python(imports, str(path)).stderr


_WITHOUT = """
import sys
for name in sys.argv[2].split(","):
    sys.modules[name] = None
import numpy
from jaxmha.converters import checkpoint
place = sys.argv[1]
with open(place + "/plain.npz", "rb"):  # written before, without digests
    assert checkpoint.open(place + "/plain.npz")["w"].sum() == 2
for suffix in sys.argv[3].split(","):
    for attempt in (
        lambda: checkpoint.write(f"{place}/new{suffix}", {"w": numpy.ones(2)}),
        lambda: print("read", suffix, checkpoint.open(f"{place}/old{suffix}")["w"].sum()),
    ):
        try:
            attempt()
        except checkpoint.MissingDependency as e:
            print(e.problem, "|", e.remedy)
"""


def _without(place: Path, blocked: str, suffixes: tuple[str, ...]) -> list[str]:
    for suffix in suffixes:
        if suffix == ".keras":
            keras_archives.archive(place / "old.keras")
        else:
            checkpoint.write(place / f"old{suffix}", {"w": np.ones(2)})
    np.savez(place / "plain.npz", w=np.ones(2))
    done = _python(_WITHOUT, str(place), blocked, ",".join(suffixes))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


WRITTEN = (".safetensors", ".pt", ".weights.h5", ".npz", ".orbax", ".bin.index.json")


@pytest.mark.slow
def test_no_framework_is_needed(tmp_path: Path) -> None:
    """`tests.wheel` does the same where none is installed."""
    blocked = "torch,keras,tensorflow,flax,safetensors,orbax,transformers"
    reported = _without(tmp_path, blocked, WRITTEN)
    assert reported == [f"read {suffix} 2.0" for suffix in WRITTEN]
    with checkpoint.open(tmp_path / "new.orbax") as file:
        assert file["w"].tolist() == [1, 1]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    reported = _without(tmp_path, "h5py,xxhash,tensorstore", WRITTEN)
    h5py, orbax = "writing .weights.h5 needs h5py", "orbax checkpoints need tensorstore"
    assert reported.count(f"{h5py} | pip install 'jaxmha[files]'") == 1  # reading needs none
    assert reported.count(f"{orbax} | pip install 'jaxmha[orbax]'") == 2
    digests = "checking its digests needs xxhash"
    remedy = "pip install 'jaxmha[files]', or in Python checkpoint.open(path, verify=False)"
    assert reported.count(f"{digests} | {remedy}") == 5
    assert len(reported) == 8
    with checkpoint.open(tmp_path / "new.safetensors") as file:
        assert file.digests["w"].startswith("sha256:")
    with checkpoint.open(tmp_path / "old.pt", verify=False) as file:
        assert file["w"].tolist() == [1, 1]


@pytest.mark.parametrize("name", hostile.SOUND)
def test_a_file_that_changes_is_noticed(name: str, tmp_path: Path) -> None:
    case = hostile.SOUND[name]
    path = tmp_path / f"m{case.suffix}"
    case.build(path)
    with checkpoint.open(path) as file:
        (key,) = file
        files = hostile.files(path)  # of a folder per array, one of the array that is read
        changed = ([one for one in files if one.parent.name == key] or files)[-1]
        mapped, closed = (Source(changed, mapped=True) for _ in range(2))
        closed.close()
        status = changed.stat()
        with changed.open("r+b") as other:
            other.seek(-1, os.SEEK_END)
            other.write(b"!")
        os.utime(changed, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        with pytest.raises(checkpoint.IntegrityError, match="changed"):
            _ = file[key]
        with pytest.raises(checkpoint.IntegrityError, match="changed"):
            mapped.read_array(0, 1)
        mapped.close()
    with pytest.raises(checkpoint.UnreadableFile, match="is closed"):
        closed.read_array(0, 1)


@pytest.mark.parametrize("name", hostile.SOUND)
def test_nothing_stays_open(name: str, tmp_path: Path) -> None:
    case = hostile.SOUND[name]
    path = tmp_path / f"m{case.suffix}"
    case.build(path)

    def opened() -> list[str]:
        links = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
        return [os.readlink(link) for link in links if os.path.lexists(link)]

    def of_this() -> list[str]:
        return [file for file in opened() if file.startswith(str(tmp_path))]

    def closed() -> bool:
        """tensorstore closes files in threads of its own."""
        end = time.monotonic() + 10
        while of_this() and time.monotonic() < end:
            time.sleep(0.01)
        return not of_this()

    file = checkpoint.open(path)
    assert path.is_dir() or {str(path), *map(str, hostile.files(path))} <= {*of_this()}
    file.close()
    assert closed()
    file = checkpoint.open(path)
    del file
    assert closed()
    first = hostile.files(path)[0] if path.is_file() else path / "_METADATA"
    first.write_bytes(first.read_bytes()[:-3])
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.open(path)
    assert closed()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, w=np.ones(2))
    path.chmod(0)
    with pytest.raises(checkpoint.UnreadableFile, match="Permission denied"):
        checkpoint.open(path)


def test_limits_can_be_lowered_and_raised(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(torch_files.torch_file())
    tight = [
        checkpoint.Limits(logical_bytes=23),
        checkpoint.Limits(tensors=0),
        checkpoint.Limits(members=2),
        checkpoint.Limits(opcodes=5),
        checkpoint.Limits(pickle_bytes=10),
        checkpoint.Limits(header_bytes=10),
        checkpoint.Limits(aliases=0),
        checkpoint.Limits(rank=1),
        checkpoint.Limits(dimension=2),
    ]
    for limits in tight:
        with pytest.raises(checkpoint.BudgetExceeded):
            checkpoint.open(path, limits=limits)
    with checkpoint.open(path, limits=checkpoint.Limits(logical_bytes=24)) as file:
        assert file["w"].size == 6
    expanded = torch_files.state(
        torch_files.text("w"), torch_files.tensor(shape=(2**20, 2**20), strides=(0, 0))
    )
    path.write_bytes(torch_files.torch_file(expanded))
    with pytest.raises(checkpoint.BudgetExceeded, match="the memory to read it"):
        checkpoint.open(path, limits=checkpoint.Limits(logical_bytes=2**50))
    limits = checkpoint.Limits(logical_bytes=2**50, memory=2**50)
    with checkpoint.open(path, limits=limits) as file:
        assert file.info["w"].nbytes == 2**42


def test_what_inflates_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    """Zeros of 64 MiB in 64 kB: more than a file of this size may take, unless it is trusted."""
    path = tmp_path / "m.npz"
    np.savez_compressed(path, w=np.zeros(1 << 24, np.float32))
    with pytest.raises(checkpoint.BudgetExceeded, match=r"not compressed, or if .*memory=\.\.\."):
        checkpoint.open(path)
    with checkpoint.open(path, limits=checkpoint.Limits(memory=65 << 20)) as file:
        assert file["w"].shape == (1 << 24,)


def test_errors_survive_pickling() -> None:
    import pickle

    error = checkpoint.MalformedFile("m.pt", "is broken", "mend it", "w")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (checkpoint.MalformedFile, str(error))
    assert str(error) == "m.pt: 'w': is broken; mend it"
    assert issubclass(checkpoint.UnknownTensor, KeyError)
    assert issubclass(checkpoint.CheckpointError, ValueError)


def test_sigterm_ends_the_command_line_as_an_exception_does() -> None:
    """Its cleaning up runs, a second signal does not end that, and the code is 128 + 15."""
    code = """
import os, runpy, signal, sys, types
def app():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        print("not ended")
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        print("cleaned")
sys.modules["jaxmha.cli.app"] = types.SimpleNamespace(app=app)
runpy.run_path(sys.argv[1], run_name="__main__")
"""
    done = _python(code, str(ROOT / "jaxmha/cli/__main__.py"))
    assert (done.returncode, done.stdout) == (143, "cleaned\n"), done.stderr
