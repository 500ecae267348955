"""`jaxmha convert SRC DST --like TARGET` writes what the loader of the target's framework reads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from jaxmha import checkpoint
from jaxmha.cli.app import app

BUILD = """
import keras
import transformers


def of_keras():
    return keras.Sequential([
        keras.Input((5,)), keras.layers.Dense(7, name="zz_up"), keras.layers.LayerNormalization(name="n"),
        keras.layers.Dense(3, name="aa_down"),
    ])


def bert():
    return transformers.BertModel(transformers.BertConfig(
        vocab_size=31, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20,
        max_position_embeddings=17,
    ))


def of_nnx():
    from flax import nnx

    return nnx.state(nnx.Dict(d=nnx.Linear(5, 3, use_bias=False, rngs=nnx.Rngs(0))))


def of_linen():
    from flax.core import FrozenDict
    import numpy

    return FrozenDict(params={"d": {"kernel": numpy.zeros((5, 3), "f")}})
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "builders_for_like.py").write_text(BUILD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    module = torch.nn.ModuleDict(
        {"up": torch.nn.Linear(5, 7), "norm": torch.nn.LayerNorm(7), "down": torch.nn.Linear(7, 3)}
    )
    arrays = {name: x.numpy() + np.float32(0.1) for name, x in module.state_dict().items()}
    checkpoint.write(tmp_path / "mlp.safetensors", arrays)
    return tmp_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["convert", *arguments])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras
@pytest.mark.parametrize("by", ["file", "function"])
def test_a_keras_weights_file_is_loaded_by_keras(here: Path, by: str) -> None:
    import builders_for_like  # type: ignore[import-not-found]

    model = builders_for_like.of_keras()
    model.save_weights(here / "like.weights.h5")
    like = "like.weights.h5" if by == "file" else "builders_for_like.py:of_keras"
    done = run("mlp.safetensors", "mine.weights.h5", "--like", like)
    assert done.exit_code == 0, done.output
    model.load_weights(here / "mine.weights.h5")
    with checkpoint.open("mlp.safetensors") as source:
        for layer, name in zip(model.layers, ("up", "norm", "down"), strict=True):
            main, bias = map(np.asarray, layer.get_weights())
            np.testing.assert_array_equal(main, source[f"{name}.weight"].T)
            np.testing.assert_array_equal(bias, source[f"{name}.bias"])


def test_a_transformers_folder_is_loaded_by_transformers(here: Path) -> None:
    import builders_for_like
    import transformers

    source = builders_for_like.bert().eval()
    renames = {"embeddings": "embed", "intermediate": "mlp_in", "LayerNorm": "layer_norm"}
    arrays = {}
    for name, tensor in source.state_dict().items():
        for word, other in renames.items():
            name = name.replace(word, other)
        arrays[name.replace(".", "/")] = tensor.numpy()
    checkpoint.write(here / "mine.npz", arrays)
    (here / "out").mkdir()
    done = run("mine.npz", "out/model.safetensors", "--like", "builders_for_like:bert")
    assert done.exit_code == 0, done.output
    found = transformers.BertModel.from_pretrained(here / "out").eval()
    ids = torch.arange(14).reshape(2, 7)
    with torch.no_grad():
        assert torch.equal(found(ids).last_hidden_state, source(ids).last_hidden_state)


def test_questions_write_nothing(here: Path) -> None:
    two = {name: np.ones((3, 5), np.float32) for name in ("alpha.weight", "omega.weight")}
    checkpoint.write("two.safetensors", two)
    checkpoint.write(
        "target.npz", {"left/kernel": np.ones((5, 3), "f"), "p/kernel": np.ones((5, 3), "f")}
    )
    done = run("two.safetensors", "mine.npz", "--like", "target.npz")
    assert done.exit_code == 1, done.output
    assert "? left/kernel" in done.output
    assert not (here / "mine.npz").exists()


