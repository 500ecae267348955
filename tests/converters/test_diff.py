"""`jaxmha diff` on files: parts, masks, presets, inputs, exit codes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters.verify import attribution
from tests.converters.command_line import cli

N, D = 3, 15


def diff(*arguments: Any) -> Any:
    return cli("diff", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT block; the same with a transposed kernel and a bias of zeros; two blocks."""
    path = tmp_path_factory.mktemp("diff")
    rng = np.random.default_rng(0)
    names = [f"self.{name}" for name in ("query", "key", "value")] + ["output.dense"]
    state = {}
    for name in names:
        state[f"attention.{name}.weight"] = 0.5 * rng.normal(size=(D, D)).astype(np.float32)
        state[f"attention.{name}.bias"] = rng.normal(size=D).astype(np.float32)
    wrong = dict(state)
    for name in ("attention.self.value.weight",):
        wrong[name] = np.ascontiguousarray(wrong[name].T)
    wrong["attention.output.dense.bias"] = np.zeros(D, np.float32)
    two = {f"{layer}.{name}": x for layer in ("0", "1") for name, x in state.items()}
    for name, arrays in (("right", state), ("wrong", wrong), ("two", two)):
        checkpoint.write(path / f"{name}.safetensors", arrays)
    (path / "config.json").write_text(json.dumps({"num_attention_heads": N}))
    x = rng.normal(size=(2, 4, D)).astype(np.float32)
    mask = np.tri(4, dtype=bool)[None, None]
    np.savez(path / "call.npz", query=x, mask_a=mask, mask_b=~mask | np.eye(4, dtype=bool))
    np.savez(path / "odd.npz", query=x, maks=mask)
    np.savez(path / "narrow.npz", query=x[..., :7])
    np.savez(path / "nan.npz", query=x, key=np.where(x == x.max(), np.nan, x))
    return path


def test_parts_of_two_files(folder: Path) -> None:
    result = diff(folder / "right.safetensors", folder / "wrong.safetensors", "--json")
    assert result.exit_code == 1, result.output
    block = json.loads(result.stdout)["blocks"]["attention"]
    assert [part["name"] for part in block["parts"]] == ["transposed kernel", "zero bias"]
    assert abs(sum(part["size"] for part in block["parts"]) - block["total"]) < 1e-12
    shown = diff(folder / "right.safetensors", folder / "wrong.safetensors").stdout
    assert "transposed" in shown
    assert "█" in shown
    assert "different" in shown


def test_nan_in_weights_is_not_called_the_same(folder: Path) -> None:
    file, broken = folder / "right.safetensors", folder / "nan.safetensors"
    with checkpoint.open(file) as opened:
        state = {name: np.array(opened[name]) for name in opened.info}
    state["attention.self.query.weight"][0, 0] = np.nan
    state["attention.self.value.weight"][0] = np.nan
    checkpoint.write(broken, state)
    result = diff(file, broken, "--json")
    assert result.exit_code == 1, result.output
    block = json.loads(result.stdout)["blocks"]["attention"]
    assert (block["compared"], block["total"], block["relative"]) == (0, None, None)
    shown = " ".join(diff(file, broken).stdout.split())
    assert "nothing can be compared: every element is NaN or infinite" in shown
    assert "is rounding" not in shown


def test_the_same_file_twice_is_the_same(folder: Path) -> None:
    result = diff(folder / "right.safetensors", folder / "right.safetensors")
    assert (result.exit_code, "the same" in result.stdout) == (0, True)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--mask", "bottom-right", "--mask-b", "causal"), "causal alignment"),
        (("--mask", "padding", "--mask-b", "none"), "mask ignored"),
        (("--mask", "empty", "--as-a", "torch:sdpa", "--as-b", "keras:fused"), "fully masked rows"),
        (("--inputs", "call.npz"), "mask transposed"),
    ],
)
def test_masks_and_behaviour(folder: Path, options: tuple[str, ...], named: str) -> None:
    file = folder / "right.safetensors"
    given = [folder / x if x.endswith(".npz") else x for x in options]
    result = diff(file, file, *given, "--json")
    assert result.exit_code == 1, result.output
    parts = json.loads(result.stdout)["blocks"]["attention"]["parts"]
    assert [part["name"] for part in parts] == [named]


def test_one_block_of_many(folder: Path) -> None:
    file = folder / "two.safetensors"
    result = diff(file, file, "--block", "1.attention", "--json")
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)["blocks"]) == ["1.attention"]
    result = diff(file, folder / "right.safetensors")
    assert result.exit_code == 2
    assert "no block in common: " in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("right.safetensors", "none.safetensors"), "none.safetensors"),
        (("right.safetensors", "right.safetensors", "--as-a", "torch:fast"), "'torch:fast'"),
        (("right.safetensors", "right.safetensors", "--block", "x"), "no block in common named x"),
        (("right.safetensors", "right.safetensors", "--inputs", "odd.npz"), "got maks"),
        (
            ("right.safetensors", "right.safetensors", "--inputs", "narrow.npz"),
            "Dq=15, got shape (2, 4, 7)",
        ),
        (
            ("right.safetensors", "right.safetensors", "--inputs", "nan.npz"),
            "key: 1 element is not finite",
        ),
        (
            ("right.safetensors", "right.safetensors", "--inputs", "call.npz", "--mask", "causal"),
            "--mask is for drawn inputs",
        ),
    ],
)
def test_bad_input_is_one_message(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    given = [folder / x if x.endswith((".npz", ".safetensors")) else x for x in arguments]
    result = diff(*given)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert message in " ".join(result.stderr.split())


KEPT: dict[str, tuple[dict[str, Any], str]] = {
    "another dtype, in all": ({"": np.float64}, "float32 (15, 3, 5) and float64 (15, 3, 5)"),
    "another dtype, in one": ({"value.weight": np.float64}, "the same values"),
    "a key bias": ({"key.bias": 1.0}, "key.bias"),
}


@pytest.mark.parametrize("kind", KEPT)
def test_weights_that_are_kept_otherwise_are_not_the_same(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    """Neither moves the output, and `verify` says of both that they differ."""
    changes, text = KEPT[kind]
    with checkpoint.open(folder / "right.safetensors") as file:
        state = {name: file[name] for name in file}
    for end, change in changes.items():
        for name in [name for name in state if name.endswith(end)]:
            old = state[name]
            state[name] = (
                old.astype(change) if isinstance(change, type) else old + np.float32(change)
            )
    checkpoint.write(tmp_path / "b.safetensors", state)
    both = (folder / "right.safetensors", tmp_path / "b.safetensors")
    result = diff(*both, "--num-heads", N)
    assert result.exit_code == 1, result.stdout
    assert text in " ".join(result.stdout.split())
    assert result.stdout.strip().endswith("different")
    data = json.loads(diff(*both, "--num-heads", N, "--json").stdout)
    assert (data["same"], data["blocks"]["attention"]["same"]) == (False, False)
    with checkpoint.open(both[0]) as file:
        found = attribution.attribute({n: file[n] for n in file}, state, num_heads=N)
    assert not found.same
    assert text in str(found)
