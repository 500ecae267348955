"""Whole files: order and names of blocks, head counts, stacked layers, what a format cannot hold."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxmha import checkpoint
from jaxmha.converters import keras
from jaxmha.converters.discovery import attention_blocks, head_count
from jaxmha.converters.layout import by_hand, registry, transform
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import comparands, comparison
from jaxmha.params import from_leaves, leaves
from tests.converters import layers
from tests.converters.command_line import cli, succeeds
from tests.converters.test_every_layout import N, exported, model_file, params_of

State = dict[str, NDArray]
BERT, FLAX = attention_blocks.named("bert"), attention_blocks.named("flax")


def refused(folder: Path, message: str, source: str, destination: str, **options: Any) -> None:
    """Asserts the message, in Python and at the command line, and that nothing is written."""
    before = sorted(folder.iterdir())
    with pytest.raises(ValueError, match=message):
        pipeline.convert(folder / source, folder / destination, **options)
    flags = [f"--{key.strip('_')}={value}" for key, value in options.items()]
    flags = [flag.replace("num_heads", "num-heads") for flag in flags]
    done = cli("convert", folder / source, folder / destination, *flags)
    assert done.exit_code == 2
    assert done.stderr.startswith("error:")
    assert done.stderr.count("\n") == 1
    assert sorted(folder.iterdir()) == before


@pytest.mark.slow
def test_twelve_layers_keep_their_order_in_keras_files(tmp_path: Path) -> None:
    names = [f"encoder.layer.{i}.attention" for i in range(12)]
    state: State = {}
    for i, name in enumerate(names):
        state |= exported("bert", name, seed=i)
    checkpoint.write(tmp_path / "a.safetensors", state)
    target = tmp_path / "a.weights.h5"
    done = pipeline.convert(tmp_path / "a.safetensors", target, to="keras", num_heads=N)
    assert [move[0] for move in done.blocks] == names
    with checkpoint.open(target) as file:
        for i in range(12):
            group = f"layers/multi_head_attention{f'_{i}' * (i > 0)}"
            assert file.names[group] == names[i]
            params, _ = keras.import_params(file, layout="keras-file", prefix=group)
            layers.assert_identical(params, params_of(BERT, seed=i))
    report = comparison.compare(tmp_path / "a.safetensors", target, num_heads=N)
    assert [pair.a for pair in report.blocks] == names
    assert not report.different
    assert not report.not_compared
    assert len(report.unproven) == 1  # the order of layers that no model of Keras saved


def two_widths(folder: Path) -> Path:
    """A file of two blocks with 2 and 3 heads."""
    state: State = {}
    for prefix, count in (("a", 2), ("b.c", 3)):
        params = params_of(FLAX)
        shaped = {
            leaf: np.asarray(array)[..., :count, :, :] if leaf == "out.kernel" else array
            for leaf, array in leaves(params).items()
        }
        rng = np.random.default_rng(count)
        sizes = {"N": count, "K": count, "H": 12 // count, "Do": 12} | dict.fromkeys(
            ("Dq", "Dk", "Dv"), 12
        )
        from jaxmha.params import CANONICAL

        arrays: dict[str, Any] = {
            leaf: rng.normal(size=[sizes[x.replace("h", "H")] for x in CANONICAL[leaf].split()])
            for leaf in shaped
            if "norm" not in leaf
        }
        state |= transform.export_params(FLAX, from_leaves(arrays), prefix=prefix.replace(".", "/"))
    path = folder / "mixed.safetensors"
    checkpoint.write(path, state)
    return path


def test_head_counts_that_differ_are_kept_per_block(tmp_path: Path) -> None:
    source, target = two_widths(tmp_path), tmp_path / "torch.safetensors"
    pipeline.convert(source, target, to="torch")
    with checkpoint.open(target) as file:
        assert file.metadata == {f"{head_count.METADATA}.a": "2", f"{head_count.METADATA}.b.c": "3"}
    infos = pipeline.inspect(target).blocks
    assert [(i.num_heads, i.num_heads_from) for i in infos] == [(2, "metadata"), (3, "metadata")]
    assert comparison.compare(source, target).same
    # and from there on, under the names that the blocks have by then
    pipeline.convert(target, tmp_path / "linear.safetensors", to="linear")
    assert comparison.compare(source, tmp_path / "linear.safetensors").same
    pipeline.convert(tmp_path / "linear.safetensors", tmp_path / "flax.safetensors", to="flax")
    with checkpoint.open(tmp_path / "flax.safetensors") as file:
        assert file.metadata == {}
    assert comparison.compare(source, tmp_path / "flax.safetensors").same


def test_one_head_count_serves_the_file_and_the_verifier(tmp_path: Path) -> None:
    state = exported("flax", "a") | exported("flax", "b", seed=1)
    state = {key: array for key, array in state.items() if "_ln" not in key}
    checkpoint.write(tmp_path / "a.safetensors", state)
    bert = exported("bert", "a") | exported("bert", "b", seed=1)
    checkpoint.write(tmp_path / "bert.safetensors", bert, metadata={"mine": "kept"})
    target = tmp_path / "linear.safetensors"
    pipeline.convert(tmp_path / "bert.safetensors", target, to="linear", num_heads=N)
    with checkpoint.open(target) as file:
        assert file.metadata == {"mine": "kept", head_count.METADATA: str(N)}
    report = comparison.compare(target, target)  # neither side is told
    assert [pair.num_heads for pair in report.blocks] == [N, N]
    assert report.same


def test_blocks_that_are_carried_over_keep_their_head_count(tmp_path: Path) -> None:
    state = exported("bert", "a") | exported("gpt2", "h.0.attn")
    metadata = {head_count.METADATA: str(N)}
    checkpoint.write(tmp_path / "a.safetensors", state, metadata=metadata)
    target = tmp_path / "b.safetensors"
    pipeline.convert(tmp_path / "a.safetensors", target, to="linear", from_="bert")
    found = {info.layout: info.num_heads for info in pipeline.inspect(target).blocks}
    assert found == {"linear": N, "gpt2": N}
    with checkpoint.open(target) as file:
        assert file.metadata == metadata | {f"{head_count.METADATA}.a": str(N)}


def test_damaged_and_unknown_are_refused_or_listed(tmp_path: Path) -> None:
    whole = exported("gpt2", "h.0.attn") | exported("gpt2", "h.1.attn", seed=1)
    broken = {key: array for key, array in whole.items() if key != "h.1.attn.c_proj.bias"}
    checkpoint.write(tmp_path / "broken.npz", broken)
    message = r"h.1.attn looks like layout gpt2 but lacks c_proj.bias"
    refused(tmp_path, message, "broken.npz", "x.npz", to="linear", num_heads=N)
    with pytest.raises(ValueError, match=message):
        comparison.compare(tmp_path / "broken.npz", tmp_path / "broken.npz", num_heads=N)
    assert pipeline.inspect(tmp_path / "broken.npz").damaged == (message,)
    shown = cli("inspect", tmp_path / "broken.npz")
    assert f"damaged: {message}" in shown.stdout
    checkpoint.write(tmp_path / "whole.npz", whole)
    assert pipeline.inspect(tmp_path / "whole.npz").damaged == ()
    checkpoint.write(tmp_path / "extra.npz", whole | {"h.0.attn.gate": np.ones(3, np.float32)})
    message = r"unknown key 'h.0.attn.gate' in the block: layout gpt2"
    refused(tmp_path, message, "extra.npz", "x.npz", to="linear", num_heads=N)


def stacked(folder: Path) -> tuple[Path, list[Path]]:
    """A file of three stacked layers, and three of one layer each."""
    state = exported("bert", "layers.attention", lead=(3,))
    checkpoint.write(folder / "stack.safetensors", state)
    singles = []
    for i in range(3):
        one = {key: array[i].copy() for key, array in state.items()}
        singles.append(folder / f"single{i}.safetensors")
        checkpoint.write(singles[-1], one)
    return folder / "stack.safetensors", singles


def test_stacked_layers_are_compared_one_by_one(tmp_path: Path) -> None:
    source, singles = stacked(tmp_path)
    target = tmp_path / "flax.safetensors"
    pipeline.convert(source, target, to="flax", num_heads=N)
    report = comparison.compare(source, target)
    assert [pair.a for pair in report.blocks] == [f"layers.attention[{i}]" for i in range(3)]
    assert report.same
    with checkpoint.open(target) as file:
        arrays = {name: file[name] for name in file}
    arrays["layers/attention/query/kernel"][1, 2, 3, 0] += 1
    checkpoint.write(target, arrays, force=True)
    report = comparison.compare(source, target)
    assert [pair.same for pair in report.blocks] == [True, False, True]
    assert report.blocks[1].differences[0].index == (2, 3, 0)
    layer = [comparands.read(path, N).blocks[0] for path in singles]
    for one, side in zip(layer, comparands.read(source, N).blocks, strict=True):
        layers.assert_identical(one.params, side.params)


def test_stacked_parameters_have_two_axes_of_layers_too() -> None:
    params = params_of(FLAX, (2, 3))
    semantics = FLAX.semantics
    report = comparison.compare((params, semantics), (params, semantics))
    names = [f"[{i}, {j}]" for i in range(2) for j in range(3)]
    assert [pair.a for pair in report.blocks] == names
    assert report.same


def test_keras_files_hold_no_stacked_layers(tmp_path: Path) -> None:
    stacked(tmp_path)
    message = r"block layers.attention: its arrays are stacked layers \(leading axes \(3,\)\), and Keras has none"
    refused(tmp_path, message, "stack.safetensors", "x.weights.h5", to="keras", num_heads=N)


IN_FILES = {*keras.IN_FILE, *by_hand.IN_FILE}
NO_FILES = [x.name for x in registry.LAYOUTS if x.name.removesuffix("-file") not in IN_FILES]


@pytest.mark.everyday(to=["torch", "flax", "llama"])
@pytest.mark.parametrize("to", NO_FILES)
def test_keras_files_hold_keras_layouts_only(to: str, tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "a.npz", exported("bert", "a"))
    message = (
        rf"no Keras model could load layout {to} from a .weights.h5 file: name keras or keras-gqa"
    )
    refused(tmp_path, message, "a.npz", "x.weights.h5", to=to, num_heads=N)


@pytest.mark.parametrize("to", ["keras", "keras-gqa"])
@pytest.mark.parametrize("suffix", ["npz", "safetensors", "pt"])
def test_other_files_have_keras_variables(to: str, suffix: str, tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "a.npz", exported("bert", "a"))
    message = rf"layout {to}-file is how Keras names .* inside a .weights.h5 file: name {to} for"
    refused(tmp_path, message, "a.npz", f"x.{suffix}", to=f"{to}-file", num_heads=N)


def test_names_that_steer_a_terminal_are_escaped(tmp_path: Path) -> None:
    evil = "\u202e\x9b"
    state = exported("gpt2", f"{evil}.attn")
    checkpoint.write(tmp_path / "a.safetensors", state)
    path = tmp_path / "a.safetensors"
    outputs = [
        cli("inspect", path).output,
        cli("convert", path, tmp_path / "b.npz", "--to", "linear").output,
        cli("convert", path, tmp_path / "c.npz", "--to", "torch", "--num-heads", 5).output,
        cli("convert", path, tmp_path / "d.npz", "--to", "linear", "--num-heads", N).output,
        cli("verify", path, path, "--num-heads", N).output,
    ]
    for output in outputs:
        assert "\u202e" not in output
        assert "\x9b" not in output
        assert "\\u202e" in output
    with pytest.raises(ValueError, match=r"block \\u202e\\x9b.attn: ") as caught:
        comparison.compare(path, path)
    assert "\u202e" not in str(caught.value)


def test_json_has_no_nan_and_no_infinity(tmp_path: Path) -> None:
    state = exported("gpt2", "h.0.attn")
    state["h.0.attn.c_attn.weight"][2, 3] = np.nan
    state["h.0.attn.c_proj.bias"][1] = np.inf
    checkpoint.write(tmp_path / "a.npz", state)
    other = {key: array.copy() for key, array in state.items()}
    other["h.0.attn.c_proj.bias"][1] = -np.inf
    checkpoint.write(tmp_path / "b.npz", other)
    paths = [str(tmp_path / name) for name in ("a.npz", "b.npz")]
    done = cli("verify", *paths, "--json", "--num-heads", N)
    assert done.exit_code == 1, done.output

    def never(constant: str) -> None:
        raise AssertionError(constant)

    (found,) = json.loads(done.stdout, parse_constant=never)["blocks"]
    assert found["errors"]["no mask"] == [None, None]
    assert found["differences"][0]["a"] is None


def test_nan_is_carried_over_bit_by_bit(tmp_path: Path) -> None:
    """Nothing differs, and no output says more: a note, and not an error."""
    state = exported("gpt2", "h.0.attn")
    state["h.0.attn.c_attn.weight"][2, 3] = np.nan
    checkpoint.write(tmp_path / "a.npz", state)
    command = ["convert", "a.npz", "b.npz", "--to", "flax", "--num-heads", str(N), "--json"]
    paths = [str(tmp_path / word) if word.endswith("npz") else word for word in command]
    done = succeeds(*paths)
    note = "h.0.attn: query.kernel holds NaN or infinity: no outputs were compared"
    unknown, found = json.loads(done.stdout)["report"]["notes"]
    assert found == note
    assert "there is no config.json" in unknown


def test_inspect_says_why(tmp_path: Path) -> None:
    state = exported("gpt2", "h.0.attn") | exported("gpt2", "h.1.attn") | exported("bert", "x")
    model_file(tmp_path / "a.npz", state, {"n_head": N})
    found = json.loads(cli("inspect", tmp_path / "a.npz", "--json").stdout)["blocks"]
    first, last = found[0], found[2]
    assert (first["family"], first["pattern"]) == ("GPT-2", "h.{i}.attn")
    assert first["why"] == "4 keys and the prefix of GPT-2: h.{i}.attn"
    assert list(first["shapes"]) == ["c_attn.weight", "c_attn.bias", "c_proj.weight", "c_proj.bias"]
    assert first["num_heads_from"] == "config.json: n_head"
    assert (last["family"], last["why"], last["also_fits"]) == (None, "8 keys alone", [])
    printed = cli("inspect", tmp_path / "a.npz").stdout
    assert "gpt2, 2 times, for its 4 keys and the prefix of GPT-2: h.{i}.attn" in printed
    assert "bert, 1 times, for its 8 keys alone" in printed


def test_what_is_no_tensor_is_reported_or_refused(tmp_path: Path) -> None:
    layer = torch.nn.MultiheadAttention(6, 2)
    source = tmp_path / "a.pt"
    torch.save({"model": layer.state_dict(), "epoch": 3, "lr": [0.1, None]}, source)
    done = pipeline.convert(source, tmp_path / "b.npz", to="flax", num_heads=2)
    assert "not carried over, because they are not tensors: epoch, lr.0, lr.1" in done.notes
    with pytest.raises(ValueError, match=r"a.pt: not tensors: epoch, lr.0, lr.1; --others pass"):
        pipeline.convert(source, tmp_path / "c.npz", to="flax", num_heads=2, others="refuse")
    assert not (tmp_path / "c.npz").exists()


def test_metadata_without_a_place_is_reported(tmp_path: Path) -> None:
    source = tmp_path / "a.safetensors"
    state = {k: v.numpy() for k, v in torch.nn.MultiheadAttention(6, 2).state_dict().items()}
    checkpoint.write(source, state, metadata={"license": "MIT", "format": "pt"})
    done = pipeline.convert(source, tmp_path / "b.weights.h5", to="keras", num_heads=2)
    note = "metadata not carried over, for which the format has no place: license"
    assert note in done.notes
    assert not pipeline.convert(source, tmp_path / "b.safetensors", to="flax", num_heads=2).notes