def test_groups_are_taken_from_a_file(here: Path) -> None:
    builder = ("--to", "keras", "--like", "builders_for_like:bert")
    done = run("mlp.safetensors", "mine.weights.h5", *builder)
    assert done.exit_code == 2
    assert "or leave out --to to fill the model" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--report", "r.json"), "cannot be combined with --like without --to"),
        (("--fold-scale",), "cannot be combined"),
        (("--to", "flax"), "named .weights.h5, got mine.npz: leave out --to to fill the arrays"),
        ((), "expected a file, or MODULE:FUNCTION"),
    ],
)
def test_wrong_options_exit_with_two(here: Path, options: tuple[str, ...], message: str) -> None:
    like = "mlp.safetensors" if options else "nothing.npz"
    done = run("mlp.safetensors", "mine.npz", "--like", like, *options)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert not (here / "mine.npz").exists()


@pytest.mark.parametrize(("target", "ending"), [("of_nnx", "/value"), ("of_linen", "")])
def test_names_in_an_orbax_folder(here: Path, target: str, ending: str) -> None:
    """Orbax restores nnx states from leaves named `value`, and variables of linen as they are."""
    checkpoint.write("one.npz", {"d/kernel": np.ones((5, 3), "f")})
    done = run("one.npz", f"{target}.orbax", "--like", f"builders_for_like.py:{target}")
    assert done.exit_code == 0, done.output
    with checkpoint.open(here / f"{target}.orbax") as file:
        assert [*file.info] == [f"d/kernel{ending}" if ending else "params/d/kernel"]


def test_unused_arrays_and_packed_projections_as_in_match(here: Path) -> None:
    more = {"d.weight": np.ones((3, 5), "f"), "e.weight": np.ones((11, 2), "f")}
    checkpoint.write(here / "more.npz", more)
    given = ["convert", "more.npz", "one.npz", "--like", "builders_for_like.py:of_linen"]
    run = CliRunner().invoke
    done = run(app, given)
    assert done.exit_code == 1
    assert "1 arrays left over: --keep-unused leaves out arrays that no line uses" in done.output
    assert not (here / "one.npz").exists()
    done = run(app, [*given, "--keep-unused"])
    assert done.exit_code == 0, done.output
    assert "are those of the source, bit by bit" in done.output


def test_packed_projections_are_split_as_in_match(here: Path) -> None:
    rng = np.random.default_rng(0)
    packed = rng.normal(size=(15, 5)).astype("f")
    checkpoint.write(here / "packed.npz", {"attn.qkv.weight": packed})
    parts = {f"attn.{x}.kernel": np.zeros((5, 5), "f") for x in ("query", "key", "value")}
    checkpoint.write(here / "parts.npz", parts)
    given = ["convert", "packed.npz", "split.npz", "--like", "parts.npz"]
    run = CliRunner().invoke
    assert run(app, given).exit_code == 1
    done = run(app, [*given, "--concatenated"])
    assert done.exit_code == 0, done.output
    with checkpoint.open(here / "split.npz") as file:
        np.testing.assert_array_equal(file["attn.key.kernel"], packed[5:10].T)


@pytest.mark.parametrize("flag", ["--keep-unused", "--concatenated"])
def test_options_of_a_match_are_refused_elsewhere(flag: str, here: Path) -> None:
    done = CliRunner().invoke(app, ["convert", "mlp.safetensors", "a.npz", "--to", "flax", flag])
    assert done.exit_code == 2
    assert "--keep-unused and --concatenated are for --like without --to" in done.output
    given = ["convert", "mlp.safetensors", "a.npz", "--like", "b.npz", "--plan", "p.toml", flag]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2
    assert "leave out --plan or --like" in done.output
    given = ["match", "mlp.safetensors", "mlp.safetensors", "--plan", "p.toml", "--concatenated"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2
    assert "--concatenated is for a new plan: edit the arrows" in done.output
