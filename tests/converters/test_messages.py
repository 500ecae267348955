"""Messages to a newcomer: missing packages, wrong objects, folders, near misses of names."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.progress import Progress

from jaxmha import __version__, checkpoint
from jaxmha.checkpoint.formats import table
from jaxmha.cli import console
from jaxmha.converters import torch as convert
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import comparands
from tests.converters.command_line import cli, message, succeeds

N, D = 3, 15


@pytest.mark.parametrize(
    ("package", "module", "call"),
    [
        ("torch", "torch", lambda found: found.from_module(1)),
        ("torch", "torch", lambda found: list(found.attention_layers(1))),
        ("torch", "layout.arrays", lambda found: found.to_torch(np.ones(3))),
        ("keras", "keras", lambda found: found.from_module(1)),
        ("flax", "flax", lambda found: found.from_module(1)),
        ("orbax", "sharded", lambda found: found.save_sharded("x", {})),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    package: str, module: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.import_module(f"jaxmha.converters.{module}")
    for name in list(sys.modules):
        if name.partition(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf"^{package} is .*'jaxmha\[{package}\]'$"):
        call(found)


@pytest.mark.everyday(name=["jaxmha.recipes"])
@pytest.mark.parametrize(
    ("module", "name"),
    [("jaxmha.flax.nnx", "jaxmha.flax"), ("experiments.recipes", "jaxmha.recipes")],
)
def test_the_modules_for_flax_name_it(module: str, name: str) -> None:
    code = f"import sys; sys.modules['flax'] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert f"{name} needs flax, which is not installed: pip install 'jaxmha[flax]'" in done.stderr


def test_a_module_that_an_installed_package_lacks_is_named_itself() -> None:
    from jaxmha.extras import needed

    with pytest.raises(ModuleNotFoundError, match="No module named 'other'"), needed("torch"):
        raise ModuleNotFoundError("No module named 'other'", name="other")


@pytest.mark.usefixtures("no_shape_hook")
def test_a_live_module_is_no_state() -> None:
    module: Any = torch.nn.TransformerEncoderLayer(D, N, 5)
    with pytest.raises(TypeError, match=r"got TransformerEncoderLayer: .*module\.state_dict\(\)"):
        pipeline.convert_state(module, to="flax", num_heads=N)


def test_version() -> None:
    done = cli("--version")
    assert (done.exit_code, done.stdout) == (0, f"jaxmha {__version__}\n")


@pytest.mark.parametrize(
    ("given", "meant"), [("jax", "flax"), ("pytorch", "torch"), ("tf", "keras"), ("berrt", "bert")]
)
def test_a_layout_is_guessed(given: str, meant: str) -> None:
    for command in (("convert", "a", "b"), ("plan", "a")):
        done = cli(*command, "--to", given)
        assert (done.exit_code, f"did you mean {meant}?" in message(done)) == (2, True), message(
            done
        )
    with pytest.raises(ValueError, match=rf"unknown layout '{given}': did you mean {meant}\?"):
        pipeline.convert_state({}, to=given)


def encoder() -> dict[str, Any]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(D, N, 17)
    return {f"layers.0.{name}": x.detach().numpy() for name, x in layer.state_dict().items()}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as save_pretrained makes it."""
    import transformers as t

    folder = tmp_path_factory.mktemp("hf") / "bert"
    sizes = {"hidden_size": D, "num_hidden_layers": 1, "intermediate_size": 22, "vocab_size": 31}
    t.BertModel(t.BertConfig(num_attention_heads=N, **sizes)).save_pretrained(folder)
    return folder


def test_a_destination_that_exists_names_the_option(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "a.npz", encoder())
    done = cli("convert", tmp_path / "a.npz", tmp_path / "a.npz", "--to", "flax", "--num-heads", N)
    assert done.exit_code == 2
    (tmp_path / "b.npz").touch()
    done = cli("convert", tmp_path / "a.npz", tmp_path / "b.npz", "--to", "flax", "--num-heads", N)
    assert "choose another name, or replace it with --force" in message(done)
    done = succeeds(
        "plan", tmp_path / "a.npz", "--to", "flax", "--num-heads", N, "-o", tmp_path / "b"
    )
    done = cli("plan", tmp_path / "a.npz", "--to", "flax", "--num-heads", N, "-o", tmp_path / "b")
    assert "--force" in message(done)


def test_a_folder_of_hugging_face_is_an_input(bert: Path, tmp_path: Path) -> None:
    target, plan = tmp_path / "a.safetensors", tmp_path / "plan.toml"
    for arguments in (
        ("inspect", bert),
        ("plan", bert, "--to", "flax", "-o", plan),
        ("convert", bert, target, "--to", "flax"),
        ("convert", bert, tmp_path / "b.safetensors", "--plan", plan),
        ("diff", bert, bert / "model.safetensors"),
        ("verify", bert, bert / "model.safetensors"),
    ):
        succeeds(*arguments)
    info = pipeline.inspect(bert).blocks[0]
    assert (info.num_heads, info.num_heads_from) == (N, "config.json: num_attention_heads")


def test_the_config_is_that_of_the_folder(bert: Path, tmp_path: Path) -> None:
    """Not that of the folder which it is in, which is of another model."""
    shutil.copytree(bert, tmp_path / "bert")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 5, "clip_qkv": 3}))
    (block,) = comparands.read(tmp_path / "bert").blocks
    assert block.params.query.kernel.shape[-2] == N


