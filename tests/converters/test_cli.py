"""The command line on files that the frameworks' own writers made."""

import io
import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from jaxmha import checkpoint
from jaxmha.cli.app import COMMANDS, app
from jaxmha.cli.console import print_line
from jaxmha.converters import flax, keras, torch
from tests.converters import layers

runner = CliRunner()
N, D = 3, 15
LAYERS = 2

# Keras' variables have an __array__ of before NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def cli(*arguments: Any) -> Any:
    """Runs the command line in this process."""
    return runner.invoke(app, [str(argument) for argument in arguments])


def fails(folder: Path, *arguments: Any) -> str:
    """Asserts exit code 2, one message, no traceback and nothing written; returns the message."""
    before = contents(folder)
    result = cli(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error") >= 1 or "Error" in result.stderr
    assert contents(folder) == before
    return " ".join(result.stderr.split())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file with its bytes."""
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def encoder() -> Any:
    """A torch encoder of two layers with random biases."""
    import torch as framework

    framework.manual_seed(0)
    block = framework.nn.TransformerEncoderLayer(D, N, 17, batch_first=True)
    model = framework.nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False).eval()
    rng = np.random.default_rng(0)
    with framework.no_grad():
        for parameter in model.parameters():
            drawn = 0.3 * rng.normal(size=tuple(parameter.shape))
            parameter.copy_(framework.from_numpy(drawn.astype(np.float32)))
    return model


@pytest.fixture(scope="module")
def folder(encoder: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of all four formats, by the libraries that own them."""
    import keras as framework
    import safetensors.numpy
    import torch as torch_framework
    from flax.traverse_util import flatten_dict

    made = tmp_path_factory.mktemp("checkpoints")
    torch_framework.save(encoder.state_dict(), made / "encoder.pt")
    params = [torch.from_module(layer.self_attn)[0] for layer in encoder.layers]
    tree = {
        f"layer_{i}": flax.to_module(p, kind="linen")[1]["params"] for i, p in enumerate(params)
    }
    flat = {key: np.asarray(x) for key, x in flatten_dict(tree, sep="/").items()}
    safetensors.numpy.save_file(flat, made / "flax.safetensors")
    np.savez(made / "arrays.npz", **flat)  # type: ignore[arg-type]
    with layers.foreign():
        model = keras_model()
    for layer, p in zip(attention(model), params, strict=True):
        exported = keras.export_params(p)
        layer.set_weights([exported["/".join(w.path.split("/")[-2:])] for w in layer.weights])
    model.save_weights(made / "model.weights.h5")
    framework.backend.clear_session()
    return made


def keras_model() -> Any:
    """A model of two attention layers."""
    import keras as framework

    inputs = x = framework.Input((7, D))
    for i in range(LAYERS):
        x = framework.layers.MultiHeadAttention(N, D // N, name=f"block_{i}")(x, x)
    return framework.Model(inputs, x)


def attention(model: Any) -> list[Any]:
    """Its attention layers in order."""
    import keras as framework

    return [x for x in model.layers if isinstance(x, framework.layers.MultiHeadAttention)]


FILES = {
    "encoder.pt": ("torch", "torch"),
    "flax.safetensors": ("safetensors", "flax"),
    "arrays.npz": ("npz", "flax"),
    "model.weights.h5": ("keras_h5", "keras-file"),
}


@pytest.mark.parametrize("name", FILES)
def test_inspect(folder: Path, name: str) -> None:
    result = cli("inspect", folder / name, "--num-heads", N, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    kind, layout = FILES[name]
    assert found["format"] == kind
    assert [block["layout"] for block in found["blocks"]] == [layout] * LAYERS
    assert [block["num_heads"] for block in found["blocks"]] == [N] * LAYERS
    printed = cli("inspect", folder / name, "--num-heads", N)
    assert printed.exit_code == 0
    assert f"{LAYERS} attention blocks" in printed.stdout


def test_inspect_does_not_guess_heads(folder: Path) -> None:
    found = json.loads(cli("inspect", folder / "encoder.pt", "--json").stdout)
    assert [block["num_heads"] for block in found["blocks"]] == [None] * LAYERS
    assert "?" in cli("inspect", folder / "encoder.pt").stdout


def test_keras_layers_keep_their_names(folder: Path) -> None:
    found = json.loads(cli("inspect", folder / "model.weights.h5", "--json").stdout)
    assert [block["name"] for block in found["blocks"]] == ["block_0", "block_1"]


def test_a_command_is_one_module_of_its_name() -> None:
    modules = {name: module.__name__ for name, module in COMMANDS.items()}
    assert modules == {name: f"jaxmha.cli.{name}" for name in COMMANDS}
    assert [command.name for command in app.registered_commands] == list(COMMANDS)


def test_help_names_every_format() -> None:
    formats = {format.suffixes[0] for format in checkpoint.FORMATS}
    assert all(suffix in cli("--help").stdout for suffix in formats)
    written = " ".join(cli("convert", "--help").stdout.replace("│", " ").split())
    read_only = {".keras", ".gguf"}
    assert all(suffix in written for suffix in formats - read_only)
    assert not any(suffix in written for suffix in read_only)


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help(command: list[str]) -> None:
    result = cli(*command, "--help")
    assert result.exit_code == 0
    assert ("Examples" if command else "Exit codes") in result.stdout


def test_help_shows_no_value_for_flags_and_whole_choices() -> None:
    text = cli("convert", "--help").stdout
    assert "<bool>" not in text + cli("--help").stdout
    assert "TARGET" in text
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        assert re.search(rf"(^|[ │<]){dtype}($|[ │>])", text, re.MULTILINE), dtype


def test_a_terminal_gets_lines_between_words_and_a_file_whole_ones() -> None:
    path, prose = "/".join(["folder"] * 20), "one word after another " * 9
    for terminal in (True, False):
        console = Console(file=io.StringIO(), width=80, force_terminal=terminal, no_color=True)
        print_line(f"{prose}{path} {prose}", console)
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert any(path in line for line in lines)
        assert (len(lines) > 1) == terminal
        assert not terminal or all(len(line.rstrip()) <= 80 or path in line for line in lines)


def test_layouts_are_listed() -> None:
    listed = json.loads(cli("inspect", "--layouts", "--json").stdout)
    assert {"torch", "torch-separate", "keras", "keras-file", "flax", "bert"} <= listed.keys()
    assert listed["torch"]["in_proj_weight"] == {
        "axes": "(qkv N H) Dq",
        "leaves": ["query.kernel", "key.kernel", "value.kernel"],
    }


def test_torch_to_flax_to_keras_to_torch(folder: Path, tmp_path: Path, encoder: Any) -> None:
    import torch as framework

    source = folder / "encoder.pt"
    steps = [
        ("flax.safetensors", "flax"),
        ("model.weights.h5", "keras"),
        ("back.pt", "torch"),
    ]
    previous = source
    for name, layout in steps:
        arguments: list[Any] = ["--num-heads", N] if previous == source else []
        arguments += ["--check", "weights"]  # what runs is compared below
        made = cli("convert", previous, tmp_path / name, "--to", layout, *arguments)
        assert made.exit_code == 0, made.output
        done = cli("verify", previous, tmp_path / name, "--num-heads", N, "--json")
        found = json.loads(done.stdout)
        # The order of layers of one shape in this file is a guess.
        guessed = "model.weights.h5" in (name, previous.name)
        assert (done.exit_code, bool(found["unproven"])) == (int(guessed), guessed), done.output
        assert len(found["blocks"]) == LAYERS
        previous = tmp_path / name

    # Stock torch reads at the end what it wrote at the start.
    state = framework.load(tmp_path / "back.pt", weights_only=True)
    original = encoder.state_dict()
    ours = [
        [t for k, t in s.items() if "in_proj" in k or "out_proj" in k] for s in (state, original)
    ]
    assert len(ours[0]) == len(ours[1]) == 4 * LAYERS
    for a, b in zip(sorted(ours[0], key=key_of), sorted(ours[1], key=key_of), strict=True):
        assert framework.equal(a, b)

    # Other layers are carried over.
    norms = [t for k, t in state.items() if k.endswith("norm1.weight") or "norm1/weight" in k]
    assert len(norms) == LAYERS


def key_of(tensor: Any) -> tuple[Any, ...]:
    """An order of tensors that does not depend on names."""
    return (tuple(tensor.shape), float(tensor.flatten()[0]))


def test_stock_keras_loads_the_file(folder: Path, tmp_path: Path, encoder: Any) -> None:
    only = tmp_path / "attention.pt"
    with checkpoint.open(folder / "encoder.pt") as file:
        checkpoint.write(only, {k: file[k] for k in file if "self_attn" in k})
    target = tmp_path / "model.weights.h5"
    arguments = ("--to", "keras", "--num-heads", N, "--check", "weights")
    assert cli("convert", only, target, *arguments).exit_code == 0
    with layers.foreign():
        model = keras_model()
    model.load_weights(target)
    for layer, block in zip(attention(model), encoder.layers, strict=True):
        layers.assert_identical(keras.from_module(layer)[0], torch.from_module(block.self_attn)[0])


def test_verify_sees_one_bit(folder: Path, tmp_path: Path) -> None:
    with checkpoint.open(folder / "flax.safetensors") as file:
        arrays = {name: file[name] for name in file}
    raw = arrays["layer_1/key/bias"].view(np.uint32)
    raw[1, 2] ^= 1
    checkpoint.write(tmp_path / "bit.safetensors", arrays)
    result = cli("verify", folder / "flax.safetensors", tmp_path / "bit.safetensors")
    assert result.exit_code == 1, result.output
    assert "key.bias[1, 2]" in result.stdout
    found = json.loads(
        cli("verify", folder / "flax.safetensors", tmp_path / "bit.safetensors", "--json").stdout
    )
    assert [block["same"] for block in found["blocks"]] == [True, False]


def test_cast_says_what_it_cost(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "half.safetensors"
    result = cli(
        "convert", folder / "flax.safetensors", target, "--to", "flax", "--dtype", "bfloat16"
    )
    assert result.exit_code == 0, result.output
    assert "largest relative error" in " ".join(result.stdout.split())
    assert cli("verify", folder / "flax.safetensors", target).exit_code == 1


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    """A folder with a copy of the torch file, and what is wrong in it."""
    (tmp_path / "encoder.pt").write_bytes((folder / "encoder.pt").read_bytes())
    return tmp_path


def test_missing_file(place: Path) -> None:
    for command in (["inspect"], ["convert"], ["verify"]):
        more: dict[str, list[Any]] = {
            "convert": [place / "x.npz", "--to", "flax"],
            "verify": [place / "encoder.pt"],
        }
        message = fails(place, *command, place / "no.pt", *more.get(command[0], []))
        assert "no.pt" in message


def test_directory(place: Path) -> None:
    (place / "folder.pt").mkdir()
    assert "folder.pt" in fails(place, "inspect", place / "folder.pt")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
def test_truncated_file(place: Path, share: float) -> None:
    raw = (place / "encoder.pt").read_bytes()
    (place / "short.pt").write_bytes(raw[: int(len(raw) * share)])
    message = fails(
        place, "convert", place / "short.pt", place / "x.npz", "--to", "flax", "--num-heads", N
    )
    assert "short.pt" in message


def test_unknown_suffixes(place: Path) -> None:
    message = fails(
        place, "convert", place / "encoder.pt", place / "x.onnx", "--to", "flax", "--num-heads", N
    )
    assert ".safetensors" in message
    (place / "text.md").write_text("nothing")
    assert "text.md" in fails(place, "inspect", place / "text.md")


def test_wrong_and_missing_head_count(place: Path) -> None:
    arguments = ("convert", place / "encoder.pt", place / "x.npz", "--to", "flax")
    wrong = fails(place, *arguments, "--num-heads", 4)
    assert "in_proj_weight" in wrong
    assert "N=4" in wrong
    assert "--num-heads" in fails(place, *arguments) or "num_heads" in fails(place, *arguments)
    assert fails(place, *arguments, "--num-heads", 0)
    assert fails(place, *arguments, "--num-heads", "three")


def test_unknown_layout_and_dtype(place: Path) -> None:
    arguments = ("convert", place / "encoder.pt", place / "x.npz", "--num-heads", N)
    assert "haddock" in fails(place, *arguments, "--to", "haddock")
    assert "int8" in fails(place, *arguments, "--to", "flax", "--dtype", "int8")


def test_existing_destination(place: Path) -> None:
    (place / "x.npz").write_bytes(b"mine")
    arguments = ("convert", place / "encoder.pt", place / "x.npz", "--to", "flax", "--num-heads", N)
    assert "x.npz" in fails(place, *arguments)
    assert (place / "x.npz").read_bytes() == b"mine"
    assert cli(*arguments, "--force").exit_code == 0
    assert (place / "x.npz").read_bytes() != b"mine"


def test_destination_is_the_source(place: Path) -> None:
    source = place / "encoder.pt"
    arguments = ("convert", source, source, "--to", "torch-separate", "--num-heads", N)
    assert "encoder.pt" in fails(place, *arguments)
    assert "encoder.pt" in fails(place, *arguments, "--force")
    (place / "link.pt").symlink_to(source)
    fails(place, "convert", source, place / "link.pt", *arguments[3:], "--force")


def test_overflow(place: Path) -> None:
    with checkpoint.open(place / "encoder.pt") as file:
        arrays = {name: file[name] for name in file}
    arrays["layers.1.self_attn.out_proj.bias"][2] = 1e6
    checkpoint.write(place / "large.npz", arrays)
    message = fails(
        place,
        "convert",
        place / "large.npz",
        place / "x.npz",
        "--to",
        "flax",
        "--num-heads",
        N,
        "--dtype",
        "float16",
    )
    assert "1e+06" in message
    assert "bfloat16" in message


def test_no_attention_block(place: Path) -> None:
    checkpoint.write(place / "none.npz", {"weight": np.ones((3, 5), np.float32)})
    message = fails(place, "convert", place / "none.npz", place / "x.npz", "--to", "flax")
    assert "no attention block" in message
    assert "no attention block" in fails(place, "verify", place / "none.npz", place / "none.npz")
    listed = cli("inspect", place / "none.npz")
    assert listed.exit_code == 0
    assert "0 attention blocks" in listed.stdout


def test_block_that_the_target_cannot_hold(place: Path) -> None:
    config = next(c for c in layers.configs("nnx") if c.name == "num_kv_heads")
    params = flax.from_module(layers.build(config))[0]
    checkpoint.write(place / "grouped.npz", flax.export_params(params, prefix="decoder"))
    message = fails(place, "convert", place / "grouped.npz", place / "x.pt", "--to", "torch")
    assert "block decoder" in message
    assert f"K={config.K}" in message


@pytest.mark.parametrize(
    ("key", "value", "usual"),
    [
        ("attention_multiplier", 0.015, None),
        ("attn_logit_softcapping", 50.0, None),
        ("scale_attn_by_inverse_layer_idx", True, False),
        ("scale_attn_weights", False, True),
    ],
)
def test_behaviour_that_only_the_config_holds_is_refused(
    place: Path, key: str, value: object, usual: object
) -> None:
    """Converted weights alone would be another function."""
    config, source = place / "config.json", place / "encoder.pt"
    for content in ({"nhead": N, key: value}, {"text": [{"nhead": N, key: value}]}):
        config.write_text(json.dumps(content))
        assert f"{key}={value!r}" in fails(
            place, "convert", source, place / "x.npz", "--to", "flax"
        )
        assert f"{key}={value!r}" in fails(place, "verify", source, source)
    config.write_text(json.dumps({"nhead": N, key: usual}))
    arguments = ("--to", "flax", "--check", "none")
    assert cli("convert", source, place / "x.npz", *arguments).exit_code == 0


def test_transposed_keys_of_grouped_queries_are_refused(place: Path) -> None:
    """Any width would do for a layer of several inputs: Llama's has one."""
    rng = np.random.default_rng(0)
    shapes = {"q": (32, 32), "k": (32, 16), "v": (32, 16), "o": (32, 32)}
    state = {
        f"model.layers.0.self_attn.{name}_proj.weight": rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    checkpoint.write(place / "llama.npz", state)
    arguments = ("llama.npz", "x.npz")
    message = fails(
        place, "convert", *(place / name for name in arguments), "--to", "flax", "--num-heads", "4"
    )
    assert "(32, 16)" in message


def test_config_of_two_head_counts_decides_none(place: Path) -> None:
    content = {"encoder_attention_heads": N, "decoder_attention_heads": N + 1}
    (place / "config.json").write_text(json.dumps(content))
    message = fails(place, "convert", place / "encoder.pt", place / "x.npz", "--to", "flax")
    assert "several head counts" in message


def test_config_names_the_heads_or_is_ambiguous(place: Path) -> None:
    arguments = ("convert", place / "encoder.pt", place / "x.npz", "--to", "flax")
    (place / "config.json").write_text(json.dumps({"nhead": N, "vision": {"num_heads": 5}}))
    assert "num" in fails(place, *arguments)
    (place / "config.json").write_text("{")
    fails(place, *arguments)
    (place / "config.json").write_text(json.dumps({"model": {"nhead": N}}))
    assert cli(*arguments).exit_code == 0
    found = json.loads(cli("inspect", place / "encoder.pt", "--json").stdout)
    assert found["blocks"][0]["num_heads_from"] == "config.json: model: nhead"


def test_hostile_header(place: Path) -> None:
    (place / "bad.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert "bad.safetensors" in fails(place, "inspect", place / "bad.safetensors")


def process(*arguments: Any) -> subprocess.CompletedProcess[str]:
    """The command as a user starts it."""
    return subprocess.run(
        [sys.executable, "-m", "jaxmha.converters", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"NO_COLOR": "1"},
    )


@pytest.mark.slow
def test_real_process(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "keras.weights.h5"
    made = process("convert", folder / "flax.safetensors", target, "--to", "keras", "--json")
    assert (made.returncode, made.stderr) == (0, "")
    assert len(json.loads(made.stdout)["blocks"]) == LAYERS
    bad = process("convert", folder / "encoder.pt", tmp_path / "x.npz", "--to", "flax")
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert bad.stderr.startswith("error:")
    assert "Traceback" not in bad.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["keras.weights.h5"]
