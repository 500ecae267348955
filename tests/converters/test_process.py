"""The command as a process: one message, exit codes, and no traceback whatever goes wrong."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.cli.__main__ import _piped, main
from jaxmha.converters.migrate import multiprocess, pipeline
from tests.converters.command_line import cli, message, succeeds
from tests.converters.test_every_layout import exported

# Replaces an import by something that goes wrong, then starts the command line.
START = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            raise {error}
sys.meta_path.insert(0, Block())
sys.argv = ["jaxmha", "inspect", "--layouts"]
from jaxmha.converters.__main__ import main
main()
"""


def start(name: str, error: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Starts the command line where importing `name` raises `error`."""
    return subprocess.run(
        [sys.executable, "-c", START.format(name=name, error=error)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_COLOR": "1"} | environment,
    )


@pytest.mark.slow_variants("typer")
@pytest.mark.parametrize("library", ["typer", "rich"])
def test_a_missing_library_is_one_line(library: str) -> None:
    done = start(library, f"ModuleNotFoundError(name={library!r})")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"the command line needs {library}: pip install 'jaxmha[cli]'\n"


@pytest.mark.slow
def test_nothing_is_missing() -> None:
    done = start("nothing_of_this_name", "AssertionError()")
    assert (done.returncode, done.stderr) == (0, "")
    assert "torch" in done.stdout


@pytest.mark.slow
def test_a_broken_library_is_one_line() -> None:
    done = start("typer", "RuntimeError('two\\nlines')")
    assert (done.returncode, done.stdout) == (2, "")
    expected = "error: the command line does not start: RuntimeError: two lines\n"
    assert done.stderr == expected
    shown = start("typer", "RuntimeError('two\\nlines')", JAXMHA_DEBUG="1")
    assert shown.returncode == 2
    assert "Traceback" in shown.stderr
    assert shown.stderr.endswith(expected)


@pytest.mark.slow
def test_an_interrupt_while_starting() -> None:
    done = start("typer", "KeyboardInterrupt()")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    """A closed pipe is quiet, with the exit code that shells make of SIGPIPE; the rest is an error.

    Other files are written before.
    """
    checkpoint.write(tmp_path / "a.npz", exported("flax", "a"))
    reader, writer = os.pipe()
    os.close(reader)
    convert = "convert a.npz b.npz --to flax --check weights --report report.json"
    assert ended(tmp_path, convert, writer) == (128 + signal.SIGPIPE, "")
    assert json.loads((tmp_path / "report.json").read_text())["same"]
    os.close(writer)


def test_output_to_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.write(tmp_path / "a.npz", exported("flax", "a"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["jaxmha", "inspect", str(tmp_path / "a.npz")])
    with open("/dev/full", "w") as full, open(tmp_path / "errors", "w") as errors:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", errors)
        with pytest.raises(SystemExit) as ended:
            main()
        sys.stderr.flush()
    assert ended.value.code == 2
    expected = "error: standard output: No space left on device\n"
    assert (tmp_path / "errors").read_text() == expected


def ended(folder: Path, command: str, stdout: int | None) -> tuple[int, str]:
    """Exit code and stderr of a process that writes there, or has its output closed."""
    shell = ["sh", "-c", 'exec "$@" >&-', "sh"] * (stdout is None)
    done = subprocess.run(
        [*shell, sys.executable, "-m", "jaxmha.converters", *command.split()],
        cwd=folder, env=os.environ | {"PYTHONPATH": os.getcwd()},
        stdout=stdout, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.slow
def test_other_pipes_and_no_output(tmp_path: Path) -> None:
    """A function of the user that breaks a pipe of its own is an error."""
    checkpoint.write(tmp_path / "a.npz", exported("flax", "a"))
    (tmp_path / "mine.py").write_text(
        "import os\ndef build():\n    reader, writer = os.pipe()\n    os.close(reader)\n"
        "    os.write(writer, b'x')\n"
    )
    by_function = "mine.py:build: the function, called without arguments, raised BrokenPipeError"
    assert ended(tmp_path, "match a.npz mine.py:build", subprocess.DEVNULL) == (
        2,
        f"error: {by_function}: [Errno 32] Broken pipe\n",
    )
    assert ended(tmp_path, "inspect a.npz --json", None) == (0, "")


def test_a_stream_without_buffer_stays_so() -> None:
    """`-u` and PYTHONUNBUFFERED promise that a crash loses nothing."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as stream:
        piped = _piped(stream)
        piped.write("x")
        assert os.read(reader, 2) == b"x"
    os.close(reader)
    with _piped(None) as closed:
        assert closed.write("x") == 1  # nothing reads it


@pytest.mark.parametrize("error", [KeyError("x"), MemoryError(), AssertionError("no"), OSError(5)])
def test_an_unexpected_exception_is_one_message(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(pipeline, "inspect", fails)
    path = tmp_path / "a.npz"
    checkpoint.write(path, {"a": np.ones(3)})
    done = cli("inspect", path)
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)
    assert done.stderr.startswith("error:")
    if not isinstance(error, OSError):
        assert f"unexpected {type(error).__name__}" in done.stderr
        assert "JAXMHA_DEBUG=1 shows where" in done.stderr
    monkeypatch.setenv("JAXMHA_DEBUG", "1")
    shown = cli("inspect", path)
    assert shown.exit_code == 2
    assert "Traceback" in shown.stderr


def test_an_interrupt_is_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "inspect", interrupted)
    done = cli("inspect", tmp_path / "a.npz")
    assert done.exit_code == 130
    assert "Traceback" not in done.output


