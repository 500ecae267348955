"""Orbax folders of nnx states, written as training code writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jaxmha import checkpoint
from jaxmha.converters import flax


class Trained(nnx.Module):  # type: ignore[misc]
    def __init__(self, rngs: Any) -> None:
        self.blocks = nnx.List([nnx.Linear(5, 5, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(5, 3, rngs=rngs)


class Mine(nnx.Module):  # type: ignore[misc]
    def __init__(self, rngs: Any) -> None:
        self.layers = nnx.List([nnx.Linear(5, 5, rngs=rngs) for _ in range(2)])
        self.bn = nnx.BatchNorm(5, rngs=rngs)
        self.out = nnx.Linear(5, 3, rngs=rngs)


def state(model: Trained, path: Path) -> Path:
    with ocp.StandardCheckpointer() as writer:
        writer.save(path, nnx.state(model))  # with the keys and counts of Dropout
    return path


def pure(model: Trained, path: Path) -> Path:
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(path, nnx.to_pure_dict(nnx.state(model, nnx.Any(nnx.Param, nnx.BatchStat))))
    return path


def step(model: Trained, path: Path) -> Path:
    with ocp.CheckpointManager(path) as manager:
        manager.save(7, args=ocp.args.Composite(state=ocp.args.StandardSave(nnx.state(model))))
    return path / "7" / "state"


def training(model: Trained, path: Path) -> Path:
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    with ocp.StandardCheckpointer() as writer:
        writer.save(path, {"model": nnx.state(model), "optimizer": nnx.state(optimizer)})
    return path


def check(model: Mine, trained: Trained) -> None:
    pairs = [*zip(model.layers, trained.blocks, strict=True), (model.out, trained.head)]
    for one, other in pairs:
        np.testing.assert_array_equal(one.kernel[...], other.kernel[...])
    np.testing.assert_array_equal(model.bn.mean[...], np.arange(5))


def a_trained_model() -> Trained:
    model = Trained(nnx.Rngs(1))
    model.norm.mean[...] = jnp.arange(5.0)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow_variants("*", "!state")
@pytest.mark.parametrize("write", [state, pure, step, training], ids=lambda f: f.__name__)
def test_a_state_is_loaded(write: Callable[[Trained, Path], Path], tmp_path: Path) -> None:
    trained = a_trained_model()
    check(flax.load_into(Mine(nnx.Rngs(0)), write(trained, tmp_path / "saved")), trained)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_step_of_a_manager_names_its_folders(tmp_path: Path) -> None:
    folder = step(a_trained_model(), tmp_path / "saved")
    problem = r"of items: state; name one of them, such as .*7/state$"
    with pytest.raises(checkpoint.CheckpointError, match=problem):
        flax.load_into(Mine(nnx.Rngs(0)), folder.parent)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_nnx_restores_a_written_folder(tmp_path: Path) -> None:
    trained = a_trained_model()
    kept = nnx.state(trained, nnx.Any(nnx.Param, nnx.BatchStat))
    flat = {"/".join(map(str, p)): np.asarray(v[...]) for p, v in nnx.to_flat_state(kept)}
    checkpoint.write(tmp_path / "m.orbax", flat)
    with ocp.StandardCheckpointer() as reader:
        restored = nnx.restore_int_paths(reader.restore(tmp_path / "m.orbax"))
    fresh = Trained(nnx.Rngs(2))
    nnx.update(fresh, restored)
    check(flax.load_into(Mine(nnx.Rngs(0)), fresh), trained)
