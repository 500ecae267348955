"""Two sides are the same, or the findings name the leaf, the element and the stage."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmha import MHAParams, Semantics, checkpoint
from jaxmha.converters import flax, keras, torch
from jaxmha.converters.discovery import attention_blocks
from jaxmha.converters.layout import transform
from jaxmha.converters.verify import comparison
from jaxmha.params import leaves
from tests.converters import layers
from tests.converters.layers import Config
from tests.converters.test_every_layout import N, params_of

torch_config, keras_config, linen_config, nnx_config = (
    layers.configs(framework)[0] for framework in ("torch", "keras", "linen", "nnx")
)


@pytest.fixture(scope="module")
def layer() -> Any:
    """A torch layer with every bias."""
    return layers.build(torch_config)


@pytest.fixture
def params(layer: Any) -> MHAParams:
    """Its parameters, free to be spoiled."""
    return torch.from_module(layer)[0]


def report(a: Any, b: Any, **options: Any) -> comparison.BlockReport:
    """The only block of a comparison."""
    (block,) = comparison.compare(a, b, **options).blocks
    return block


def spoiled(params: MHAParams, leaf: str, change: Any) -> MHAParams:
    """The parameters with one leaf changed."""
    head, _, tail = leaf.partition(".")
    old = leaves(params)[leaf]
    new: Any = change(np.array(old)) if change is not None else None
    if tail:
        new = getattr(params, head)._replace(**{tail: new})
    changed: dict[str, Any] = {head: new}
    return params._replace(**changed)


def next_up(index: tuple[int, ...]) -> Any:
    """Changes one element by its last bit."""

    def change(array: np.ndarray) -> np.ndarray:
        array[index] = np.nextafter(array[index], np.inf, dtype=array.dtype)
        return array

    return change


@pytest.mark.slow_variants("linen*", "keras*", "nnx*")
@pytest.mark.parametrize("config", layers.cases())
def test_every_layer_is_the_same_as_its_parameters(config: Config) -> None:
    live = layers.build(config)
    converter = {"torch": torch, "keras": keras, "linen": flax, "nnx": flax}[config.framework]
    found = report(live, converter.from_module(*(live if isinstance(live, tuple) else (live,))))
    assert found.same, str(found)
    assert set(found.errors) == {"no mask", "padding", "causal"}
    assert all(0 < error < 100 for pair in found.errors.values() for error in pair)


def test_four_frameworks_hold_the_same(params: MHAParams, layer: Any) -> None:
    sides = [layer, layer.state_dict(), params, (params, Semantics()), keras.to_module(params)]
    sides += [flax.to_module(params), flax.to_module(params, kind="linen")]
    sides += [keras.export_params(params), flax.export_params(params, prefix="encoder")]
    for side in sides:
        comparison.assert_same(layer, side)
        comparison.assert_same(side, layer)


@pytest.mark.everyday(dtype=["bfloat16", "float64"])
@pytest.mark.slow_variants("bfloat16")
@pytest.mark.parametrize("dtype", layers.DTYPES)
def test_every_dtype(dtype: str) -> None:
    live = layers.build(torch_config, dtype)
    found = report(live, torch.from_module(live)[0])
    assert found.same, str(found)
    assert found.dtypes == (dtype, dtype)


def test_files_of_every_format(params: MHAParams, layer: Any, tmp_path: Path) -> None:
    state = torch.export_params(params, prefix="encoder")
    flat = keras.export_params(params, layout="keras-file", prefix="layers/multi_head_attention")
    for name in ("a.pt", "a.npz", "a.safetensors"):
        checkpoint.write(tmp_path / name, state)
    checkpoint.write(tmp_path / "a.weights.h5", flat)
    for name in ("a.pt", "a.npz", "a.safetensors", "a.weights.h5"):
        comparison.assert_same(tmp_path / name, layer)
        comparison.assert_same(
            str(tmp_path / name), tmp_path / "a.weights.h5", num_heads=torch_config.N
        )


@pytest.mark.parametrize(
    "leaf",
    [
        "query.kernel",
        "query.bias",
        "key.kernel",
        "key.bias",
        "value.kernel",
        "value.bias",
        "out.kernel",
        "out.bias",
    ],
)
def test_one_bit_is_seen_and_named(params: MHAParams, layer: Any, leaf: str) -> None:
    place = tuple(size - 2 for size in np.shape(leaves(params)[leaf]))
    found = report(layer, spoiled(params, leaf, next_up(place)))
    assert not found.same
    (difference,) = found.differences
    assert (difference.leaf, difference.index, difference.count) == (leaf, place, 1)
    assert difference.size == np.size(leaves(params)[leaf])
    assert difference.a == float(np.asarray(leaves(params)[leaf])[place]) != difference.b
    assert f"{leaf}[{', '.join(map(str, place))}]" in str(found)


def test_changed_key_bias_is_seen_though_no_output_shows_it(params: MHAParams, layer: Any) -> None:
    found = report(layer, spoiled(params, "key.bias", lambda bias: bias + 5))
    assert not found.same
    assert [d.leaf for d in found.differences] == ["key.bias"]
    assert all(max(pair) < 10 * min(pair) for pair in found.errors.values())
    assert found.departs is not None
    assert found.departs.startswith("key (")
    assert found.departs.endswith("the output does not show it")


def test_dropped_key_bias_is_seen(params: MHAParams, layer: Any) -> None:
    found = report(layer, spoiled(params, "key.bias", None))
    assert [str(d) for d in found.differences] == ["key.bias: only in the first"]
    assert not found.same


@pytest.mark.parametrize(
    ("known_error", "stage"),
    [
        (lambda p: p._replace(query=p.key, key=p.query), "query"),
        (lambda p: spoiled(p, "query.kernel", lambda x: transposed(x)), "query"),
        (lambda p: spoiled(p, "key.kernel", lambda x: transposed(x)), "key"),
        (lambda p: spoiled(p, "value.kernel", lambda x: transposed(x)), "value"),
        (lambda p: spoiled(p, "value.bias", None), "value"),
        (lambda p: spoiled(p, "out.kernel", lambda x: x.reshape(x.shape[::-1]).T), "output"),
        (lambda p: spoiled(p, "out.bias", lambda x: x * 0), "output"),
        (lambda p: (p, Semantics(scale=0.5)), "logits"),
        (lambda p: (p, Semantics(logits_soft_cap=2.0)), "logits"),
    ],
)
def test_the_first_stage_that_departs(
    params: MHAParams, layer: Any, known_error: Any, stage: str
) -> None:
    found = report(layer, known_error(params))
    assert not found.same
    assert found.departs is not None
    assert found.departs.split(" ")[0].rstrip(":") == stage
    assert found.differences or found.behaviour


def transposed(kernel: np.ndarray) -> np.ndarray:
    """The known errors that square weights let through."""
    D = len(kernel)
    return np.ascontiguousarray(kernel.reshape(D, D).T).reshape(kernel.shape)


def test_behaviour_is_named(params: MHAParams) -> None:
    found = report((params, Semantics(add_zero_attn=True)), (params, Semantics()))
    assert found.behaviour == ("add_zero_attn is True and False",)
    assert not found.same


def test_a_layer_that_ignores_its_mask_is_caught(layer: Any) -> None:
    import torch as framework

    class Careless(framework.nn.MultiheadAttention):
        def forward(self, query: Any, key: Any, value: Any, **masks: Any) -> Any:  # type: ignore[override]
            return super().forward(query, key, value, need_weights=False)

    careless = Careless(torch_config.Dq, torch_config.N, batch_first=True)
    careless.load_state_dict(layer.state_dict())
    found = report(layer, careless.eval())
    assert not found.differences
    assert not found.same
    assert found.errors["no mask"][1] < 100
    assert found.errors["padding"][1] > 1000
    assert found.departs is not None
    assert "a live layer computes something else" in found.departs


def test_different_dtypes_are_explained(params: MHAParams) -> None:
    half = spoiled(params, "query.kernel", lambda x: x.astype(np.float16))
    (difference,) = report(params, half).differences
    assert "float32" in str(difference)
    assert "float16" in str(difference)
    assert "the second is the first, rounded" in str(difference)
    wrong = spoiled(
        params,
        "query.kernel",
        lambda x: (x + np.eye(len(x), 1)[..., None]).astype(np.float16),
    )
    assert "rounded" not in str(report(params, wrong).differences[0])


def test_blocks_without_counterpart(params: MHAParams) -> None:
    one = torch.export_params(params, prefix="a")
    two = one | torch.export_params(params, prefix="b")
    found = comparison.compare(one, two, num_heads=torch_config.N)
    assert (found.only_a, found.only_b, found.same) == ((), ("b",), False)
    assert "b: only in the second" in str(found)
    assert comparison.compare(two, one, num_heads=torch_config.N).only_a == ("b",)
    assert all(block.same for block in found.blocks)


def test_blocks_with_other_names_are_paired_in_order(params: MHAParams) -> None:
    one = torch.export_params(params, prefix="a")
    other = flax.export_params(params, prefix="b/c")
    found = comparison.compare(one, other)
    assert found.same
    assert found.notes[0].startswith("blocks are paired in order")


def test_other_sizes_are_not_the_same(params: MHAParams) -> None:
    wider = torch.from_module(layers.build(layers.configs("torch", seed=1)[0]))[0]
    assert wider.query.kernel.shape != params.query.kernel.shape
    found = report(params, wider)
    assert (found.same, found.departs) == (False, "shapes")


def test_assert_same_says_what_it_found(params: MHAParams, layer: Any) -> None:
    wrong = spoiled(params, "value.bias", next_up((0, 1)))
    with pytest.raises(AssertionError, match=r"(?s)not the same.*value.bias\[0, 1\]"):
        comparison.assert_same(layer, wrong)


def test_report_is_plain_data(params: MHAParams, layer: Any) -> None:
    import json

    found = comparison.compare(layer, spoiled(params, "key.bias", None)).to_json()
    assert json.loads(json.dumps(found))["blocks"][0]["differences"][0]["leaf"] == "key.bias"


@pytest.mark.parametrize(
    ("side", "error", "message"),
    [
        (7, TypeError, r"cannot compare a int: give a path"),
        ({"weight": np.ones((3, 3))}, ValueError, r"no attention block found in a dict"),
        ("absent.npz", ValueError, r"absent.npz"),
    ],
)
def test_what_is_no_side(side: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        comparison.compare(side, side)


def test_head_count_is_asked_for(params: MHAParams) -> None:
    state = torch.export_params(params)
    with pytest.raises(ValueError, match=r"pass num_heads="):
        comparison.compare(state, state)
    assert comparison.compare(state, state, num_heads=torch_config.N).same


def test_whole_torch_encoder() -> None:
    import torch as framework

    framework.manual_seed(0)
    block = framework.nn.TransformerEncoderLayer(21, 3, 17, batch_first=True)
    encoder = framework.nn.TransformerEncoder(block, 2, enable_nested_tensor=False).eval()
    found = comparison.compare(encoder, encoder.state_dict())
    assert [b.a for b in found.blocks] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert found.same
    with framework.no_grad():
        state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
        state["layers.1.self_attn.in_proj_bias"][4] += 1
    found = comparison.compare(encoder, state)
    assert [b.same for b in found.blocks] == [True, False]
    assert found.blocks[1].differences[0].leaf == "query.bias"


# Keras' own variables have an __array__ of before NumPy 2.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_keras_functional_model() -> None:
    import keras as framework

    def model() -> Any:
        inputs = framework.Input((7, 15))
        x = framework.layers.MultiHeadAttention(3, 5, name="first")(inputs, inputs)
        x = framework.layers.Dense(15)(x)
        return framework.Model(
            inputs, framework.layers.MultiHeadAttention(3, 5, name="second")(x, x)
        )

    framework.utils.set_random_seed(0)
    with layers.foreign():
        a, b = model(), model()
    b.set_weights(a.get_weights())
    found = comparison.compare(a, b)
    assert [block.a for block in found.blocks] == ["first", "second"]
    assert found.same, str(found)
    b.get_layer("second").value_dense.bias.assign(np.full((3, 5), 0.5, np.float32))
    assert [block.same for block in comparison.compare(a, b).blocks] == [True, False]


@pytest.mark.slow
def test_nnx_model_with_two_layers() -> None:
    from flax import nnx

    class Model(nnx.Module):  # type: ignore[misc]
        def __init__(self, seed: int) -> None:
            rngs = nnx.Rngs(seed)
            self.a = nnx.MultiHeadAttention(3, 15, decode=False, rngs=rngs)
            self.between = nnx.Linear(15, 15, rngs=rngs)
            self.b = nnx.MultiHeadAttention(5, 15, decode=False, rngs=rngs)

    model = Model(0)
    found = comparison.compare(model, Model(0))
    assert sorted(block.a for block in found.blocks) == ["a", "b"]
    assert found.same, str(found)
    assert not comparison.compare(model, Model(1)).same


def test_comparing_changes_nothing(layer: Any, params: MHAParams) -> None:
    before = layers.snapshot(layer)
    expected = {name: np.array(array) for name, array in leaves(params).items()}
    comparison.compare(layer, params)
    layers.assert_identical(layers.snapshot(layer), before)
    layers.assert_identical(params, expected)


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


def test_what_is_no_array_of_numbers_is_not_compared(layer: Any) -> None:
    import torch as framework

    state = {f"a.{name}": array for name, array in layer.state_dict().items()}
    state |= {"extra": None, "sparse": framework.eye(3).to_sparse()}
    found = comparison.compare(state, state, num_heads=layer.num_heads)
    assert (found.same, found.different) == (False, False)
    assert [left.name for left in found.not_compared] == ["extra", "extra", "sparse", "sparse"]
    assert {left.why for left in found.not_compared} == {"it is no dense array of numbers"}


def test_names_pair_whatever_the_separator_outside_attention() -> None:
    layout, plain = attention_blocks.named("dense"), np.arange(6.0)
    exported = transform.export_params(layout, params_of(layout), layout.semantics, prefix="a")
    state = exported | {"x/norm/scale": plain}
    dotted: dict[str, Any] = {name.replace("/", "."): array for name, array in state.items()}
    assert comparison.compare(state, dotted, num_heads=N).notes == ()
    dotted["x.norm.scale"] = plain + 1
    assert comparison.compare(state, dotted, num_heads=N).outside.keys() == {"x/norm/scale"}


def test_a_transpose_is_the_same_only_between_layouts() -> None:
    """GPT-2 stores the kernels of its layers transposed."""
    conv, linear = attention_blocks.named("gpt2"), attention_blocks.named("bert")
    params, kernel = params_of(conv), np.arange(35.0).reshape(5, 7)
    one = transform.export_params(conv, params, prefix="a") | {"mlp.weight": kernel}
    other = {"mlp.weight": kernel.T}
    same = transform.export_params(conv, params, prefix="a") | other
    moved = transform.export_params(linear, params, prefix="a") | other
    assert comparison.compare(one, same, num_heads=N).outside.keys() == {"mlp.weight"}
    found = comparison.compare(one, moved, num_heads=N)
    assert found.same
    assert "stored transposed, and otherwise the same: mlp.weight" in found.notes


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


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("leaf", ["query.kernel", "value.bias", "out.bias"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_not_finite_is_never_alike(params: MHAParams, leaf: str, bad: float) -> None:
    """Even where both sides hold the same bits: no output can be compared."""

    def spoil(array: np.ndarray) -> np.ndarray:
        array[(1,) * array.ndim] = bad
        return array

    side = spoiled(params, leaf, spoil)
    found = report(side, side)
    assert not found.differences
    assert not found.same
    assert f"{leaf} holds NaN or infinity" in str(found)
    assert not comparison.compare(side, side)
    assert not report(side, params).same
    assert not report(params, side).same


def test_a_forward_that_gives_nan_is_never_alike(layer: Any) -> None:
    import torch as framework

    class Broken(framework.nn.MultiheadAttention):
        def forward(self, *arguments: Any, **masks: Any) -> Any:
            out, weights = super().forward(*arguments, **masks)
            out[0, 0, 0] = float("nan")
            return out, weights

    broken = Broken(torch_config.Dq, torch_config.N, batch_first=True)
    broken.load_state_dict(layer.state_dict())
    for pair in ((layer, broken.eval()), (broken, layer), (broken, broken)):
        found = report(*pair)
        assert not found.differences
        assert not found.same
        assert found.departs is not None
        assert "a live layer computes something else" in found.departs


def test_a_mask_ignored_on_both_sides_is_noticed(layer: Any) -> None:
    import torch as framework

    class Careless(framework.nn.MultiheadAttention):
        def forward(self, query: Any, key: Any, value: Any, **masks: Any) -> Any:  # type: ignore[override]
            return super().forward(query, key, value, need_weights=False)

    careless = Careless(torch_config.Dq, torch_config.N, batch_first=True)
    careless.load_state_dict(layer.state_dict())
    found = report(careless.eval(), careless)
    assert not found.differences
    assert not found.same
    assert max(found.errors["no mask"]) < 100 < min(found.errors["padding"])
    assert found.explanation == "mask ignored"


def test_blocks_of_one_name() -> None:
    import keras as framework

    def model(count: int) -> Any:
        whole = x = framework.Input((7, 15))
        for i in range(count):
            inner = framework.Input((7, 15))
            out = framework.layers.MultiHeadAttention(3, 5, name="same")(inner, inner)
            x = framework.Model(inner, out, name=f"part_{i}")(x)
        return framework.Model(whole, x)

    with layers.foreign():
        two, three = model(2), model(3)
    found = comparison.compare(two, two)
    assert [(pair.a, pair.b) for pair in found.blocks] == [("same", "same")] * 2
    assert found.same
    assert not found.notes  # their paths pair them
    more = comparison.compare(two, three)
    assert not more.same
    assert len(more.blocks) == 2
