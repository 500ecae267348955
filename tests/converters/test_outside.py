"""verify, diff and attribute compare what is outside attention, or say that they did not."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jaxmha import checkpoint
from jaxmha.converters.discovery import attention_blocks
from jaxmha.converters.layout import transform
from jaxmha.converters.migrate import pipeline
from jaxmha.converters.verify import attribution, comparands, comparison, other_tensors
from tests.converters.command_line import cli, succeeds
from tests.converters.test_every_layout import N as HEADS
from tests.converters.test_every_layout import exported, model_file, params_of

N, D, V = 2, 8, 11


def bert() -> dict[str, np.ndarray]:
    """One layer of BERT with all its other layers, biases and norms drawn."""
    rng = np.random.default_rng(0)
    linear = {
        **{f"encoder.layer.0.attention.self.{x}": (D, D) for x in ("query", "key", "value")},
        "encoder.layer.0.attention.output.dense": (D, D),
        "encoder.layer.0.intermediate.dense": (2 * D, D),
        "encoder.layer.0.output.dense": (D, 2 * D),
        "pooler.dense": (D, D),
    }
    norms = ("embeddings.LayerNorm", "encoder.layer.0.output.LayerNorm")
    state: dict[str, Any] = {"embeddings.word_embeddings.weight": rng.normal(size=(V, D))}
    for name, shape in linear.items():
        state |= {
            f"{name}.weight": rng.normal(size=shape),
            f"{name}.bias": rng.normal(size=shape[0]),
        }
    for name in norms:
        state |= {f"{name}.weight": rng.normal(size=D), f"{name}.bias": rng.normal(size=D)}
    state = {name: array.astype(np.float32) for name, array in state.items()}
    return state | {"embeddings.position_ids": np.arange(V)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BERT and what it is converted to."""
    path = tmp_path_factory.mktemp("outside")
    model_file(path / "bert.safetensors", bert(), {"num_attention_heads": N, "hidden_size": D})
    for name, layout in (("flax.safetensors", "flax"), ("keras.weights.h5", "keras")):
        pipeline.convert(path / "bert.safetensors", path / name, to=layout)
    return path


def spoiled(folder: Path, change: Any, name: str = "flax.safetensors") -> Path:
    """The converted file with something changed."""
    with checkpoint.open(folder / name) as file:
        state = {key: file[key] for key in file}
        change(state)
        target = folder / f"broken-{name}"
        settings: dict[str, Any] = (
            {"names": file.names} if name.endswith("h5") else {"metadata": file.metadata}
        )
        checkpoint.write(target, state, force=True, **settings)
    return target


