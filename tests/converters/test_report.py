"""The checks after a conversion see every kind of damage."""

import json
import math
import tracemalloc
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint, params
from jaxmha.cli import convert
from jaxmha.converters.migrate import lazy_slices, pipeline
from jaxmha.converters.verify import comparands, head_groups, report, streaming
from jaxmha.params import CANONICAL
from tests.converters.command_line import cli, succeeds
from tests.converters.test_every_layout import N
from tests.converters.test_plan import model


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """A source, its conversion, and the plan that was carried out."""
    folder = tmp_path_factory.mktemp("report")
    source, target = folder / "a.safetensors", folder / "b.npz"
    checkpoint.write(source, model())
    done = pipeline.convert(source, target, to="flax", num_heads=N)
    return source, target, done.plan


def damaged(files: tuple[Path, Path, Any], folder: Path, edit: Any) -> report.ConversionReport:
    """The report on a destination that was changed after it was written."""
    source, target, plan = files
    with checkpoint.open(target) as file:
        arrays = {name: file[name] for name in file}
    edit(arrays)
    checkpoint.write(folder / "changed.npz", arrays)
    return report.check(source, folder / "changed.npz", plan, forward=False)


def test_a_conversion_is_the_same(files: tuple[Path, Path, Any]) -> None:
    source, target, plan = files
    found = report.check(source, target, plan)
    assert found.same
    assert str(found) == ""
    data = json.loads(json.dumps(found.to_json()))
    assert data["source"]["path"] == str(source)
    assert data["target"] | {"digest": ""} == {
        "path": str(target), "format": "npz", "tensors": len(found.digests), "digest": "",
    }  # fmt: skip
    for side in ("source", "target"):
        with checkpoint.open(data[side]["path"]) as file:
            assert data[side]["digest"] == file.digest(pipeline.DIGEST)
    assert {"python", "numpy", "jax"} <= data["versions"].keys()
    sources = [name for m in data["modules"] for names in m["tensors"].values() for name in names]
    assert sorted(sources) == sorted(model())
    (attention,) = [m for m in data["modules"] if m["kind"] == "attention"]
    assert attention["errors"].keys() == {"no mask", "padding", "causal"}
    assert all(0 < error < 100 for pair in attention["errors"].values() for error in pair)


@pytest.mark.parametrize(
    ("name", "where", "what"),
    [
        ("encoder/layer/0/attention/key/bias", "encoder/layer/0/attention", "key.bias"),
        (
            "encoder/layer/0/intermediate/dense/kernel",
            "encoder/layer/0/intermediate/dense",
            "kernel",
        ),
        ("encoder/layer/0/attention/output/LayerNorm/scale", "LayerNorm", "norm.scale"),
        ("embeddings/word_embeddings/embedding", "embeddings/word_embeddings", "embedding.table"),
        ("mystery.weight", "mystery.weight", "1 of 6 elements differ"),
        ("embeddings.position_ids", "embeddings.position_ids", "1 of 5 elements differ"),
    ],
)
def test_one_bit_is_seen(
    name: str, where: str, what: str, files: tuple[Path, Path, Any], tmp_path: Path
) -> None:
    def flip(arrays: dict[str, Any]) -> None:
        arrays[name].reshape(-1).view(np.uint8)[5] ^= 1

    found = damaged(files, tmp_path, flip)
    assert not found.same
    (line,) = str(found).splitlines()
    assert where in line
    assert what in line
    assert "1 of " in line


def traced(*arguments: Any, **options: Any) -> tuple[report.ConversionReport, int]:
    """A report, and how many bytes were held at once to make it."""
    tracemalloc.start()
    try:
        return report.check(*arguments, **options), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow_variants("True")
