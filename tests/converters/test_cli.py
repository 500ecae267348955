"""The command line on files that the frameworks' own writers made."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch as torch_framework

from jaxmha import checkpoint
from jaxmha.converters import flax, keras, torch
from jaxmha.converters.verify import comparands, comparison
from tests.converters import layers
from tests.converters.command_line import LAYERS, D, N, cli, printed, succeeds, torch_encoder
from tests.converters.test_every_layout import exported
from tests.promotion import foreign

# Keras' variables have an __array__ of before NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of all four formats, by the libraries that own them."""
    import keras as framework
    from flax.traverse_util import flatten_dict

    made = tmp_path_factory.mktemp("checkpoints")
    torch_framework.save(torch_encoder().state_dict(), made / "encoder.pt")
    params = [torch.from_module(layer.self_attn)[0] for layer in torch_encoder().layers]
    tree = {
        f"layer_{i}": flax.to_module(p, kind="linen")[1]["params"] for i, p in enumerate(params)
    }
    flat = {key: np.asarray(x) for key, x in flatten_dict(tree, sep="/").items()}
    safetensors.numpy.save_file(flat, made / "flax.safetensors")
    np.savez(made / "arrays.npz", **flat)  # type: ignore[arg-type]
    with foreign():
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
    result = succeeds("inspect", folder / name, "--num-heads", N, "--json")
    found = json.loads(result.stdout)
    kind, layout = FILES[name]
    assert found["format"] == kind
    assert [block["layout"] for block in found["blocks"]] == [layout] * LAYERS
    assert [block["num_heads"] for block in found["blocks"]] == [N] * LAYERS
    printed = succeeds("inspect", folder / name, "--num-heads", N)
    assert f"{LAYERS} attention blocks" in printed.stdout


def test_inspect_does_not_guess_heads(folder: Path) -> None:
    found = json.loads(cli("inspect", folder / "encoder.pt", "--json").stdout)
    assert [block["num_heads"] for block in found["blocks"]] == [None] * LAYERS
    assert "?" in cli("inspect", folder / "encoder.pt").stdout


def test_keras_layers_keep_their_names(folder: Path) -> None:
    found = json.loads(cli("inspect", folder / "model.weights.h5", "--json").stdout)
    assert [block["name"] for block in found["blocks"]] == ["block_0", "block_1"]


def test_unused_files_of_a_folder_are_noted(tmp_path: Path) -> None:
    state = exported("flax", "a")
    for name in ("model.safetensors.index.json", "other.safetensors", "model.npz", "optimizer.pt"):
        checkpoint.write(tmp_path / name, state)
    note = (
        "of its folder, model.safetensors.index.json alone was read, and not used: 'model.npz', "
        "'other.safetensors'"
    )
    assert json.loads(cli("inspect", tmp_path, "--json").stdout)["notes"][-1] == note
    assert note in comparands.read(tmp_path).notes
    done = cli("convert", tmp_path, tmp_path / "out.npz", "--to", "flax", "--check", "none")
    assert note in printed(done)
    alone = json.loads(cli("inspect", tmp_path / "other.safetensors", "--json").stdout)
    assert not [one for one in alone["notes"] if "not used" in one]


def test_layouts_are_listed() -> None:
    listed = json.loads(cli("inspect", "--layouts", "--json").stdout)
    assert {"torch", "torch-separate", "keras", "keras-file", "flax", "bert"} <= listed.keys()
    assert listed["torch"]["in_proj_weight"] == {
        "axes": "(qkv N H) Dq",
        "leaves": ["query.kernel", "key.kernel", "value.kernel"],
    }


