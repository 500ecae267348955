"""The command `jaxmha describe`, and blocks of checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import Semantics, checkpoint
from jaxmha.converters import describe, flax, keras, torch
from jaxmha.converters.verify import load_block
from jaxmha.params import leaves
from tests import drawn
from tests.converters.command_line import cli, fails, succeeds
from tests.converters.test_describe import SQUARE

SHORT = ("--num-heads", 4, "--features", 20, "--query-len", 5)


def test_command_says_what_the_function_says(tmp_path: Path) -> None:
    options = ("--kv-len", 7, "--batch", 3, "--causal", "--bias-kv", "--zero-attn", "--no-bias")
    found = succeeds(
        "describe", *SHORT, *options, "--dropout", 0.1, "--framework", "torch", "--json"
    )
    flow = describe(
        None,
        Semantics(add_zero_attn=True, dropout_rate=0.1),
        **SQUARE,
        query_len=5,
        kv_len=7,
        batch=3,
        is_causal=True,
        use_bias=False,
        use_bias_kv=True,
        framework="torch",
    )
    assert json.loads(found.stdout) == json.loads(json.dumps(flow.to_json()))
    drawing = tmp_path / "mha.svg"
    printed = succeeds("describe", *SHORT, "--svg", drawing)
    for node in describe(**SQUARE, query_len=5).nodes:
        assert node.name in printed.stdout
    assert drawing.read_text() == describe(**SQUARE, query_len=5).svg()
    assert "mha.svg" in fails(tmp_path, "describe", *SHORT, "--svg", drawing)
    assert cli("describe", *SHORT, "--svg", drawing, "--force").exit_code == 0


def test_command_names_what_a_framework_cannot_hold() -> None:
    found = succeeds("describe", *SHORT, "--num-kv-heads", 2, "--framework", "torch")
    _, second, *rest = found.stdout.splitlines()
    assert second.startswith("torch has no such layer")
    assert "params" not in second
    assert any("if attention" in line for line in rest)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two torch layers of different sizes, and stacked Flax layers."""
    state: dict[str, Any] = {}
    for name, D in (("first", 20), ("second", 12)):
        params = drawn.params(num_heads=4, features=D)
        state |= torch.export_params(params, prefix=name)
    checkpoint.write(tmp_path / "two.safetensors", state)
    params = drawn.params(num_heads=2, features=6)
    stacked = {key: np.stack([x, x + 1, x + 2]) for key, x in flax.export_params(params).items()}
    checkpoint.write(tmp_path / "stacked.safetensors", {f"a/{k}": x for k, x in stacked.items()})
    return tmp_path


def test_block_of_a_checkpoint(folder: Path) -> None:
    arguments = ("describe", folder / "two.safetensors", "--num-heads", 4, "--query-len", 5)
    found = json.loads(cli(*arguments, "--json").stdout)
    assert (found["block"], found["sizes"]["Dq"]) == ("first", 20)
    found = json.loads(cli(*arguments, "--block", "second", "--dtype", "bfloat16", "--json").stdout)
    assert (found["block"], found["sizes"]["Dq"], found["dtype"]) == ("second", 12, "float32")
    assert [node["dtype"] for node in found["nodes"]][:4] == ["bfloat16"] * 3 + ["float32"]
    assert "one of 2 blocks" in cli(*arguments).stdout
    message = fails(folder, *arguments, "--block", "third")
    assert "first, second" in message
    message = fails(folder, *arguments[:2], "--query-len", 5)
    assert "--num-heads" in message
    assert "--features" in fails(folder, *arguments, "--features", 20)


def test_stacked_layers_have_numbers(folder: Path) -> None:
    path = folder / "stacked.safetensors"
    whole = load_block.read(path)
    assert (whole.name, whole.others) == ("a[0]", 2)
    last = load_block.read(path, "a[2]")
    difference = {
        name: np.asarray(x) - np.asarray(leaves(whole.params)[name])
        for name, x in leaves(last.params).items()
    }
    assert all(np.allclose(x, 2.0) for x in difference.values())
    with pytest.raises(ValueError, match=r"a\[0\] to a\[2\]"):
        load_block.read(path, "a[3]")
    with pytest.raises(ValueError, match="there are a"):
        load_block.read(path, "b[0]")


def test_a_block_has_the_name_that_its_user_gave(tmp_path: Path) -> None:
    """Files of Keras keep that name."""
    params = drawn.params(num_heads=2, features=6)
    path, prefix = tmp_path / "m.weights.h5", "layers/multi_head_attention"
    arrays = keras.export_params(params, layout="keras-file", prefix=prefix)
    checkpoint.write(path, arrays, names={prefix: "mine"})
    for name in (None, prefix, "mine"):
        assert load_block.read(path, name).name == "mine"
    with pytest.raises(ValueError, match="there are mine"):
        load_block.read(path, "yours")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--num-heads and --features"),
        (("--num-heads", 4), "--features"),
        ((*SHORT, "--block", "x"), "--block"),
        ((*SHORT, "--dtype", "float33"), "float33"),
        ((*SHORT, "--mask", "1,x"), "--mask"),
        ((*SHORT, "--svg", "x.png"), ".svg"),
        ((*SHORT, "--mask", "3,3"), "(3, 3)"),
        ((*SHORT, "--framework", "caffe"), "caffe"),
        ((*SHORT, "--query-len", 0), "query-len"),
        ((*SHORT, "--num-kv-heads", 3), "multiple"),
        (("no.safetensors",), "no.safetensors"),
    ],
)
def test_wrong_options(tmp_path: Path, arguments: tuple[Any, ...], message: str) -> None:
    assert message in fails(tmp_path, "describe", *arguments)


def test_no_block_in_a_file(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "none.safetensors", {"x": np.ones(3, "f")})
    assert "no attention block" in fails(tmp_path, "describe", tmp_path / "none.safetensors")
