"""Attribution between live layers by their own arguments, and arguments that are refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from jaxmha.converters import attribute, flax
from jaxmha.converters import torch as convert
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.verify import attribution
from tests.converters.faults import (
    FAULTS,
    SIZES,
    SUMS,
    B,
    S,
    T,
    assert_sums,
    case,
    draw,
    inputs,
    noisy,
    semantic,
    with_leaves,
)


def test_what_has_no_effect_is_shown_apart() -> None:
    rng = np.random.default_rng(0)
    a, given = draw(rng), inputs(rng)
    b = semantic(fully_masked="nan")(noisy("key.bias")(a))  # a key bias cancels in the softmax
    found = attribution.between(a, b, given)
    assert found.same
    assert_sums(found)
    assert len(found.idle) == 2
    assert "key.bias" in str(found)


def test_layers_of_other_widths_are_refused() -> None:
    rng = np.random.default_rng(0)
    a, given = draw(rng), inputs(rng)
    with pytest.raises(ValueError, match="Dk=15 and 14"):
        attribution.between(a, draw(rng, SIZES | {"Dk": 14}), given)
    with pytest.raises(ValueError, match="outputs have different widths: 15 and 13"):
        attribution.between(a, draw(rng, SIZES | {"Do": 13}), given)
    # Other sizes inside: the weights cannot be swapped one by one, but all together.
    found = attribution.between(a, draw(rng, SIZES | {"N": 2, "K": 2}), given)
    assert [part.name for part in found.parts] == ["weights"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": np.ones((T, S), bool), "masks_a": {}}, "give mask= for both"),
        ({"inputs": (np.ones((1, 2, 15)),) * 2}, "expected query, key, value"),
        ({"inputs": np.ones((2, 15))}, "expected axes"),
        ({"inputs": np.ones((2, 5, 7))}, r"^query: .*B, T, Dq.* Dq=15, got shape \(2, 5, 7\)"),
        (
            {"inputs": {"query": np.ones((2, 5, 15)), "key": np.ones((2, 4, 7))}},
            r"^key: .* Dk=15.*got shape \(2, 4, 7\)",
        ),
        ({"inputs": {"quer": np.ones((2, 5, 15))}}, "the keys query, key, value, got quer"),
        ({"inputs": np.ones((0, 5, 15))}, "query: no batch rows"),
        ({"inputs": np.full((1, 1, 15), [np.nan] + [1] * 14)}, "query: 1 element is not finite"),
        ({"inputs": np.full((1, 2, 15), np.inf)}, "30 elements are not finite: .* they reach"),
        ({"masks_a": {"attn_mask": 1}, "inputs": np.ones((1, 2, 15))}, "unexpected"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    layer = draw(np.random.default_rng(0))
    with pytest.raises((ValueError, TypeError), match=message):
        attribution.attribute(layer.params, layer.params, **options)


@pytest.mark.parametrize("framework", ["torch", "nnx", "keras"])
def test_a_model_is_no_layer(framework: str) -> None:
    """One with a single layer, which would be called with the arguments of that layer."""
    x = np.zeros((2, 5, 8), np.float32)
    if framework == "torch":
        import torch

        model: Any = torch.nn.Module()
        model.attn = torch.nn.MultiheadAttention(8, 2)
    elif framework == "nnx":
        from flax import nnx

        model = nnx.Module()
        model.attn = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    else:
        keras = pytest.importorskip("keras")

        layer, inputs = keras.layers.MultiHeadAttention(2, 4, name="attn"), keras.Input((5, 8))
        model = keras.Model(inputs, layer(inputs, inputs))
    with pytest.raises(TypeError, match=r"is a model: give its layer 'attn'.*matching\.prove"):
        attribution.attribute(model, model, x, masks_a={}, masks_b={})


def test_several_layers_are_no_layer() -> None:
    model = torch.nn.Sequential(*(torch.nn.MultiheadAttention(8, 2) for _ in range(2)))
    with pytest.raises(ValueError, match=r"2 attention blocks in a Sequential .*matching\.prove"):
        attribution.attribute(model, model)


def test_inputs_by_name_default_as_in_files() -> None:
    a, b, given = case(0, next(f for f in FAULTS if f.name == "scale"))
    x, other = given[:2]
    for named, ordered in (({"query": x}, x), ({"query": x, "key": other}, (x, other, other))):
        a, b = (replace(layer, mask=None) for layer in (a, b))
        assert attribution.attribute(a, b, named) == attribution.attribute(a, b, ordered)


@pytest.mark.parametrize("row", [0, 6, 12])
def test_nan_in_weights_of_a_live_layer_is_of_these_weights(row: int) -> None:
    """Its softmax may make finite numbers of NaN: nothing that is unexplained."""
    torch.manual_seed(0)
    right, wrong = (torch.nn.MultiheadAttention(6, 2, batch_first=True) for _ in range(2))
    wrong.load_state_dict(right.state_dict())
    with torch.no_grad():
        wrong.in_proj_weight[row, 3] = float("nan")
    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)
    for a, b, count in ((right, wrong, 60), (wrong, right, -60), (wrong, wrong, 0)):
        found = attribution.attribute(a, b, x)
        assert "unexplained" not in [part.name for part in found.parts]
        assert sum(part.not_finite for part in found.parts) == count
        assert found.same == (a is b)
        if a is not b:
            assert (found.compared, found.elements) == (0, 60)
            assert np.isnan([found.total, found.relative]).all()
            assert ": nothing can be compared" in str(found)
        assert "nan rounding" not in str(found)


def test_elements_that_are_not_finite_are_in_the_headline() -> None:
    rng = np.random.default_rng(0)
    a, given = draw(rng), inputs(rng)
    broken = with_leaves(
        lambda x: {"out.bias": np.where(np.arange(15) == 2, np.nan, x["out.bias"])}
    )
    b = broken(semantic(scale=1.0)(a))
    found = attribution.between(a, b, given)
    bad, n = B * T, B * T * 15
    assert found.compared == n - bad
    assert f"{bad} of {n} elements are not finite in one of the two" in found.headline
    assert f"over the other {n - bad}: RMS" in found.headline
    assert_sums(found)


def test_a_layer_that_inverts_its_mask_is_reported_by_its_outputs() -> None:
    class Inverted(torch.nn.MultiheadAttention):
        def forward(self, *inputs: Any, **options: Any) -> Any:
            if (blocked := options.get("key_padding_mask")) is not None:
                options["key_padding_mask"] = ~blocked
            return super().forward(*inputs, **options)

    torch.manual_seed(0)
    right = torch.nn.MultiheadAttention(6, 2, batch_first=True)
    wrong = Inverted(6, 2, batch_first=True)
    wrong.load_state_dict(right.state_dict())
    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)
    found = attribute(right, wrong, x, mask=np.arange(5) < np.array([[[[3]]], [[[4]]]]))
    assert found.parts[0].name == "unexplained"
    assert "b looks like this: inverted mask" in found.parts[0].sentence
    given = {"need_weights": False}
    found = attribute(right, wrong, x, masks_a=given, masks_b=given)
    assert found.same, found


def test_torch_against_flax_by_their_own_arguments() -> None:
    """Each is called as its users call it, and the meaning of the masks is compared."""
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(10, 2, batch_first=True).eval()
    other = flax.to_module(*convert.from_module(layer))
    x = np.random.default_rng(0).normal(size=(3, 7, 10)).astype(np.float32)
    blocked: NDArray = np.arange(7) >= np.array([[7], [4], [2]])
    for given, named in ((~blocked, "rounding"), (blocked, "mask polarity")):
        found = attribute(
            layer,
            other,
            x,
            masks_a={"key_padding_mask": blocked, "need_weights": False},
            masks_b={"mask": given[:, None, None]},
        )
        assert found.parts[0].name == named, found
        assert found.same == (named == "rounding")
        assert_sums(found)
    # Fast path of torch: rows with nothing left are NaN; flax: the mean.
    blocked[2] = True
    found = attribute(
        layer,
        other,
        x,
        masks_a={"key_padding_mask": blocked},
        masks_b={"mask": ~blocked[:, None, None]},
    )
    assert [part.name for part in found.parts] == ["fully masked rows", "rounding"]
    assert found.parts[0].not_finite == -70
    assert attribute(layer, other, x, mask=~blocked[None, 1:2, None]).same


def test_the_page_says_what_was_found() -> None:
    from experiments import records
    from experiments.pages import Page

    page = Page("attribution/page.md")
    found = records.load(page.path.with_name("results.json"))
    for step in found["steps"]:
        assert (
            abs(sum(part["size"] for part in step["parts"]) - step["total"]) < SUMS * step["total"]
        )
    assert found["steps"][0]["parts"][0]["name"] == "value weights"
    assert found["steps"][-1]["same"]
    assert "size of tensor a (2) must match" in page.text(found)
    assert "rounding" in page.conclusion(found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("scores", [False, True])
def test_torch_against_keras_by_their_own_arguments(scores: bool) -> None:
    """An additive mask means its opposite in Keras; empty rows are the mean there, or 0."""
    from jaxmha.converters import attribute, keras

    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(10, 2, batch_first=True)
    other = keras.to_module(*convert.from_module(layer))
    x = np.random.default_rng(0).normal(size=(3, 7, 10)).astype(np.float32)
    blocked: NDArray = np.arange(7) >= np.array([[7], [4], [2]])
    additive = np.where(blocked, -1e9, 0.0).astype(np.float32)
    given = {"need_weights": False, "key_padding_mask": additive}
    of_keras = {"return_attention_scores": scores}
    found = attribute(
        layer, other, x, masks_a=given, masks_b=of_keras | {"attention_mask": ~blocked[:, None]}
    )
    assert [part.name for part in found.parts] == ["rounding"], found
    found = attribute(
        layer, other, x, masks_a=given, masks_b=of_keras | {"attention_mask": additive[:, None]}
    )
    assert "mask polarity" in [part.name for part in found.parts], found
    assert_sums(found)
    blocked[2] = True
    given["key_padding_mask"] = blocked
    found = attribute(
        layer, other, x, masks_a=given, masks_b=of_keras | {"attention_mask": ~blocked[:, None]}
    )
    # torch's fast path in eval: NaN.
    assert [part.name for part in found.parts] == ["fully masked rows", "rounding"], found
    assert found.parts[0].sentence.endswith("0 in b" if scores else "the mean of the values in b")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_keras_layer_of_unequal_head_widths_is_called_with_its_own_masks() -> None:
    """Keras on JAX can run it only by the path that returns scores."""
    framework = pytest.importorskip("keras")

    from jaxmha.converters import attribute, keras

    layer = framework.layers.MultiHeadAttention(2, 5, value_dim=3)
    layer.build((None, 7, 11), (None, 7, 11))
    x = np.random.default_rng(0).normal(size=(3, 7, 11)).astype(np.float32)
    valid = np.arange(7) < np.array([[7], [3], [0]])
    masks = {"attention_mask": valid[:, None]}
    own = {"mask": valid[:, None, None]}
    found = attribute(layer, keras.from_module(layer), x, masks_a=masks, masks_b=own)
    assert [part.name for part in found.parts] == ["rounding"], found
    assert found.idle == ("a fills with -1e+09 masked pairs, b excludes",)  # the path with scores