def test_torch_to_flax_to_keras_to_torch(folder: Path, tmp_path: Path) -> None:
    import torch as framework

    source = folder / "encoder.pt"
    steps = [("flax.safetensors", "flax"), ("model.weights.h5", "keras"), ("back.pt", "torch")]
    previous = source
    for name, layout in steps:
        arguments: list[Any] = ["--num-heads", N] if previous == source else []
        arguments += ["--check", "weights"]  # what runs is compared below
        succeeds("convert", previous, tmp_path / name, "--to", layout, *arguments)
        done = cli("verify", previous, tmp_path / name, "--num-heads", N, "--json")
        found = json.loads(done.stdout)
        # The order of layers of one shape in this file is a guess.
        guessed = "model.weights.h5" in (name, previous.name)
        assert (done.exit_code, bool(found["unproven"])) == (int(guessed), guessed), done.output
        assert len(found["blocks"]) == LAYERS
        previous = tmp_path / name

    # Stock torch reads at the end what it wrote at the start.
    state = framework.load(tmp_path / "back.pt", weights_only=True)
    original = torch_encoder().state_dict()
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


def test_stock_keras_loads_the_file(folder: Path, tmp_path: Path) -> None:
    only = tmp_path / "attention.pt"
    with checkpoint.open(folder / "encoder.pt") as file:
        checkpoint.write(only, {k: file[k] for k in file if "self_attn" in k})
    target = tmp_path / "model.weights.h5"
    arguments = ("--to", "keras", "--num-heads", N, "--check", "weights")
    assert cli("convert", only, target, *arguments).exit_code == 0
    with foreign():
        model = keras_model()
    model.load_weights(target)
    for layer, block in zip(attention(model), torch_encoder().layers, strict=True):
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
    result = succeeds(
        "convert", folder / "flax.safetensors", target, "--to", "flax", "--dtype", "bfloat16"
    )
    assert "largest relative error" in " ".join(result.stdout.split())
    assert cli("verify", folder / "flax.safetensors", target).exit_code == 1


def test_a_checkpoint_is_verified_against_the_one_it_was_rounded_to(
    folder: Path, tmp_path: Path
) -> None:
    """Attention and other layers; a wrong element, or another dtype, still differs."""
    source, target = folder / "encoder.pt", tmp_path / "half.safetensors"
    heads = ("--num-heads", N)
    succeeds("convert", source, target, "--to", "flax", *heads, "--dtype", "bfloat16")
    strict = cli("verify", source, target, *heads)
    assert strict.exit_code == 1
    command = f"next: jaxmha verify {source} {target} --num-heads {N} --dtype bfloat16"
    assert command in "".join(strict.stdout.split("\n")).replace("  ", " ")
    page = tmp_path / "report.html"
    rounded = succeeds("verify", source, target, *heads, "--dtype", "bfloat16", "--html", page)
    assert rounded.stdout.strip().endswith("the first rounded to bfloat16: the same")
    assert "next:" not in rounded.stdout
    assert "the same, bit by bit, once rounded to bfloat16" in page.read_text()
    assert "--dtype bfloat16" in page.read_text()
    found = json.loads(
        cli("verify", source, target, *heads, "--dtype", "bfloat16", "--json").stdout
    )
    assert (found["same"], found["dtype"]) == (True, "bfloat16")
    assert {*found["blocks"][0]["dtypes"]} == {"bfloat16"}
    assert cli("verify", source, target, *heads, "--dtype", "float16").exit_code == 1
    assert cli("diff", source, target, *heads).exit_code == 1
    with checkpoint.open(target) as file:
        arrays = {name: np.array(file[name]) for name in file}
    for name in ("layers/0/linear1/kernel", "layers/1/self_attn/key/bias"):
        changed = arrays | {name: arrays[name] + arrays[name].dtype.type(1)}
        checkpoint.write(tmp_path / "wrong.safetensors", changed, force=True)
        wrong = cli("verify", source, tmp_path / "wrong.safetensors", *heads, "--dtype", "bfloat16")
        assert wrong.exit_code == 1
        strict = cli("verify", source, tmp_path / "wrong.safetensors", *heads)
        assert "next:" not in strict.stdout


def test_a_live_layer_or_an_unknown_dtype_is_not_rounded() -> None:
    layer = torch_encoder().layers[0].self_attn
    with pytest.raises(ValueError, match="MultiheadAttention is a live layer: give its weights"):
        comparison.compare(layer, layer, dtype="bfloat16")
    with pytest.raises(ValueError, match="unknown dtype 'half'"):
        comparison.compare(torch.from_module(layer), layer, dtype="half")


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