def printed(*arguments: Any) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON, and the words of a command."""
    data = cli(*arguments, "--json")
    text = cli(*arguments)
    assert data.exit_code == text.exit_code, text.output
    return data.exit_code, json.loads(data.stdout), " ".join(text.stdout.split())


@pytest.mark.slow_variants("flax*-diff", "keras*-verify")
@pytest.mark.parametrize("command", ["verify", "diff"])
@pytest.mark.parametrize("name", ["flax.safetensors", "keras.weights.h5"])
def test_whole_models_are_the_same_in_every_framework(
    folder: Path, command: str, name: str
) -> None:
    code, data, text = printed(command, folder / "bert.safetensors", folder / name)
    guessed = name.startswith("keras")  # the order of its layers of one class and shape
    assert (code, data["same"], data["not_compared"]) == (int(guessed), not guessed, []), text
    assert bool(data["unproven"]) == guessed
    assert "guess" in text if guessed else text.endswith("the same")


KERNEL = "pooler/dense/kernel"


def zeroed(state: dict[str, Any]) -> None:
    state[KERNEL] *= 0


def transposed(state: dict[str, Any]) -> None:
    state[KERNEL] = state[KERNEL].T.copy()


def one_bit(state: dict[str, Any]) -> None:
    state["embeddings/LayerNorm/scale"].view(np.int32)[3] ^= 1


def one_nan(state: dict[str, Any]) -> None:
    state["embeddings/LayerNorm/scale"][0] = np.nan


def buffer(state: dict[str, Any]) -> None:
    state["embeddings.position_ids"][2] += 1


def rounded(state: dict[str, Any]) -> None:
    state[KERNEL] = state[KERNEL].astype(np.float16)


def reshaped(state: dict[str, Any]) -> None:
    state["pooler/dense/bias"] = state["pooler/dense/bias"][:-1].copy()


@pytest.mark.slow_variants(
    "*-diff", "!zeroed-*-diff", "transposed-*", "rounded-*", "zeroed-*-verify"
)
@pytest.mark.parametrize("command", ["verify", "diff"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (zeroed, "pooler.dense.weight"),
        (transposed, "pooler.dense.weight"),
        (one_bit, "embeddings.LayerNorm.weight"),
        (one_nan, "embeddings.LayerNorm.weight"),
        (buffer, "embeddings.position_ids"),
        (rounded, "pooler.dense.weight"),
        (reshaped, "pooler.dense.bias"),
    ],
)
def test_differences_outside_attention_are_named(
    folder: Path, command: str, change: Any, named: str
) -> None:
    broken = spoiled(folder, change)
    code, data, text = printed(command, folder / "bert.safetensors", broken)
    assert (code, data["same"], data["different"]) == (1, False, True)
    assert list(data["outside"]) == [named]
    assert f"differs, outside attention: {named}" in text


def test_a_file_of_keras_is_read_by_its_own_convention(folder: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["layers/layer_normalization/vars/1"][0] += 1

    broken = spoiled(folder, change, "keras.weights.h5")
    code, data, _ = printed("verify", folder / "bert.safetensors", broken)
    assert (code, list(data["outside"])) == (1, ["embeddings.LayerNorm.bias"])


@pytest.mark.slow_variants("False-diff", "True-verify")
@pytest.mark.parametrize("command", ["verify", "diff"])
@pytest.mark.parametrize("swap", [False, True])
def test_a_tensor_of_one_side_alone_is_never_passed(folder: Path, command: str, swap: bool) -> None:
    """A tied head among them, which some formats leave out."""

    def change(state: dict[str, Any]) -> None:
        state["cls/decoder/kernel"] = state["embeddings/word_embeddings/embedding"].T.copy()

    sides = [folder / "bert.safetensors", spoiled(folder, change)]
    code, data, text = printed(command, *(sides[::-1] if swap else sides))
    assert (code, data["same"], data["different"]) == (1, False, False)
    (left,) = data["not_compared"]
    assert (left["name"], left["source"]) == ("cls/decoder/kernel", "first" if swap else "second")
    assert "not compared: cls/decoder/kernel" in text
    assert text.endswith("not fully compared: 1 tensor was not compared, and nothing else differs")


def test_a_bias_of_zeros_changes_nothing(folder: Path) -> None:
    with checkpoint.open(folder / "bert.safetensors") as file:
        state = {name: file[name] for name in file}
    other = {name: x for name, x in state.items() if name != "pooler.dense.bias"}
    state["pooler.dense.bias"] *= 0
    found = comparison.compare(state, other, num_heads=N)
    assert found.same
    assert found.notes == (
        "biases of zeros in only one source, which change nothing: pooler.dense.bias",
    )
    state["pooler.dense.bias"][0] = 1
    assert not comparison.compare(state, other, num_heads=N)


@pytest.mark.parametrize("layout", ["gpt2", "linear"])
def test_a_transposed_kernel_is_not_read_as_the_other_kind(layout: str) -> None:
    """By its shape the transpose of a Conv1D is a Linear, and of a Linear a Conv1D."""
    rng = np.random.default_rng(0)
    names = {
        "gpt2": ("c_attn c_proj", "mlp.c_fc"),
        "linear": ("q_proj k_proj v_proj out_proj", "up"),
    }
    own, other = names[layout]
    shapes = {f"h.0.attn.{name}": (D, D) for name in own.split()} | {f"h.0.{other}": (2 * D, D)}
    if layout == "gpt2":
        shapes |= {"h.0.attn.c_attn": (D, 3 * D), "h.0.mlp.c_fc": (D, 2 * D)}
    state: dict[str, Any] = {}
    for name, shape in shapes.items():
        width = shape[1] if layout == "gpt2" else shape[0]
        state |= {f"{name}.weight": rng.normal(size=shape), f"{name}.bias": rng.normal(size=width)}
    kernel = f"h.0.{other}.weight"
    turned = state | {kernel: state[kernel].T.copy()}
    for pair in ((state, turned), (turned, state)):
        assert list(comparison.compare(*pair, num_heads=N).outside) == [kernel]


def test_one_block_asked_for_is_compared_alone(folder: Path) -> None:
    options = ("--block", "encoder.layer.0.attention")
    code, _, text = printed("diff", folder / "bert.safetensors", spoiled(folder, zeroed), *options)
    assert code == 0
    assert ": nothing else was compared" in text


def test_attribute_names_differences_outside_its_block(folder: Path) -> None:
    found = attribution.attribute(folder / "bert.safetensors", spoiled(folder, zeroed))
    assert not found.same
    assert not found.parts
    assert found.outside == (f"pooler.dense.weight differs: {D * D} of {D * D} elements differ",)
    assert attribution.attribute(folder / "bert.safetensors", folder / "flax.safetensors").same


def test_unchecked_conversions_are_not_called_verified(folder: Path, tmp_path: Path) -> None:
    source, target = folder / "bert.safetensors", tmp_path / "a.safetensors"
    arguments = ["convert", str(source), str(target), "--to", "flax", "--check", "none"]
    result = succeeds(*arguments)
    assert "verified" not in result.stdout
    assert "not compared with the source" in " ".join(result.stdout.split())


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("framework", ["torch", "keras", "nnx"])
def test_other_layers_of_live_models_are_compared(framework: str) -> None:
    a, b, spoil = {"torch": _torch, "keras": _keras, "nnx": _nnx}[framework]()
    sources = [comparands.read(model).source for model in (a, b)]
    assert other_tensors.compare(*sources) == other_tensors.NOTHING
    assert len(sources[0].info) > len(sources[0].taken)
    spoil()
    found = other_tensors.compare(*(comparands.read(model).source for model in (a, b)))
    assert (len(found.differing), found.left) == (1, ())


def _torch() -> tuple[Any, Any, Any]:
    models: list[Any] = [torch.nn.TransformerEncoderLayer(D, N, 5) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    return models[0], models[1], lambda: torch.nn.init.ones_(models[1].norm1.bias)


def _keras() -> tuple[Any, Any, Any]:
    import keras

    def model() -> Any:
        inputs = keras.Input((3, D))
        x = keras.layers.MultiHeadAttention(N, D // N)(inputs, inputs)
        return keras.Model(inputs, keras.layers.LayerNormalization()(keras.layers.Dense(D)(x)))

    models: list[Any] = [model(), model()]
    models[1].set_weights(models[0].get_weights())
    return models[0], models[1], lambda: models[1].layers[-1].gamma.assign(np.zeros(D, "f"))


def _nnx() -> tuple[Any, Any, Any]:
    from flax import nnx

    class Model(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.attention = nnx.MultiHeadAttention(N, D, decode=False, rngs=rngs)
            self.norm = nnx.LayerNorm(D, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)

    models: list[Any] = [Model(), Model()]
    return models[0], models[1], lambda: models[1].norm.scale.set_value(np.zeros(D, "f"))


def test_what_is_not_compared_is_counted(layer: Any) -> None:
    state = {f"a.{name}": array.numpy() for name, array in layer.state_dict().items()}
    one, two = ({f"{side}{i}": np.ones(3) for i in range(n)} for side, n in (("a", 1), ("b", 2)))
    heads = layer.num_heads
    assert comparison.compare(state, state, num_heads=heads).notes == ()
    found = comparison.compare({**state, **one}, {**state, **two}, num_heads=heads)
    assert (found.same, found.different) == (False, False)
    assert [(left.name, left.source) for left in found.not_compared] == [
        ("a0", "first"),
        ("b0", "second"),
        ("b1", "second"),
    ]
    assert "not compared: a0, of the first: no tensor of the second has this name" in str(found)


def test_every_part_of_a_large_tensor_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_tensors, "_ROWS", 64)  # bytes: two rows of the embeddings
    one, other = bert(), bert()
    other["embeddings.word_embeddings.weight"][[0, 5, V - 1], 3] += 1
    (found,) = comparison.compare(one, other, num_heads=N).outside.values()
    assert found == f"3 of {V * D} elements differ"


def test_what_is_no_array_of_numbers_is_not_compared(layer: Any) -> None:
    import torch as framework

    state = {f"a.{name}": array for name, array in layer.state_dict().items()}
    state |= {"extra": None, "sparse": framework.eye(3).to_sparse()}
    found = comparison.compare(state, state, num_heads=layer.num_heads)
    assert (found.same, found.different) == (False, False)
    assert [left.name for left in found.not_compared] == ["extra", "extra", "sparse", "sparse"]
    assert {left.why for left in found.not_compared} == {"it is no dense array of numbers"}


def test_names_pair_whatever_the_separator_outside_attention() -> None:
    plain = np.arange(6.0)
    state = exported("dense", "a") | {"x/norm/scale": plain}
    dotted: dict[str, Any] = {name.replace("/", "."): array for name, array in state.items()}
    assert comparison.compare(state, dotted, num_heads=HEADS).notes == ()
    dotted["x.norm.scale"] = plain + 1
    assert comparison.compare(state, dotted, num_heads=HEADS).outside.keys() == {"x/norm/scale"}


def test_a_transpose_is_the_same_only_between_layouts() -> None:
    """GPT-2 stores the kernels of its layers transposed."""
    conv, linear = attention_blocks.named("gpt2"), attention_blocks.named("bert")
    params, kernel = params_of(conv), np.arange(35.0).reshape(5, 7)
    one = transform.export_params(conv, params, prefix="a") | {"mlp.weight": kernel}
    other = {"mlp.weight": kernel.T}
    same = transform.export_params(conv, params, prefix="a") | other
    moved = transform.export_params(linear, params, prefix="a") | other
    assert comparison.compare(one, same, num_heads=HEADS).outside.keys() == {"mlp.weight"}
    found = comparison.compare(one, moved, num_heads=HEADS)
    assert found.same
    assert "stored transposed, and otherwise the same: mlp.weight" in found.notes


@pytest.mark.slow_variants("False-shape", "True-value")
@pytest.mark.parametrize("change", ["value", "shape", "dtype"])
@pytest.mark.parametrize("as_file", [False, True])
def test_what_has_one_name_outside_attention_is_compared(
    layer: Any, change: str, tmp_path: Path, as_file: bool
) -> None:
    state = {f"a.{name}": array.numpy() for name, array in layer.state_dict().items()}
    norm = np.ones(3, np.float32)
    other = {"value": norm + 1, "shape": norm[:, None], "dtype": norm.view(np.int32)}[change]
    sides: list[Any] = [state | {"norm": norm, "same": norm}, state | {"norm": other, "same": norm}]
    if as_file:
        for i, side in enumerate(sides):
            checkpoint.write(tmp_path / f"{i}.npz", side)
            sides[i] = tmp_path / f"{i}.npz"
    assert comparison.compare(sides[0], sides[0], num_heads=layer.num_heads).same
    found = comparison.compare(*sides, num_heads=layer.num_heads)
    assert (found.same, set(found.outside), found.notes) == (False, {"norm"}, ())
    assert "norm: differs, outside attention" in str(found)


@pytest.mark.parametrize("wrong", ["", "pooler.dense.weight", "pooler.dense.bias"])
def test_tensors_that_are_only_rounded_are_recognised(wrong: str) -> None:
    """A bias of zeros in one source alone changes nothing, rounded or not."""
    state = {name: array.astype(np.float32) for name, array in bert().items()}
    other = {name: array.astype(np.float16) for name, array in state.items()}
    zero = "encoder.layer.0.attention.self.key.bias"
    state[zero] = np.zeros_like(state[zero])
    del other[zero]
    if wrong:
        other[wrong] = other[wrong] * np.float16(2)
    report = comparison.compare(state, other, num_heads=N)
    assert report.only_rounded == (not wrong)
    assert not report.same
    json.dumps(report.to_json())
