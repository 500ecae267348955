"""Orbax folders of `nnx.State`, whose leaves are named `value`: every command reads them alike."""

from pathlib import Path
from typing import Any

import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jaxmha import checkpoint
from jaxmha.converters import migrate, verify
from tests.converters.command_line import printed, succeeds

N, D = 3, 15


class Model(nnx.Module):  # type: ignore[misc]
    def __init__(self, rngs: Any) -> None:
        self.attention = nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(D, 5, rngs=rngs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Model(nnx.Rngs(1))
    path: Path = tmp_path_factory.mktemp("nnx") / "saved"
    with ocp.StandardCheckpointer() as writer:
        writer.save(path, nnx.state(model))
    return path


@pytest.mark.filterwarnings("ignore")
def test_every_command_reads_the_same_names(folder: Path, tmp_path: Path) -> None:
    info = migrate.inspect(folder)
    assert [(b.prefix, b.layout, b.num_heads) for b in info.blocks] == [("attention", "flax", N)]
    assert [layer.prefix for layer in info.layers] == ["head"]
    target = tmp_path / "torch.safetensors"
    succeeds("convert", folder, target, "--to", "torch")
    assert verify.compare(folder, target).same
    assert "attention" in printed(succeeds("describe", folder))


@pytest.mark.filterwarnings("ignore")
def test_nnx_restores_a_converted_folder(folder: Path, tmp_path: Path) -> None:
    """A folder of a state is converted to a folder of a state."""
    target = tmp_path / "wide.orbax"
    succeeds("convert", folder, target, "--to", "flax", "--dtype", "float64")
    with checkpoint.open(folder) as a, checkpoint.open(target) as b:
        assert set(a) == set(b)
        np.testing.assert_array_equal(a["head/kernel/value"], b["head/kernel/value"])


@pytest.mark.filterwarnings("ignore")
def test_arrays_next_to_a_state_keep_their_names(tmp_path: Path) -> None:
    state, plain = nnx.state(Model(nnx.Rngs(1))), np.arange(5, dtype="float32")
    ema = nnx.to_pure_dict(nnx.state(Model(nnx.Rngs(2)), nnx.Param))
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "a", {"model": state, "ema": ema, "sizes": plain})
    blocks = {block.prefix for block in migrate.inspect(tmp_path / "a").blocks}
    assert blocks == {"model/attention", "ema/attention"}
    migrate.convert(tmp_path / "a", tmp_path / "b.orbax", to="flax", dtype="float64")
    with checkpoint.open(tmp_path / "a") as a, checkpoint.open(tmp_path / "b.orbax") as b:
        assert set(a) == set(b)
        assert {"sizes", "model/head/kernel/value", "ema/head/kernel"} < set(b)


@pytest.mark.parametrize("weights", [["query", "key", "value"], ["key/kernel", "value"]])
def test_a_parameter_named_value_keeps_its_name(weights: list[str], tmp_path: Path) -> None:
    arrays = {f"a/{name}": np.ones((5, 3), "float32") for name in weights}
    checkpoint.write(tmp_path / "a.orbax", arrays | {"b/value": np.ones(7, "float32")})
    with checkpoint.open(tmp_path / "a.orbax", unbox=True) as file:
        assert set(file) == {*arrays, "b/value"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_training_states_are_read(tmp_path: Path) -> None:
    model = Model(nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "a", {"model": nnx.state(model), "state": nnx.state(optimizer)})
    assert "model/attention" in [block.prefix for block in migrate.inspect(tmp_path / "a").blocks]