def test_a_bias_of_zeros_is_not_printed_as_a_difference(tmp_path: Path) -> None:
    state = exported("flax", "a")
    for name, zero in (("plus.npz", 0.0), ("minus.npz", -0.0)):
        state["a/out/bias"] = np.full_like(state["a/out/bias"], zero)
        checkpoint.write(tmp_path / name, state)
    done = succeeds("verify", tmp_path / "plus.npz", tmp_path / "minus.npz")
    table = done.stdout.split("error: RMS")[0]
    assert "zeros" in table
    assert "differ" not in table


@pytest.mark.slow
def test_several_dtypes_in_a_block_are_noted(tmp_path: Path) -> None:
    state = exported("linear", "a")
    state["a.k_proj.bias"] = state["a.k_proj.bias"].astype(np.float16)
    checkpoint.write(tmp_path / "mixed.npz", state)
    files = tmp_path / "mixed.npz", tmp_path / "x.safetensors"
    arguments = ("convert", *files, "--to", "dense", "--num-heads=6")
    note = "a keeps several dtypes: out.bias is float32, key.bias is float16"
    unknown, *notes = json.loads(cli(*arguments, "--json").stdout)["notes"]
    assert unknown.startswith("there is no config.json")
    assert notes == [note]
    assert f"note: {note}\n" in cli(*arguments, "--force").stdout
    cast = cli(*arguments, "--force", "--dtype", "float32", "--json")
    assert json.loads(cast.stdout)["notes"] == [unknown]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["part", "whole"])
