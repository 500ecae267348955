"""Files without attention: every tensor is compared, and written to another format."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxmha import checkpoint
from jaxmha.converters import verify
from jaxmha.converters.migrate import pipeline
from tests.converters.command_line import cli, printed

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
