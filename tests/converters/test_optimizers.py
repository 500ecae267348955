"""Training checkpoints: the moments of an optimizer follow weights that a conversion changes."""

import contextlib
import warnings
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import torch
from flax import nnx
from optax import contrib
from safetensors.torch import save_file

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
    checkpoint.write(path, named(tree, "/"))
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


@pytest.mark.parametrize("name", ["adafactor", "novograd", "muon"])
def test_states_with_arrays_of_other_shapes_are_carried_over(name: str, tmp_path: Path) -> None:
    """Their arrays look like blocks of attention that lack some."""
    layer = nnx.MultiHeadAttention(3, 15, decode=False, rngs=nnx.Rngs(0))
    weights = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    optimizer = getattr(optax, name, None) or getattr(contrib, name)
    state = optimizer(1e-3).init(weights)
    flat = named({"params": {"self_attn": weights}, "state": state}, "/")
    checkpoint.write(tmp_path / "saved.npz", flat)
    done = migrate.convert(tmp_path / "saved.npz", tmp_path / "converted.pt", to="torch")
    assert done.plan is not None
    assert "params.self_attn" in {step.target for step in done.plan.steps}
    with checkpoint.open(tmp_path / "converted.pt") as file:
        assert all(name in file or name.replace("/", ".") in file for name in flat if "/nu" in name)


def test_moments_that_do_not_follow_their_weights_have_a_note(tmp_path: Path) -> None:
    source = of_torch(tmp_path / "saved.pt")
    done = migrate.convert(source, tmp_path / "a.npz", to="jaxmha", num_heads=3)
    (note,) = [note for note in done.notes if "optimizer" in note and "as it was" in note]
    assert "8 tensors, 'optimizer.state.0.exp_avg' the first" in note
    done = migrate.convert(
        of_optax(tmp_path / "saved.npz"), tmp_path / "b.npz", to="jaxmha", num_heads=3
    )
    assert not any("as it was" in note for note in done.notes)


def named(tree: Any, separator: str) -> dict[str, np.ndarray]:
    """The arrays of a tree by their paths, as they are saved by hand."""
    return {
        jax.tree_util.keystr(keys, simple=True, separator=separator): np.asarray(array)
        for keys, array in jax.tree_util.tree_flatten_with_path(tree)[0]
        if isinstance(array, np.ndarray | jax.Array) and not str(array.dtype).startswith("key")
    }


WEIGHTS = {"enc": {"attn": {"kernel": np.ones((5, 7), "float32"), "bias": np.ones(7, "float32")}}}
SOME_OF_OPTAX = ["adam", "lion", "adagrad", "rmsprop", "adadelta", "adafactor", "rprop"]
# Transformations that are no optimizers: flags of NaN, and averages that may be of the weights.
NO_MOMENTS = {"zero_nans", "ema"}


def optimizers_of_optax() -> dict[str, Any]:
    """Every optimizer and transformation of optax that has a state."""
    inner = optax.adam(0.1)
    found = {}
    for name, made in ((n, getattr(m, n)) for m in (optax, contrib) for n in dir(m)):
        for arguments in ((0.1,), (), (inner,), (inner, 3), (inner, 0.1)):
            with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
                optimizer = made(*arguments)
                optimizer.init(WEIGHTS)
                found[name] = optimizer
    return found


def refuses(tree: Any, folder: str = "") -> None:
    """Asserts that moments are found in a tree, and no weights."""
    for separator in "/.":
        names = list(named(tree, separator))
        found = optimizer_state.find(names)
        moments = {n for n in names if not n.startswith("params") and "kernel" in n}
        assert moments <= {*found}, folder
        assert not any(name.startswith("params") for name in found), folder


@pytest.mark.parametrize("folder", ["opt", "optim", "state"])
def test_states_of_optax_are_found(folder: str) -> None:
    for name in SOME_OF_OPTAX:
        state = getattr(optax, name)(0.1).init(WEIGHTS)
        refuses({"params": WEIGHTS, folder: state}, name)
    refuses({"params": WEIGHTS, folder: optax.sgd(0.1, 0.9).init(WEIGHTS)})
    refuses({"params": WEIGHTS, folder: optax.MultiSteps(optax.sgd(0.1), 3).init(WEIGHTS)})


@pytest.mark.slow
def test_all_states_of_optax_are_found() -> None:
    every = optimizers_of_optax()
    assert {*SOME_OF_OPTAX, "muon", "schedule_free", "scale_by_sm3", "lbfgs"} <= every.keys()
    for name, optimizer in every.items():
        if name not in NO_MOMENTS:
            refuses({"params": WEIGHTS, "opt": optimizer.init(WEIGHTS)}, name)


@pytest.mark.parametrize("folder", ["opt", "state"])
def test_states_of_optax_in_orbax_folders_are_found(folder: str, tmp_path: Path) -> None:
    tree = {"params": WEIGHTS, folder: optax.lion(0.1).init(WEIGHTS)}
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "saved", tree)
    with checkpoint.open(tmp_path / "saved") as file:
        found = optimizer_state.find(file.info)
        assert found == [name for name in file.info if name.startswith(folder)]


TORCH: dict[str, dict[str, Any]] = {
    name: {} for name in dir(torch.optim) if name[0].isupper() and name != "Optimizer"
}
TORCH |= {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}}
TORCH["Adam"] = {"amsgrad": True}