@pytest.mark.parametrize("forward", [False, True])
def test_a_block_is_compared_in_little_more_than_its_largest_tensor(
    forward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, E, source, target = 13, 1027, tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    shapes = {"in_proj_weight": (3 * E, E), "in_proj_bias": (3 * E,), "out_proj.weight": (E, E)}
    shapes |= {"out_proj.bias": (E,)}
    random = np.random.default_rng(0)
    checkpoint.write(source, {n: random.random(s, np.float32) - 0.5 for n, s in shapes.items()})
    done = pipeline.convert(source, target, to="flax", num_heads=heads)
    assert done.plan is not None
    monkeypatch.setattr(head_groups, "MOST", source.stat().st_size // heads)
    report.check(source, target, done.plan, forward=forward)  # imports and compiles
    found, peak = traced(source, target, done.plan, forward=forward)
    assert found
    assert bool(found.modules[0].errors) == forward
    assert peak < 4 * math.prod(shapes["in_proj_weight"]) + (6 << 20)


def only(leaf: str, array: Any) -> dict[str, Any]:
    """The leaves of a tensor that is one."""
    return {leaf: array}


@pytest.mark.slow_variants("one*")
@pytest.mark.parametrize("held", [0, 1 << 20], ids=["one tensor held", "all held"])
def test_groups_of_heads_of_a_compressed_file(
    held: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "a.npz", tmp_path / "b.safetensors"
    np.savez_compressed(source, **model())
    done = pipeline.convert(source, target, to="flax", num_heads=N)
    assert done.plan is not None
    monkeypatch.setattr(head_groups, "MOST", 1)
    monkeypatch.setattr(lazy_slices, "MOST_CACHED", held)
    found = report.check(source, target, done.plan)
    assert found
    assert any(one.errors for one in found.modules)


@pytest.mark.slow_variants("1-*", "3-6-*", "12-1-*", "!1-1-.npz", "3-1-.pt", "12-6-.npz")
@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pt", ".orbax"])
@pytest.mark.parametrize("K", [1, 6])
@pytest.mark.parametrize("count", [1, 3, 12])
def test_groups_of_heads_are_the_whole_block(
    count: int, K: int, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"Dq": 5, "Dk": 7, "Dv": 11, "N": 12, "K": K, "H": 3, "h": 2, "Do": 13}
    random = np.random.default_rng(0)
    leaves = {
        leaf: random.normal(size=[17, *(sizes[letter] for letter in axes.split())])
        for leaf, axes in CANONICAL.items()
        if "norm" not in leaf and "heads" not in leaf
    }
    names = {leaf: f"layer.{leaf}" for leaf in leaves}
    checkpoint.write(tmp_path / f"a{suffix}", {names[leaf]: x for leaf, x in leaves.items()})
    size = sum(x[0].nbytes for x in leaves.values())
    monkeypatch.setattr(head_groups, "MOST", -(-size // count))
    with streaming.opened(tmp_path / f"a{suffix}") as file:
        tensors = {name: partial(only, leaf) for leaf, name in names.items()}
        views = streaming.Views(streaming.FileLayer(file, dict[str, streaming.Unpack](tensors)))
        boxes = list(head_groups.boxes(views, (3,)))
        groups = [params.leaves(head_groups.group(views, (3,), box).params) for box in boxes]
    assert len(groups) == count
    heads = [n for box in boxes for n in range(sizes["N"])[box["N"]]]
    assert heads == list(range(sizes["N"]))
    for group in groups:
        own = group["query.kernel"].shape[1] // group["key.kernel"].shape[1]  # queries of a key
        for j in range(group["query.kernel"].shape[1]):
            n = heads.pop(0)
            present = {"N": n, "K": n * K // sizes["N"]}
            here = {"N": j, "K": j // own}
            for leaf, axes in CANONICAL.items():
                if leaf in leaves:
                    x, y = (
                        whole[tuple(at.get(letter, slice(None)) for letter in axes.split())]
                        for whole, at in ((group[leaf], here), (leaves[leaf][3], present))
                    )
                    np.testing.assert_array_equal(x, y, strict=True)


def test_both_sides_of_a_cast_run_in_the_same_groups(
    files: tuple[Path, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = files[0], tmp_path / "half.npz"
    done = pipeline.convert(source, target, to="flax", num_heads=N, dtype="float16")
    assert done.plan is not None
    for most in (1, 1000):
        monkeypatch.setattr(head_groups, "MOST", most)
        assert report.check(source, target, done.plan)


def test_elements_that_differ_are_counted_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    array = np.random.default_rng(0).normal(size=(3 << 18, 7)).astype(np.float32)
    checkpoint.write(source, model() | {"table": array})
    done = pipeline.convert(source, target, to="flax", num_heads=N)
    with checkpoint.open(target) as file:
        arrays = {name: file[name] for name in file}
    arrays["table"][[0, 100, -1], 5] += 1
    checkpoint.write(target, arrays, force=True)
    assert done.plan is not None
    del arrays
    found, peak = traced(source, target, done.plan, forward=False)
    assert str(found) == f"table: 3 of {array.size} elements differ"
    assert peak < array.nbytes + (12 << 20)


def test_every_group_of_heads_is_run(
    files: tuple[Path, Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer whose last heads compute something else."""
    real, runs = comparands.of_params, []

    def wrong(*args: Any) -> comparands.ComparedBlock:
        side = real(*args)
        runs.append(side)
        if len(runs) < 2 * N:
            return side
        return side._replace(forward=lambda *given: 2 * side.forward(*given))

    monkeypatch.setattr(head_groups, "MOST", 1)
    assert report.check(*files)
    monkeypatch.setattr(comparands, "of_params", wrong)
    found = report.check(*files)
    assert len(runs) == 2 * N
    assert not found.same
    assert "computes something else" in str(found)


def test_missing_and_unexpected_tensors_are_seen(
    files: tuple[Path, Path, Any], tmp_path: Path
) -> None:
    def rename(arrays: dict[str, Any]) -> None:
        arrays["mine.weight"] = arrays.pop("mystery.weight")

    found = damaged(files, tmp_path, rename)
    assert not found.same
    assert (found.missing, found.unexpected) == (("mystery.weight",), ("mine.weight",))
    assert "mystery.weight: not in the destination" in str(found)


def test_a_layer_of_other_shapes_is_a_difference(
    files: tuple[Path, Path, Any], tmp_path: Path
) -> None:
    def widen(arrays: dict[str, Any]) -> None:
        name = "encoder/layer/0/intermediate/dense/bias"
        arrays[name] = np.zeros(11, np.float32)

    found = damaged(files, tmp_path, widen)
    assert not found.same
    assert "expected axes (Do), Do=7, got shape (11,)" in str(found)


def test_the_kept_head_count_is_compared(tmp_path: Path) -> None:
    source, target, changed = (tmp_path / f"{x}.safetensors" for x in "abc")
    checkpoint.write(source, model())
    done = pipeline.convert(source, target, to="bert", num_heads=N)
    assert done.plan is not None
    for count, same in ((N, True), (2 * N, False)):
        with checkpoint.open(target) as file:
            kept = {**file.metadata, "jaxmha.num_heads": str(count)}
            checkpoint.write(
                changed, {name: file[name] for name in file}, metadata=kept, force=True
            )
        found = report.check(source, changed, done.plan, forward=False)
        assert found.same == same
        assert same or f"says {2 * N}" in str(found)


def test_another_dtype_is_seen_and_a_cast_is_checked(
    files: tuple[Path, Path, Any], tmp_path: Path
) -> None:
    def narrow(arrays: dict[str, Any]) -> None:
        name = "encoder/layer/0/intermediate/dense/bias"
        arrays[name] = arrays[name].astype(np.float16)

    assert "linear.bias is float32 (7,), and float16" in str(damaged(files, tmp_path, narrow))
    source = files[0]
    done = pipeline.convert(source, tmp_path / "half.npz", to="flax", num_heads=N, dtype="float16")
    assert done.plan is not None
    assert report.check(source, tmp_path / "half.npz", done.plan, forward=False).same


def test_the_command_line_exits_with_1(
    files: tuple[Path, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that loses a bit, which its own comparison does not see."""
    write = checkpoint.write

    def careless(path: Path, tensors: Any, **settings: Any) -> Any:
        arrays = {name: tensors[name] for name in tensors}
        arrays["encoder/layer/0/intermediate/dense/bias"][3] += 1
        return write(path, arrays, **settings)

    command = [
        "convert", str(files[0]), str(tmp_path / "x.npz"), "--to", "flax", "--num-heads", str(N),
    ]  # fmt: skip
    command += ["--report", str(tmp_path / "report.json"), "--check", "weights"]
    monkeypatch.setattr(checkpoint, "write", careless)
    done = cli(*command)
    assert done.exit_code == 1, done.output
    assert "the files differ" in done.stdout
    assert "dense: linear.bias: 1 of 7 elements differ" in " ".join(done.stderr.split())
    assert not json.loads((tmp_path / "report.json").read_text())["same"]

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:  # what was found is said all the same
        patched.setattr(convert, "put_text", full)
        done = cli(*command, "--force")
        assert (done.exit_code, "the files differ" in done.stdout) == (2, True)
    monkeypatch.setattr(checkpoint, "write", write)
    done = succeeds(*command, "--force")
    assert "verified: 15 tensors identical" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["same"]