def test_a_killed_conversion_by_several_processes(tmp_path: Path, first: str) -> None:
    """Nothing is lost, and the same command completes what one process alone would write."""
    rng = np.random.default_rng(0)
    state: dict[str, Any] = {}
    for i in range(12):
        leaves = (("in_proj_weight", (384, 128)), ("in_proj_bias", (384,)),
                  ("out_proj.weight", (128, 128)), ("out_proj.bias", (128,)))  # fmt: skip
        state |= {f"h.{i}.{k}": rng.standard_normal(n).astype(np.float32) for k, n in leaves}
    source = tmp_path / "source.safetensors.index.json"
    checkpoint.write(source, state, shard_size=2**19)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    alone, target = (tmp_path / name / "m.safetensors.index.json" for name in ("one", "many"))
    options = ["--to", "flax", "--num-heads", "4", "--shard-size", "256KiB", "--json"]
    convert = [sys.executable, "-m", "jaxmha.converters", "convert", str(source)]
    for path in (alone, target):
        path.parent.mkdir()
    subprocess.run([*convert, str(alone), *options], check=True, capture_output=True)
    many = ["--resume", "--part", "1/2"] if first == "part" else ["--processes", "2"]
    killed = subprocess.Popen(
        [*convert, str(target), *options, *many],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while killed.poll() is None and not list(target.parent.glob("m-*")):
        time.sleep(0.001)
    assert killed.poll() is None
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not target.exists()
    shards = {path.name: path.stat().st_ino for path in target.parent.glob("m-*")}
    done = subprocess.run(
        [*convert, str(target), *options, "--processes", "2"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["report"] is not None
    written = {path.name: path for path in target.parent.iterdir()}
    assert all(written[name].stat().st_ino == inode for name, inode in shards.items())
    with checkpoint.open(alone) as expected, checkpoint.open(target) as found:
        assert dict(found.digests) == dict(expected.digests)
    assert len(written) == len(list(alone.parent.iterdir()))
    assert all((tmp_path / name).read_bytes() == raw for name, raw in before.items())


@pytest.mark.slow
def test_workers_end_with_what_started_them(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from jaxmha.converters.migrate import multiprocess;"
        "multiprocess.convert(2, Path('no.npz'), Path('x'), {'--to': 'flax'})"
    )
    started = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
    while len(workers := children.read_text().split()) < 2:
        assert started.poll() is None
        time.sleep(0.01)
    started.terminate()
    assert started.wait(30) == 128 + signal.SIGTERM
    assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]


def test_a_finished_conversion_is_checked_again(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "a.npz", exported("flax", "a"))
    target, report = tmp_path / "b.safetensors", tmp_path / "report.json"
    command = ("convert", tmp_path / "a.npz", target, "--to", "flax", "--check", "weights",
               "--report", report, "--shard-size", "3kB")  # fmt: skip
    assert cli(*command, "--resume").exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    report.write_bytes(before[report].replace(b"true", b"false"))
    done = cli(*command, "--resume")
    assert (done.exit_code, "kept from an earlier run" in done.stdout) == (0, True), done.output
    assert "verified" in done.stdout
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert "already there" in message(cli(*command))
    report.write_text("notes of mine")
    assert "report.json: is already there" in message(cli(*command, "--resume"))
    assert report.read_text() == "notes of mine"


# Worker processes stop where they import typer, after they began to watch the process above them.
HOLD = """
import sys, time
class Hold:
    def find_spec(self, name, path=None, target=None):
        if name == "typer" and "--part" in sys.orig_argv:
            open("held" + sys.orig_argv[-1][0], "w").close()
            while True:
                time.sleep(0.01)
sys.meta_path.insert(0, Hold())
"""


def is_running(process: str) -> bool:
    """True unless a process has ended, also if nothing has asked for its exit code yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_workers_end_if_what_started_them_is_killed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HOLD)
    code = (
        "from pathlib import Path; from jaxmha.converters.migrate import multiprocess;"
        "multiprocess.convert(2, Path('no.npz'), Path('x'), {'--to': 'flax'})"
    )
    paths = os.pathsep.join([str(tmp_path), os.getcwd()])
    started = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}
    )
    end = time.monotonic() + 120
    while not all((tmp_path / f"held{i}").exists() for i in (1, 2)):
        assert started.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
    workers = children.read_text().split()
    assert len(workers) == 2
    started.kill()
    started.wait()
    end = time.monotonic() + multiprocess._GRACE + 5
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_parts_that_make_no_sense(tmp_path: Path) -> None:
    for phrase, expected in ((["--part", "1/2"], "requires --resume"),
                            (["--resume", "--part", "1/2", "--report", "r"], "--part, which compares"),
                            (["--resume", "--part", "3/2"], "is no part")):  # fmt: skip
        done = cli("convert", "a.npz", tmp_path / "b.npz", "--to", "flax", *phrase)
        assert done.exit_code == 2
        assert expected in done.output
