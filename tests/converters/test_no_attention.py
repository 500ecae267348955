"""Files without attention: every tensor is compared, and written to another format."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxmha import checkpoint
from jaxmha.converters import verify
from jaxmha.converters.migrate import pipeline
from tests.converters.command_line import cli, fails, printed, succeeds

State = dict[str, Any]
NOTE = "no attention block was found in"


def resnet() -> State:
    """A convolution, a batch norm with its buffers and a linear layer, as torch names them."""
    torch.manual_seed(0)
    layers = {"conv": torch.nn.Conv2d(3, 5, 3), "bn": torch.nn.BatchNorm2d(5)}
    model = torch.nn.ModuleDict(layers | {"fc": torch.nn.Linear(5, 7)})
    return {name: x.numpy() for name, x in model.state_dict().items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    checkpoint.write(tmp_path / "a.safetensors", resnet())
    return tmp_path / "a.safetensors"


# The second file: what becomes of the state of the first, and a line of the comparison.
SECOND: dict[str, tuple[Any, str]] = {
    "same": (lambda state: state, "the same"),
    "changed": (lambda state: state | {"bn.bias": state["bn.bias"] + 1}, "bn.bias: 5 of 5 elements"),
    "fewer": (lambda state: state.pop("bn.bias") is None or state, "bn.bias, of the first: no tensor"),
    "rounded": (lambda state: state | {"fc.bias": np.float16(state["fc.bias"])}, "--dtype float16"),
    "transposed": (lambda state: state | {"fc.weight": state["fc.weight"].T}, "(7, 5) and float32 (5, 7)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", SECOND)
def test_verify_compares_all_tensors(kind: str, source: Path, tmp_path: Path) -> None:
    change, line = SECOND[kind]
    checkpoint.write(tmp_path / "b.pt", change(resnet()))
    done = cli("verify", source, tmp_path / "b.pt", "--html", tmp_path / "page.html")
    assert done.exit_code == (kind != "same"), done.output
    assert line in printed(done)
    assert f"{NOTE} either source" in printed(done)
    assert "block" not in done.stdout.split("note:")[0]
    assert "Attention: 0" not in (tmp_path / "page.html").read_text()


def test_layers_are_read_by_the_conventions_of_their_frameworks(source: Path) -> None:
    pipeline.convert(source, source.with_name("b.safetensors"), to="flax")
    assert verify.compare(source, source.with_name("b.safetensors")).same
    assert verify.compare(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).different


def test_attention_in_one_source_alone_differs(source: Path) -> None:
    attention = torch.nn.MultiheadAttention(6, 2)
    found = verify.compare(attention, source)
    assert (found.only_a, found.same, NOTE + " the second" in str(found)) == (("",), False, True)


@pytest.mark.parametrize("ending", ["npz", "pt", "orbax", "safetensors.index.json"])
def test_every_tensor_is_copied_to_another_format(ending: str, source: Path) -> None:
    target = source.with_name(f"b.{ending}")
    done = succeeds("convert", source, target)
    assert "no layout was named: 9 tensors copied" in printed(done)
    assert "verified: 9 tensors identical" in printed(done)
    with checkpoint.open(source) as old, checkpoint.open(target) as new:
        assert dict(old.info) == dict(new.info)
    assert verify.compare(source, target).same


def test_what_the_source_keeps_with_its_tensors_is_copied(tmp_path: Path) -> None:
    facts, arrays = {"jaxmha.num_heads.a": "2", "tied": "own"}, {"own": np.ones((3, 2), "f")}
    first, second, third = (tmp_path / name for name in ("a.safetensors", "b.safetensors", "c.pt"))
    checkpoint.write(first, arrays | {"exp_avg": np.ones(3)}, metadata=facts)
    pipeline.convert(first, second)
    assert "lacks tied" in printed(succeeds("convert", first, third))
    for path in (second, third):
        with checkpoint.open(path) as file:
            assert file.metadata == facts
    pipeline.convert(first, second, dtype="bfloat16", force=True)
    assert verify.compare(first, second, dtype="bfloat16").same


def test_keras_files_come_back_with_their_names(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.weights.h5", "b.safetensors", "c.weights.h5")]
    arrays = {f"layers/dense{end}/vars/0": np.full((3, 2), 1.0, "f") for end in ("", "_1")}
    names = {"layers/dense": "stem", "layers/dense_1": "head"}
    checkpoint.write(paths[0], arrays, names=names)
    for one, other in itertools.pairwise(paths):
        pipeline.convert(one, other)
        assert verify.compare(paths[0], other).same
    with checkpoint.open(paths[2]) as file:
        assert (dict(file.names), file.ordered) == (names, True)


REFUSED: dict[str, tuple[list[str], str]] = {
    "layout": (["x.npz", "--to", "flax", "--attention-only"], "jaxmha match"),
    "option": (["x.npz", "--num-heads", "2"], "name a layout with --to"),
    "keras": (["x.weights.h5"], "no Keras model could load"),
    "itself": (["a.safetensors", "--force"], "a.safetensors"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_conversions_that_are_refused_name_a_remedy(kind: str, source: Path) -> None:
    (target, *options), message = REFUSED[kind]
    place = source.parent
    assert message in fails(place, "convert", source, place / target, *options)
    with pytest.raises(ValueError, match="num_heads: only with a layout"):
        pipeline.convert(source, place / "x.npz", num_heads=2)