def stepped(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model, and the state of an optimizer after a step."""
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 5, bias=False), torch.nn.Linear(5, 2, bias=False)
    )
    optimizer = getattr(torch.optim, name)(model.parameters(), **TORCH[name])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 3)).square().sum()
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        for weight, gradient in zip(model.parameters(), gradients, strict=True):
            weight.grad = gradient.to_sparse() if name == "SparseAdam" else gradient
        return loss

    if name == "LBFGS":
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    return model, optimizer.state_dict()


@pytest.mark.parametrize("name", TORCH)
def test_states_of_torch_are_found(name: str, tmp_path: Path) -> None:
    model, state = stepped(name)
    weights = dict(model.named_parameters())
    # As FSDP and torch.distributed.checkpoint name it:
    by_name = {list(weights)[i]: entries for i, entries in state["state"].items()}
    for kept in (state, {"state": state["state"]}, {"state": by_name}):
        path = tmp_path / "saved.pt"
        torch.save({"model": model.state_dict(), "optim": kept}, path)
        with checkpoint.open(path) as file:
            own = [name for name in file.info if not name.startswith("model")]
            assert own
            assert optimizer_state.find(file.info) == own
            flat = {name: torch.from_numpy(np.array(file[name])) for name in file.info}
        save_file(flat, tmp_path / "saved.safetensors")
        with checkpoint.open(tmp_path / "saved.safetensors") as file:
            assert {*optimizer_state.find(file.info)} == {*own}


@pytest.mark.parametrize("entries", [("step", "exp_avg", "exp_avg_sq"), ("momentum_buffer",)])
def test_moments_by_the_names_of_attention_are_no_other_layout(
    entries: tuple[str, ...], tmp_path: Path
) -> None:
    """As FSDP stores the state of Adam or of Muon, which has no moments of biases here."""
    weights = torch.nn.MultiheadAttention(6, 2).state_dict()
    moments = {name: x for name, x in weights.items() if x.ndim > 1 or "step" in entries}
    state = {f"attn.{n}": dict.fromkeys(entries, torch.ones_like(x)) for n, x in moments.items()}
    weights = {f"attn.{name}": x for name, x in weights.items()}
    saved = {"model": weights, "optimizer": {"state": state, "param_groups": [{"lr": 0.1}]}}
    torch.save(saved, tmp_path / "saved.pt")
    done = migrate.convert(tmp_path / "saved.pt", tmp_path / "a.npz", to="flax", num_heads=2)
    notes = [*done.notes, *migrate.inspect(tmp_path / "saved.pt").notes]
    assert not [note for note in notes if "no known layout" in note]
    assert [note for note in notes if "the state of an optimizer is carried over" in note]


def test_unknown_optimizers_are_found_by_their_groups(tmp_path: Path) -> None:
    """Each optimizer of PyTorch, also of other packages, has `param_groups` in its state."""
    model, state = stepped("SGD")
    for entries in state["state"].values():
        entries["fisher"] = entries.pop("momentum_buffer")
    torch.save({"model": model.state_dict(), "mine": state}, tmp_path / "saved.pt")
    with checkpoint.open(tmp_path / "saved.pt") as file:
        found = optimizer_state.find(file.info, file.others)
        assert found == ["mine.state.0.fisher", "mine.state.1.fisher"]


def test_names_of_optimizers() -> None:
    theirs = [
        "optimizer_states.0.state.0.exp_avg", "opt_state/0/count", "mine.state.3.step",
        "mine.state.3.exp_avg_sq", "mine.state.3.exp_avg", "0/mu/dense/kernel", "0/nu/dense/kernel",
        "optimizer/vars/0",
    ]  # fmt: skip
    weights = ["opt.layers.0.weight", "mu/kernel", "model.state.3.weight", "vae.nu", "vae.mu"]
    assert optimizer_state.find([*weights, *theirs]) == theirs


@pytest.mark.parametrize(
    "names",
    [
        "enc/mu/kernel enc/logvar/kernel enc/in/kernel dec/out/kernel",  # a VAE
        "encoder.0.attn.in_proj_weight reward.weight reward.bias",  # a reward model
        "encoder.weight head.mu.weight head.mu.bias head.value.weight",  # an actor and a critic
        "enc.weight heads.0.mu.weight heads.0.value.weight state_encoder.mu.weight",
        "out.weight state.mu.weight state.value.weight layers.0.ema.weight layers.0.ema.bias",
        "x.weight trace.weight mu.weight nu.weight m1.weight m2.weight m1.bias m2.bias",
        "b.weight a.m.weight a.n.weight attn.v.weight attn.g h.0.v.weight h.0.key.weight h.0.g",
        "layers.0.m1.q_proj.weight layers.0.m2.q_proj.weight layers.1.attn.q_proj.weight",
        "mu/fc/kernel logvar/fc/kernel dec/fc/kernel",
        "layers/0/q/kernel layers/0/k/kernel layers/0/v/kernel layers/1/v/kernel",
        "params/a/v/kernel params/a/m/kernel params/b/v/kernel",
        "params/a/kernel ema/ema/a/kernel ema/count",  # averages of the weights
        "params/a/kernel target_params/a/kernel",
        "a.scale a.count b.scale",
        "norm.step norm.weight model.state.step",
    ],
)
def test_weights_with_names_of_moments_are_no_optimizers(names: str) -> None:
    assert optimizer_state.find(names.split()) == []


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras
@pytest.mark.parametrize("ending", [pytest.param("keras", marks=pytest.mark.slow), "weights.h5"])
def test_the_remedy_for_keras_leaves_the_optimizer_out(ending: str, tmp_path: Path) -> None:
    path, target = tmp_path / f"model.{ending}", tmp_path / "a.npz"
    inputs = keras.Input((5, 7))
    model = keras.Model(inputs, keras.layers.MultiHeadAttention(3, 2)(inputs, inputs))
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match=r"in Keras .*load_model\(path, compile=False\)"):
        migrate.convert(path, target, to="flax", dtype="float16")
    model = keras.models.load_model(tmp_path / "model.keras", compile=False)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    assert migrate.convert(path, target, to="flax", dtype="float16").losses
