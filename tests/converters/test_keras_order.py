"""Layers of one class and shape come back to Keras as the layers that they were, or it is said."""

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from jaxmha import checkpoint
from jaxmha.converters.discovery import keras_groups
from jaxmha.converters.layout.arrays import to_numpy
from jaxmha.converters.migrate import keras_order, pipeline, plan_toml
from jaxmha.converters.verify import comparands
from tests.converters.command_line import cli, printed, succeeds

T, D, N = 5, 8, 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def model(order: str = "up down") -> Any:
    """Dense, norms and attention of one shape each, with names that sort otherwise."""
    inputs = x = keras.Input((T, D))
    for i, name in enumerate(("zeta", "alpha")):
        attended = keras.layers.MultiHeadAttention(N, D // N, name=f"{name}_attention")(x, x)
        x = keras.layers.LayerNormalization(name=f"{name}_norm")(x + attended)
        hidden = x
        for which in order.split():
            hidden = keras.layers.Dense(D, "relu", name=f"{which}_{i}")(hidden)
        x = x + hidden
    made = keras.Model(inputs, x)
    rng = np.random.default_rng(0)
    made.set_weights([rng.normal(size=w.shape).astype(np.float32) for w in made.get_weights()])
    return made


X = np.random.default_rng(1).normal(size=(2, T, D)).astype(np.float32)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A file of weights, the model, and its output."""
    made = model()
    path = tmp_path_factory.mktemp("keras") / "model.weights.h5"
    made.save_weights(path)
    made.save(path.with_name("model.keras"))
    return path, made, output(made)


def output(made: Any) -> Any:
    with comparands.exact_dtypes(np.dtype(np.float32)):
        return to_numpy(made(X))


def loaded(made: Any, path: Path) -> Any:
    made.set_weights([np.zeros_like(w) for w in made.get_weights()])
    made.load_weights(path)
    return output(made)


WAYS = [
    ("a.safetensors", "flax"),
    ("a.safetensors.index.json", "flax"),
    ("a.safetensors", "torch"),
    ("a.safetensors", "keras"),
    ("a.npz", "flax"),
    ("a.pt", "flax"),
    ("a.orbax", "flax"),
]


@pytest.mark.slow_variants(
    "*", "!*h5-*.safetensors-flax", "!*h5-*.pt-*", "!*h5-*.orbax-*", "!*.keras-*.index.json-*"
)
@pytest.mark.parametrize(("name", "to"), WAYS)
@pytest.mark.parametrize("source", ["model.weights.h5", "model.keras"])
def test_layers_come_back_as_they_were(
    source: str, name: str, to: str, saved: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    path, made, expected = saved
    pipeline.convert(path.with_name(source), tmp_path / name, to=to)
    done = succeeds("convert", tmp_path / name, tmp_path / "b.weights.h5", "--to", "keras")
    assert "verified: " in printed(done)
    assert "not verified" not in printed(done)
    np.testing.assert_array_equal(loaded(made, tmp_path / "b.weights.h5"), expected)


def test_the_order_survives_several_conversions(
    saved: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    path, made, expected = saved
    steps = [("a.safetensors", "flax"), ("b.safetensors", "linear"), ("c.safetensors", "haiku")]
    for name, to in steps:
        pipeline.convert(path, tmp_path / name, to=to)
        path = tmp_path / name
    pipeline.convert(path, tmp_path / "d.weights.h5", to="keras")
    np.testing.assert_array_equal(loaded(made, tmp_path / "d.weights.h5"), expected)


@pytest.mark.everyday(name=["a.npz"])
@pytest.mark.parametrize("name", ["a.npz", "a.pt", "a.orbax"])
def test_where_the_order_is_not_kept_nothing_is_verified(
    name: str, saved: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    path, made, expected = saved
    pipeline.convert(path, tmp_path / "with.npz", to="flax")
    with checkpoint.open(tmp_path / "with.npz") as file:
        checkpoint.write(tmp_path / name, file)  # without metadata, as other tools write it
    arguments = ("convert", tmp_path / name, tmp_path / "b.weights.h5", "--to", "keras")
    done = succeeds(*arguments, "--report", tmp_path / "report.json")
    assert "not verified: " in printed(done)
    for layer in ("up_0", "up_1", "down_0", "down_1", "alpha_norm", "zeta_attention"):
        assert layer in printed(done)
    assert "more" not in printed(done).partition("here they are in the order")[2].partition(":")[0]
    assert '"unchecked": [\n  "the order' in (tmp_path / "report.json").read_text()
    done = cli(*arguments, "--force", "--like", path)
    assert (done.exit_code, "not verified" in printed(done)) == (0, False), printed(done)
    np.testing.assert_array_equal(loaded(made, tmp_path / "b.weights.h5"), expected)


def without_groups(saved: tuple[Path, Any, Any], folder: Path) -> Path:
    """The same layers as other tools write them: nothing gives their order."""
    pipeline.convert(saved[0], folder / "with.npz", to="flax")
    with checkpoint.open(folder / "with.npz") as file:
        checkpoint.write(folder / "a.npz", file)
    return folder / "a.npz"


@pytest.mark.everyday(command=["verify"])
@pytest.mark.parametrize("command", ["verify", "diff"])
def test_a_guessed_order_is_never_the_same(
    command: str, saved: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    source, target = without_groups(saved, tmp_path), tmp_path / "b.weights.h5"
    pipeline.convert(source, target, to="keras")
    for pair in ((source, target), (target, source)):
        done = cli(command, *pair)
        assert done.exit_code == 1, printed(done)
        assert "tensors by name: the same; the order of layers" in printed(done)
        made = json.loads(cli(command, *pair, "--json").stdout)
        assert (made["same"], made["different"], len(made["unproven"])) == (False, False, 1)
    pipeline.convert(source, target, to="keras", like=saved[0], force=True)
    assert cli(command, source, target).exit_code == 0
    assert cli(command, source, saved[0]).exit_code == 0  # Keras wrote it


def test_a_guessed_order_stays_a_guess(saved: tuple[Path, Any, Any], tmp_path: Path) -> None:
    source, target = without_groups(saved, tmp_path), tmp_path / "b.weights.h5"
    pipeline.convert(source, target, to="keras")
    with checkpoint.open(target) as file:
        assert not file.ordered
    for between in ("c.weights.h5", "c.safetensors"):
        pipeline.convert(target, tmp_path / between, to="keras" if "h5" in between else "flax")
        done = pipeline.convert(
            tmp_path / between, tmp_path / "d.weights.h5", to="keras", force=True
        )
        assert done.unchecked
    assert cli("verify", target, saved[0]).exit_code == 1  # the norms are in the groups of others


def test_a_template_decides_the_order(saved: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """A model that creates its layers in another order."""
    path, _, expected = saved
    other = model("down up")
    other.save_weights(tmp_path / "other.weights.h5")
    pipeline.convert(path, tmp_path / "a.safetensors", to="flax")
    target = tmp_path / "b.weights.h5"
    pipeline.convert(
        tmp_path / "a.safetensors", target, to="keras", like=tmp_path / "other.weights.h5"
    )
    other.load_weights(target)
    for layer in ("up_0", "down_1", "zeta_norm"):
        for ours, theirs in zip(
            other.get_layer(layer).get_weights(),
            saved[1].get_layer(layer).get_weights(),
            strict=True,
        ):
            np.testing.assert_array_equal(ours, theirs)
    assert expected.shape == X.shape


def test_a_template_of_another_model_is_refused(
    saved: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    path, *_ = saved
    pipeline.convert(path, tmp_path / "a.npz", to="flax")
    inputs = keras.Input((T, D))
    keras.Model(inputs, keras.layers.Dense(D, name="else")(inputs)).save_weights(
        tmp_path / "x.weights.h5"
    )
    target = tmp_path / "b.weights.h5"
    with pytest.raises(ValueError, match=r"--like: the file has no layer named .* its layers are"):
        pipeline.convert(tmp_path / "a.npz", target, to="keras", like=tmp_path / "x.weights.h5")
    with pytest.raises(ValueError, match=r"is for a destination named .weights.h5"):
        pipeline.convert(path, tmp_path / "b.npz", to="flax", like=path)
    with pytest.raises(ValueError, match=r"is no .weights.h5 file but npz"):
        pipeline.convert(tmp_path / "a.npz", target, to="keras", like=tmp_path / "a.npz")
    with checkpoint.open(path) as file:
        wider = {
            name: np.ones((3, D), np.float32) if name == "layers/dense/vars/0" else file[name]
            for name in file
        }
        checkpoint.write(tmp_path / "y.weights.h5", wider, names=dict(file.names))
    with pytest.raises(ValueError, match=r"layers/dense/vars/0 is \(3, 8\) in that file"):
        pipeline.convert(tmp_path / "a.npz", target, to="keras", like=tmp_path / "y.weights.h5")
    with checkpoint.open(path) as file:
        state, names = {name: file[name] for name in file}, dict(file.names)
    less = {name: x for name, x in state.items() if name != "layers/dense/vars/1"}
    several = state | {f"layers/dense_7/vars/{i}": state[f"layers/dense/vars/{i}"] for i in (0, 1)}
    renamed = names | {"layers/dense": "one", "layers/dense_7": "two"}
    for arrays, called, message in (
        (less, names, r"layers/dense/vars/1 is not there in that file"),
        (several, renamed, "the file has no layer named"),
    ):
        checkpoint.write(tmp_path / "z.weights.h5", arrays, names=called, force=True)
        with pytest.raises(ValueError, match=message):
            pipeline.convert(tmp_path / "a.npz", target, to="keras", like=tmp_path / "z.weights.h5")
    assert not target.exists()


def test_layers_that_cannot_be_exchanged_need_no_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = {f"fc{n}.weight": rng.normal(size=(n, 5)) for n in (3, 7)}
    state |= {f"fc{n}.bias": rng.normal(size=n) for n in (3, 7)}
    checkpoint.write(tmp_path / "a.npz", {name: x.astype("f") for name, x in state.items()})
    made = pipeline.plan(tmp_path / "a.npz", to="keras", in_file=True)[0]
    with checkpoint.open(tmp_path / "a.npz") as file:
        assert keras_order.order_is_evident(made.steps, file.info)


def test_metadata_that_says_nonsense_is_ignored(
    saved: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    path, *_ = saved
    pipeline.convert(path, tmp_path / "a.safetensors", to="flax")
    for text in ("[", "[1]", '{"up_0": 3}', '{"up_0": ["a"]}', "{}", '{"up_0": ["x", "y"]}'):
        with checkpoint.open(tmp_path / "a.safetensors") as file:
            metadata = dict(file.metadata) | {keras_groups.METADATA: text}
            checkpoint.write(tmp_path / "b.safetensors", file, metadata=metadata, force=True)
        done = pipeline.convert(
            tmp_path / "b.safetensors", tmp_path / "b.weights.h5", to="keras", force=True
        )
        assert done.unchecked


def test_a_plan_keeps_the_order(saved: tuple[Path, Any, Any], tmp_path: Path) -> None:
    path, made, expected = saved
    pipeline.convert(path, tmp_path / "a.safetensors", to="flax")
    plan = pipeline.plan(tmp_path / "a.safetensors", to="keras-file", in_file=True)[0]
    (tmp_path / "plan.toml").write_text(plan_toml.dumps(plan))
    target = tmp_path / "b.weights.h5"
    succeeds("convert", tmp_path / "a.safetensors", target, "--plan", tmp_path / "plan.toml")
    np.testing.assert_array_equal(loaded(made, target), expected)
