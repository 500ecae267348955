"""Dense layers next to a flattened convolution: torch flattens channels first, Flax and Keras last."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx

from jaxmha import checkpoint
from jaxmha.converters import equinox, flax, keras, match
from jaxmha.converters import torch as convert_torch
from jaxmha.converters.matching import Line, Plan, prove
from jaxmha.converters.migrate import pipeline

C, Y, X, OUT = 4, 5, 7, 6


class Theirs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, C, 3, padding=1)
        self.value, self.advantage = (torch.nn.Linear(C * Y * X, n) for n in (1, OUT))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.conv(x.permute(0, 3, 1, 2)).relu().flatten(1)
        return self.value(x) + self.advantage(x)


class Mine(nnx.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(3, C, (3, 3), rngs=rngs)
        self.value, self.advantage = (nnx.Linear(C * Y * X, n, rngs=rngs) for n in (1, OUT))

    def __call__(self, x: Any) -> Any:
        x = nnx.relu(self.conv(x)).reshape(len(x), -1)
        return self.value(x) + self.advantage(x)


def of_keras(conv: str = "channels_last", flatten: str = "channels_last", by: Any = None) -> Any:
    import keras as library

    x = inputs = library.Input((Y, X, 3) if conv == "channels_last" else (3, Y, X))
    x = library.layers.Conv2D(
        C, 3, padding="same", activation="relu", name="conv", data_format=conv
    )(x)
    x = x if by is None else library.layers.Permute(by)(x)
    x = library.layers.Flatten(data_format=flatten)(x)
    value, advantage = (
        library.layers.Dense(n, name=name)(x) for n, name in ((1, "value"), (OUT, "advantage"))
    )
    return library.Model(inputs, value + advantage)


def answered(plan: Plan) -> Plan:
    return plan.with_lines(*(line for one in plan.questions for line in one.examples[0]))


LOAD: dict[str, Any] = {
    "nnx": (Theirs, Mine, flax.load_into),
    "keras": (Theirs, of_keras, keras.load_into),
    "back": (Mine, Theirs, convert_torch.load_into),
    "state": (lambda: dict(Theirs().state_dict()), Mine, flax.load_into),
}


@pytest.mark.parametrize("kind", LOAD)
def test_features_of_a_flattened_convolution_are_reordered(kind: str) -> None:
    make, target, load = LOAD[kind]
    source, model = make(), target()
    plan = match(source, model)
    assert len(plan.questions) == 2
    for question in plan.questions:
        assert f"the {C} channels of conv" in question.reason
        assert f"at {Y * X} places" in question.reason
    with pytest.raises(ValueError, match="flattened: the source has channels"):
        load(model, source)
    filled = load(model, source, answered(plan))
    draw = None if kind == "state" else lambda rng: (rng.normal(size=(2, Y, X, 3)),)
    assert prove(source, filled, answered(plan), inputs=draw).same


FIRST = "channels_first"
ORDERS: dict[str, tuple[Any, Any, int]] = {  # source, target, questions
    "first": (lambda: of_keras(FIRST), of_keras, 2),
    "to nnx": (lambda: of_keras(FIRST), Mine, 2),
    "back": (Mine, lambda: of_keras(FIRST), 2),
    "flatten moves": (lambda: of_keras(FIRST, FIRST), of_keras, 0),
    "permute moves": (lambda: of_keras(FIRST, by=(2, 3, 1)), Mine, 0),
    "alike": (Theirs, lambda: of_keras(FIRST), 0),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_keras_may_flatten_channels_first(kind: str) -> None:
    make, target, questions = ORDERS[kind]
    source, model = make(), target()
    plan = match(source, model)
    assert len(plan.questions) == questions
    filled = (flax if target is Mine else keras).load_into(model, source, answered(plan))

    def draw(rng: np.random.Generator) -> Any:
        x = rng.normal(size=(2, Y, X, 3))
        rows = {"source": source, "target": filled}
        first = {k for k, one in rows.items() if getattr(one, "input_shape", ())[1:2] == (3,)}
        return {k: (x.transpose(0, 3, 1, 2) if k in first else x,) for k in rows}

    assert prove(source, filled, answered(plan), inputs=draw).same


@pytest.mark.parametrize("way", ["to nnx", "back"])
def test_two_heads_whose_names_tell_nothing_are_reordered_by_the_lines_of_each(way: str) -> None:
    theirs, mine = torch.nn.ModuleDict(), nnx.Dict()
    for net, keys in ((theirs, ("left", "right")), (mine, ("one", "two"))):
        pair = (Theirs().conv, *(torch.nn.Linear(C * Y, OUT) for _ in keys))
        if net is mine:
            dense = (nnx.Linear(C * Y, OUT, rngs=nnx.Rngs(0)) for _ in keys)
            pair = (Mine().conv, *dense)
        for key, layer in zip(("conv", *keys), pair, strict=True):
            net[key] = layer
    plan = match(theirs, mine) if way == "to nnx" else match(mine, theirs)
    ends = f"({C} p0)", f"(p0 {C})"
    wanted = "o0 {} -> {} o0".format(*ends) if way == "to nnx" else "{1} o0 -> o0 {0}".format(*ends)
    for question in plan.questions:
        assert f"it reads {C * Y} features" in question.reason
        kernels = [
            line for lines in question.examples for line in lines if "bias" not in line.target
        ]
        assert [line.arrow for line in kernels] == [wanted] * 2
    first, second = (q.examples[n] for n, q in enumerate(plan.questions))
    left = plan.with_lines(*first).questions[0]
    assert left.examples == (second,)
    assert "one layer of these shapes is left, and no name shows" in left.reason


def normed(reads: bool) -> tuple[Any, Any]:
    """Two blocks that read an image through a norm, or make one, of torch and as a tree of Flax."""
    size = C * Y
    theirs, mine = torch.nn.ModuleList(), list[Any]()
    ends, dense = ((3, C), (size, OUT)) if reads else ((C, 2), (OUT, size))
    for _ in range(2):
        norm = torch.nn.BatchNorm1d(size)
        torch.nn.init.normal_(norm.bias)
        layers = {"conv": torch.nn.Conv2d(*ends, 3), "norm": norm, "fc": torch.nn.Linear(*dense)}
        theirs.append(torch.nn.ModuleDict(layers if reads else dict(reversed(layers.items()))))
        rows = {"conv": (3, 3, *ends), "fc": dense}
        block = {
            key: {"kernel": np.zeros(x, "f"), "bias": np.zeros(x[-1], "f")}
            for key, x in rows.items()
        }
        block["norm"] = {key: np.zeros(size, "f") for key in ("scale", "bias", "mean", "var")}
        mine.append(block)
    return torch.nn.ModuleDict({"blocks": theirs}), {"blocks": mine}


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("reads", [True, False])
def test_a_norm_of_flattened_features_is_reordered(reads: bool, ordered: bool) -> None:
    source, target = normed(reads)
    state = source if ordered else dict(sorted(source.state_dict().items()))
    filled = equinox.load_into(target, state, answered(match(state, target)))
    for ours, block in zip(source["blocks"], filled["blocks"], strict=True):
        wanted = ours["norm"].bias.detach().numpy().reshape(C, Y).T.ravel()
        np.testing.assert_array_equal(block["norm"]["bias"], wanted)


@pytest.mark.parametrize("transposed", [False, True])
def test_features_that_become_an_image_are_reordered(transposed: bool) -> None:
    class Decoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(3, C * Y * X)
            kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
            self.conv = kind(C, 2, 3, padding=1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.conv(self.fc(x).view(-1, C, Y, X)).permute(0, 2, 3, 1)

    class Other(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.fc = nnx.Linear(3, C * Y * X, rngs=rngs)
            kind = partial(nnx.ConvTranspose, transpose_kernel=True) if transposed else nnx.Conv
            self.conv = kind(C, 2, (3, 3), rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.conv(self.fc(x).reshape(-1, Y, X, C))

    source = Decoder()
    plan = match(source, Other())
    assert [q.target for q in plan.questions if "flattened" in q.reason] == ["fc/kernel"]
    if transposed:
        plan = plan.with_lines(
            Line("conv/kernel", ("conv.weight",), "i o y x -> y x o i"),
            Line("conv/bias", ("conv.bias",)),
        )
    model = flax.load_into(Other(), source, answered(plan))
    assert prove(source, model, answered(plan), inputs=lambda rng: (rng.normal(size=(2, 3)),)).same


# Shapes by name, and the layers that are asked about.
STATES: dict[str, tuple[dict[str, tuple[int, ...]], list[str]]] = {
    "vgg": (
        {"classifier.0": (9, 72), "classifier.3": (5, 9), "features.0": (4, 3, 3, 3),
         "features.10": (8, 4, 3, 3)},
        ["classifier/0/kernel"],
    ),
    "pooled": ({"conv": (8, 3, 3, 3), "fc": (5, 8)}, []),
    "resnet": ({"conv1": (4, 3, 7, 7), "fc": (5, 16), "layer4.conv": (16, 4, 3, 3)}, []),
    "densenet": ({"classifier": (5, 16), "features.conv": (8, 3, 3, 3), "features.norm": (16,)}, []),
    "vit": ({"patch": (8, 3, 4, 4), "q": (8, 8), "up": (32, 8), "z_down": (8, 32)}, []),
    "joined channels": (
        {"conv": (8, 3, 3, 3), "block.conv": (8, 24, 3, 3), "block.norm": (24,), "fc": (5, 32),
         "norm": (32,)},
        [],
    ),
    "times": ({"conv": (8, 3, 3, 3), "mlp": (8, 32), "time.0": (32, 6)}, []),
}  # fmt: skip


def state_of(shapes: dict[str, tuple[int, ...]]) -> tuple[dict[str, Any], Any]:
    """A state dict of layers of these shapes, and a tree of Flax for it."""
    state, target = dict[str, Any](), dict[str, Any]()
    for key, (out, *rest) in shapes.items():
        inner = target
        for part in key.split("."):
            inner = inner.setdefault(part, {})
        inner[("kernel" if rest else "scale")] = np.zeros((*rest[1:], *rest[:1], out), "float32")
        inner["bias"] = np.zeros(out, "float32")
        state |= {f"{key}.weight": np.zeros((out, *rest), "float32"), f"{key}.bias": inner["bias"]}
    return state, target


@pytest.mark.parametrize("name", STATES)
def test_only_features_that_no_layer_makes_are_asked_about(name: str) -> None:
    shapes, asked = STATES[name]
    state, target = state_of(shapes)
    source = dict(sorted(state.items()))
    plan = match(source, target)
    assert [q.target for q in plan.questions if "flattened" in q.reason] == asked
    assert asked or equinox.load_into(target, source)


def test_the_order_of_a_state_dict_shows_which_layer_makes_features(tmp_path: Path) -> None:
    shapes = {"stem": (4, 3, 3, 3), "fc": (5, 24), "up": (24, 5), "out": (6, 24)}
    state, target = state_of(shapes)
    torch.save({k: torch.from_numpy(x) for k, x in state.items()}, tmp_path / "a.pt")
    for source in (state, tmp_path / "a.pt"):
        assert [one.target for one in match(source, target).questions] == ["fc/kernel"]
    assert match(dict(sorted(state.items())), target).questions == ()  # sizes alone do not tell


def test_models_of_one_order_are_not_asked_about() -> None:
    source = Theirs()
    assert match(source, Theirs()).questions == ()


def test_a_conversion_notes_them(tmp_path: Any) -> None:
    state = {key: x.numpy() for key, x in Theirs().state_dict().items()}
    checkpoint.write(tmp_path / "a.npz", state)
    notes = pipeline.plan(tmp_path / "a.npz", to="flax")[0].notes
    assert any(f"advantage ({C} channels x {Y * X}), value" in note for note in notes)
    pipeline.convert(tmp_path / "a.npz", tmp_path / "b.npz", to="flax")
    for path, to, noted in (("b", "torch", True), ("b", "keras", False), ("a", "torch", False)):
        notes = pipeline.plan(tmp_path / f"{path}.npz", to=to)[0].notes
        assert any("flattened" in note for note in notes) == noted


# Names of two convolutions and a dense layer, which sort in another order than the model has them.
UNSORTED = [("b_stem", "a_body", "c_head"), ("c_stem", "b_body", "a_head"), ("a", "c", "b")]


def files_of(folder: Path, *layers: tuple[str, tuple[int, ...]]) -> dict[str, Path]:
    """Layers of these names and shapes of torch, as a file of torch and one of Keras, by target."""
    theirs, mine, names = dict[str, Any](), dict[str, Any](), dict[str, str]()
    for (name, (out, *rest)), group in zip(layers, ("conv2d", "conv2d_1", "dense"), strict=True):
        shape = (*rest[1:], rest[0], out)
        for key, slot, ours, keras_has in (
            ("weight", 0, (out, *rest), shape),
            ("bias", 1, (out,), (out,)),
        ):
            theirs[f"{name}.{key}"] = np.zeros(ours, "f")
            mine[f"layers/{group}/vars/{slot}"] = np.zeros(keras_has, "f")
        names[f"layers/{group}"] = name
    paths = {"flax": folder / "a.npz", "torch": folder / "b.weights.h5"}
    checkpoint.write(paths["flax"], dict(sorted(theirs.items())))
    checkpoint.write(paths["torch"], mine, names=names)
    return paths


@pytest.mark.parametrize("names", UNSORTED)
def test_the_order_of_names_decides_nothing(names: tuple[str, str, str], tmp_path: Path) -> None:
    shapes = ((8, 3, 3, 3), (16, 8, 3, 3), (5, 144))
    for to, path in files_of(tmp_path, *zip(names, shapes, strict=True)).items():
        notes = pipeline.plan(path, to=to)[0].notes
        assert any("(16 channels x 9)" in note for note in notes), notes


def test_a_note_is_left_out_if_several_convolutions_fit(tmp_path: Path) -> None:
    """Sizes do not tell which of two towers the dense layer reads."""
    layers = ("a", (8, 3, 3, 3)), ("b", (16, 3, 3, 3)), ("c", (5, 144))
    for to, path in files_of(tmp_path, *layers).items():
        assert not any("flattened" in note for note in pipeline.plan(path, to=to)[0].notes)


def test_both_ends_of_an_autoencoder_are_asked_about() -> None:
    """The features that its decoder makes are as many as its encoder reads, in the order of layers."""
    shape = (C * Y * X, OUT)
    theirs = torch.nn.ModuleDict({
        "conv": torch.nn.Conv2d(3, C, 3), "enc": torch.nn.Linear(*shape),
        "dec": torch.nn.Linear(*shape[::-1]), "up": torch.nn.Conv2d(C, 3, 3),
    })  # fmt: skip
    rngs = nnx.Rngs(0)
    mine = nnx.Dict(
        conv=nnx.Conv(3, C, (3, 3), rngs=rngs), enc=nnx.Linear(*shape, rngs=rngs),
        dec=nnx.Linear(*shape[::-1], rngs=rngs), up=nnx.Conv(C, 3, (3, 3), rngs=rngs),
    )  # fmt: skip
    asked = [one.target for one in match(theirs, mine).questions]
    assert sorted(asked) == ["dec/kernel", "enc/kernel"]
