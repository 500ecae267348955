"""Training checkpoints: the moments of an optimizer follow weights that a conversion changes."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch

from jaxmha import checkpoint
from jaxmha.checkpoint import optimizer_state
from jaxmha.converters import migrate
from tests.converters.command_line import cli, printed
from tests.converters.test_fold import PREFIX, t5

WIDTHS = {"q": (21, 5), "k": (21, 5), "v": (21, 5), "o": (5, 21)}  # N 3, H 7


def of_torch(path: Path) -> Path:
    """The state of T5's attention after a step of Adam, as PyTorch's documentation saves it."""
    model: torch.nn.Module = torch.nn.ModuleDict(
        {name: torch.nn.Linear(i, o, bias=False) for name, (o, i) in WIDTHS.items()}
    )
    for name in reversed(PREFIX.split(".")):
        model = torch.nn.ModuleDict({name: model})
    optimizer = torch.optim.AdamW(model.parameters())
    sum(p.square().sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


def of_optax(path: Path) -> Path:
    """The same weights, and the state of Adam for them, as names of a tree."""
    rng = np.random.default_rng(0)
    weights = {
        f"{PREFIX}.{name}.weight": rng.normal(size=shape).astype("float32")
        for name, shape in WIDTHS.items()
    }
    state = optax.adam(1e-3).init(weights)
    tree: Any = {"params": weights, "state": state}
    flat = {
        jax.tree_util.keystr(keys, simple=True, separator="/"): np.asarray(array)
        for keys, array in jax.tree_util.tree_flatten_with_path(tree)[0]
    }
    checkpoint.write(path, flat)
    return path


SOURCES = {"torch": (of_torch, "saved.pt"), "optax": (of_optax, "saved.npz")}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("change", [("--fold-scale",), ("--dtype", "float16")], ids=lambda x: x[0])
def test_values_of_training_states_are_not_changed(
    kind: str, change: tuple[str, ...], tmp_path: Path
) -> None:
    make, name = SOURCES[kind]
    source, target = make(tmp_path / name), tmp_path / "converted.safetensors"
    to = "llama" if change[0] == "--fold-scale" else "t5"
    refused = cli("convert", source, target, "--to", to, "--num-heads", 3, *change)
    assert refused.exit_code == 2, printed(refused)
    assert "the state of an optimizer" in printed(refused)
    assert f"leave out {' '.join(change)}" in printed(refused)
    assert not target.exists()


def test_the_weights_alone_are_converted(tmp_path: Path) -> None:
    source = t5(tmp_path, 4, 8)
    done = migrate.convert(source, tmp_path / "a.npz", to="llama", fold_scale=True, dtype="float16")
    assert done.losses


def test_a_cast_that_rounds_nothing_is_allowed(tmp_path: Path) -> None:
    source = of_torch(tmp_path / "saved.pt")
    done = migrate.convert(source, tmp_path / "a.npz", to="t5", num_heads=3, dtype="float64")
    assert all(loss.exact for loss in done.losses.values())


def test_names_of_optimizers() -> None:
    theirs = [
        "optimizer_states.0.state.0.exp_avg",
        "opt_state/0/count",
        "mine.state.3.step",
        "mine.state.3.exp_avg_sq",
        "mine.state.3.exp_avg",
        "0/mu/dense/kernel",
        "0/nu/dense/kernel",
        "optimizer/vars/0",
    ]
    weights = ["opt.layers.0.weight", "mu/kernel", "model.state.3.weight", "vae.nu", "vae.mu"]
    assert optimizer_state.find([*weights, *theirs]) == theirs