@pytest.mark.parametrize(
    ("present", "found"),
    [
        (["model.safetensors", "pytorch_model.bin", "training_args.bin"], "model.safetensors"),
        (["pytorch_model.bin", "optimizer.pt", "rng_state.pth"], "pytorch_model.bin"),
        (["mine.npz", "notes.txt"], "mine.npz"),
        (["model.safetensors", "flax.safetensors"], "model.safetensors"),
        (["deep.orbax"], "deep.orbax"),
    ],
)
def test_which_file_of_a_folder(present: list[str], found: str, tmp_path: Path) -> None:
    for name in present:
        if table.by_suffix(Path(name)):
            checkpoint.write(tmp_path / name, {name: np.ones(3, np.float32)})
        else:
            (tmp_path / name).write_text("")
    with checkpoint.open(tmp_path) as file:
        assert list(file) == [found]


@pytest.mark.parametrize(
    ("present", "reported"),
    [
        (["b.safetensors", "a.npz"], r"several checkpoints \(a.npz, b.safetensors\); name one"),
        (["model.safetensors", "model.safetensors.index.json"], "several checkpoints"),
        (["unet/model.safetensors", "vae/model.safetensors"], r"its folders unet, vae; .*unet"),
        (["notes.txt"], "it holds only notes.txt; name one checkpoint file"),
        ([], "it holds nothing"),
    ],
)
def test_folders_without_exactly_one_checkpoint(
    present: list[str], reported: str, tmp_path: Path
) -> None:
    for name in present:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    with pytest.raises(checkpoint.CheckpointError, match=reported):
        checkpoint.open(tmp_path)


@pytest.mark.parametrize("batch_first", [False, True])
def test_how_a_torch_layer_is_called_is_reported(batch_first: bool) -> None:
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(16, 4, batch_first=batch_first).eval()
    found = convert.from_module(module, batch_first=batch_first)
    params, semantics = found
    assert (found.params, found.semantics, found.batch_first) == (params, semantics, batch_first)
    assert convert.Imported._make([*found, batch_first]).batch_first is batch_first
    with pytest.raises(TypeError, match="batch_first"):
        convert.Imported._make(found)
    again = convert.to_module(*found, batch_first=found.batch_first)
    x = torch.randn(5, 3, 16)
    with torch.no_grad():
        assert torch.equal(again(x, x, x)[0], module(x, x, x)[0])
    assert convert.to_module(*found).batch_first
    encoder = torch.nn.TransformerEncoderLayer(16, 4, 8, batch_first=batch_first)
    layer = encoder.self_attn
    assert convert.from_module(layer, batch_first=batch_first).batch_first is batch_first


def test_the_order_of_axes_of_a_torch_layer_is_stated_or_warned_of() -> None:
    """Its parameters and shapes are the same for both orders, so no later call notices."""
    first, second = (torch.nn.MultiheadAttention(6, 2, batch_first=x) for x in (True, False))
    with pytest.warns(UserWarning, match=r"takes arrays \(T, B, 6\).* swap the first") as warned:
        convert.from_module(second)
    assert warned[0].filename == __file__
    for module, stated in ((first, False), (second, True)):
        with pytest.raises(ValueError, match=f"batch_first={not stated}, got {stated}: pass"):
            convert.from_module(module, batch_first=stated)
    convert.from_module(first)  # without a warning, which is an error in tests


def test_the_bar_counts_the_bytes_of_the_file_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int, int]] = []
    monkeypatch.setattr(
        Progress, "update", lambda self, task, completed, total: shown.append((completed, total))
    )
    with console.byte_bar("writing", quiet=False, passes=2) as progress:
        progress(340, 340)
    assert shown == [(170, 170)]


def test_a_wrong_layout_does_not_list_all_of_them() -> None:
    for given in ("flx", "zzz"):
        text = message(cli("convert", "a", "b", "--to", given))
        assert "`jaxmha inspect --layouts` lists all" in text
        assert "dense-combine-file" not in text
    with pytest.raises(ValueError, match="inspect --layouts") as error:
        pipeline.convert_state({}, to="zzz")
    assert "dense-combine-file" not in str(error.value)


def test_processes_are_for_shards(tmp_path: Path) -> None:
    """It is said before any process starts, and of the option that was given."""
    checkpoint.write(tmp_path / "a.npz", encoder())
    for name in ("b.npz", "b.safetensors"):
        command = ("convert", tmp_path / "a.npz", tmp_path / name, "--to", "flax", "--num-heads", N)
        done = cli(*command, "--processes", 2)
        assert done.exit_code == 2
        assert done.stderr.startswith("error: --processes writes shards")
        assert "give --shard-size, or name an index" in " ".join(done.stderr.split())


@pytest.mark.parametrize("old", ["attention", "linear", "norm"])
def test_an_unknown_kind_in_a_plan_is_named(old: str, tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "a.npz", encoder())
    plan, out = tmp_path / "p.toml", tmp_path / "b.npz"
    done = succeeds("plan", tmp_path / "a.npz", "--to", "flax", "--num-heads", N, "-o", plan)
    plan.write_text(plan.read_text().replace(f'kind = "{old}"', 'kind = "frob"', 1))
    done = cli("convert", tmp_path / "a.npz", out, "--plan", plan)
    text = message(done)
    assert done.exit_code == 2
    assert "kind must be one of attention, latent, linear, conv1d, norm" in text
    assert "got 'frob'" in text
