"""A difference between two layers is taken apart: every injected fault is named, parts sum to it."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxmha import Mask
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.verify import attribution, oracle
from jaxmha.converters.verify.captured_layer import Blocked, Inputs, Layer
from jaxmha.params import CANONICAL, from_leaves, leaves

# N * H = D, so that transposed and exchanged kernels fit.
SIZES = {"N": 3, "K": 3, "H": 5, "h": 5, "Dq": 15, "Dk": 15, "Dv": 15, "Do": 15}
GROUPED = SIZES | {"N": 6, "K": 2}
B, T, S = 3, 7, 11
LENGTHS = np.array([11, 8, 5])
# Parts sum to the whole within this part of it, in float64.
SUMS = 1e-12


def draw(rng: np.random.Generator, sizes: dict[str, int] = SIZES) -> Layer:
    """A causal and padded layer with random weights."""
    arrays: dict[str, Any] = {
        name: 0.4 * rng.normal(size=[sizes[letter] for letter in axes.split()])
        for name, axes in CANONICAL.items()
        if name.endswith((".kernel", ".bias")) and not name.startswith("gate")
    }
    padding = np.arange(S) < LENGTHS[:, None]
    mask = Mask.causal(S - T) & Mask.padding(key_value=padding)
    return Layer(from_leaves(arrays), mask=mask)


def inputs(rng: np.random.Generator) -> Inputs:
    query, key, value = (rng.normal(size=(B, length, 15)) for length in (T, S, S))
    return query, key, value


def with_leaves(change: Callable[[dict[str, NDArray]], dict[str, NDArray]]) -> Any:
    """A fault that rewrites weights."""

    def fault(layer: Layer) -> Layer:
        arrays: dict[str, Any] = dict(leaves(layer.params))
        return replace(layer, params=from_leaves(arrays | change(arrays)))

    return fault


def semantic(**fields: Any) -> Any:
    return lambda layer: replace(layer, semantics=replace(layer.semantics, **fields))


def masked(**fields: Any) -> Any:
    return lambda layer: replace(layer, mask=replace(layer.mask, **fields))


def noisy(name: str) -> Any:
    return with_leaves(
        lambda x: {name: x[name] + 0.3 * np.sin(np.arange(x[name].size)).reshape(x[name].shape)}
    )


def without(name: str) -> Any:
    def fault(layer: Layer) -> Layer:
        return replace(
            layer, params=from_leaves({n: x for n, x in leaves(layer.params).items() if n != name})
        )

    return fault


def exchanged(one: str, other: str) -> Any:
    return with_leaves(
        lambda x: {
            f"{a}.{part}": x[f"{b}.{part}"]
            for a, b in ((one, other), (other, one))
            for part in ("kernel", "bias")
        }
    )


def interleaved(x: dict[str, NDArray]) -> dict[str, NDArray]:
    """Rows packed as (qkv N H) are read as (N qkv H)."""
    names = [f"{role}.kernel" for role in ("query", "key", "value")]
    packed = np.stack([x[name] for name in names], axis=1).reshape(15, -1)
    return dict(zip(names, np.moveaxis(packed.reshape(15, 3, 3, 5), 2, 0), strict=True))


def heads_of_size_three(layer: Layer) -> Layer:
    shapes = {"N": 5, "K": 5, "H": 3, "h": 3, "Dq": 15, "Dk": 15, "Dv": 15, "Do": 15}
    arrays: dict[str, Any] = {
        name: np.asarray(x).reshape([shapes[letter] for letter in CANONICAL[name].split()])
        for name, x in leaves(layer.params).items()
    }
    return replace(layer, params=from_leaves(arrays))


def tiled(layer: Layer) -> Layer:
    """Groups of key/value heads are tiled where they are to be repeated."""
    done: Layer = with_leaves(
        lambda x: {
            name: np.tile(x[name], (*(1,) * (x[name].ndim - 2), 3, 1))
            for name in ("key.kernel", "key.bias", "value.kernel", "value.bias")
        }
    )(layer)
    return done


def rows_to_heads(layer: Layer) -> Layer:
    padding = layer.mask.key_value_padding
    kept = replace(layer.mask, key_value_padding=None)
    return replace(layer, mask=kept & Mask.dense(padding[None, :, None]))


def padded(change: Callable[[NDArray], NDArray]) -> Any:
    return lambda layer: masked(key_value_padding=change(layer.mask.key_value_padding))(layer)


def rounded(x: dict[str, NDArray]) -> dict[str, NDArray]:
    return {name: array.astype(np.float32) for name, array in x.items()}


class Fault(NamedTuple):
    """A change of a layer, and the name that the attribution has for it.

    `only`: a field of weights or mask that no second fault may touch. `loud`: logits are large.
    """

    name: str
    named: str
    make: Callable[[Layer], Layer]
    touches: str
    sizes: dict[str, int] = SIZES
    loud: bool = False
    empty: bool = False


FAULTS = (
    Fault("query weights", "query weights", noisy("query.kernel"), "query"),
    Fault("value weights", "value weights", noisy("value.kernel"), "value"),
    Fault("query and key exchanged", "query and key exchanged", exchanged("query", "key"), "query key"),
    Fault("key and value exchanged", "key and value exchanged", exchanged("key", "value"), "key value"),
    Fault("interleaved packing", "interleaved packing", with_leaves(interleaved), "query key value"),
    Fault("output transposed", "transposed kernel", with_leaves(lambda x: {"out.kernel": x["out.kernel"].reshape(15, 15).T.reshape(3, 5, 15)}), "out"),
    Fault("heads as sizes", "heads and head size exchanged", with_leaves(lambda x: {"value.kernel": x["value.kernel"].reshape(15, 5, 3).swapaxes(1, 2)}), "value"),
    Fault("dropped bias", "dropped bias", without("out.bias"), "bias"),
    Fault("rounded weights", "rounded weights", with_leaves(rounded), "query key value out bias heads constant"),
    Fault("wrong head count", "number of heads", heads_of_size_three, "heads"),
    Fault("tiled groups", "head order", tiled, "", GROUPED),
    Fault("scale", "scale", semantic(scale=1.0), "scale"),
    Fault("soft cap", "soft cap", semantic(logits_soft_cap=1.0), "cap"),
    Fault("zero position", "zero position", semantic(add_zero_attn=True), "extra"),
    Fault("softmax dtype", "softmax dtype", semantic(softmax_dtype="float16"), "softmax"),
    Fault("mask polarity", "mask polarity", padded(lambda present: ~present), "padding"),
    Fault("mask ignored", "mask ignored", masked(key_value_padding=None), "padding"),
    Fault("padding shifted", "padding shifted", padded(lambda present: np.roll(present, -1, axis=1) & present), "padding"),
    Fault("causal alignment", "causal alignment", masked(causal_offset=0), "causal"),
    Fault("not causal", "causality", masked(causal_offset=None), "causal"),
    Fault("rows to heads", "mask axis", rows_to_heads, "padding heads causal"),
    Fault("mask constant", "mask constant", lambda x: replace(x, blocked=Blocked(-1e4)), "constant", loud=True),
    Fault("fully masked rows", "fully masked rows", semantic(fully_masked="mean"), "empty", empty=True),
    Fault("fully masked rows, NaN", "fully masked rows", semantic(fully_masked="nan"), "empty", empty=True),
    Fault("added constant", "fully masked rows", lambda x: replace(x, mask=None, bias=np.where(np.asarray(x.mask.to_array(T, S, np)), 0.0, -1e9)), "constant empty padding causal logits", empty=True),
    Fault("bias", "bias", lambda x: replace(x, bias=np.linspace(-1, 1, S)), "bias of logits"),
)  # fmt: skip


def case(seed: int, *faults: Fault) -> tuple[Layer, Layer, Inputs]:
    """A layer, the same with faults, and inputs on which they show."""
    rng = np.random.default_rng(seed)
    a, given = draw(rng, faults[0].sizes), inputs(rng)
    if any(fault.loud for fault in faults):  # and some rows see a single key
        given = (1000 * given[0], 1000 * given[1], given[2])
        padding = np.arange(S) < np.array([[11], [8], [1]])
        a = replace(a, mask=Mask.padding(key_value=padding))
    if any(fault.empty for fault in faults):
        a = replace(
            a, mask=replace(a.mask, key_value_padding=np.arange(S) < np.array([[11], [8], [0]]))
        )
    b = a
    for fault in faults:
        b = fault.make(b)
    return a, b, given


def assert_sums(found: attribution.Attribution) -> None:
    if not found.compared:
        assert math.isnan(found.total)
        return
    assert abs(sum(part.size for part in found.parts) - found.total) <= SUMS * found.total
    if found.total:
        assert abs(sum(part.share for part in found.parts) - 1) <= SUMS


def check_fault(fault: Fault, seed: int) -> None:
    a, b, given = case(seed, fault)
    found = attribution.between(a, b, given)
    assert_sums(found)
    assert found.parts, found
    assert found.parts[0].name == fault.named, found
    assert not found.same
    assert attribution.between(b, b, given).same
    back = attribution.between(b, a, given)
    assert back.parts[0].name == fault.named, back
    np.testing.assert_allclose(back.total, found.total, rtol=1e-9)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_the_top_part(fault: Fault) -> None:
    check_fault(fault, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 20))
def test_every_fault_is_the_top_part_whatever_is_drawn(seed: int) -> None:
    for fault in FAULTS:
        check_fault(fault, seed)


PAIRS = [
    (one, other)
    for one, other in combinations(FAULTS, 2)
    if one.sizes == other.sizes and not one.loud and not other.loud
    if not set(one.touches.split()) & set(other.touches.split())
]
EVERYDAY = {
    ("key and value exchanged", "scale"),
    ("output transposed", "dropped bias"),
    ("wrong head count", "causal alignment"),
    ("mask polarity", "causal alignment"),
    ("query weights", "mask polarity"),
    ("scale", "fully masked rows, NaN"),
    ("dropped bias", "softmax dtype"),
}


def check_pair(one: Fault, other: Fault, seed: int) -> None:
    a, b, given = case(seed, one, other)
    found = attribution.between(a, b, given)
    assert_sums(found)
    assert {one.named, other.named} <= {part.name for part in found.parts}, found
    assert len(found.parts) == 2, found


def test_two_faults_at_once_are_both_named() -> None:
    chosen = [pair for pair in PAIRS if (pair[0].name, pair[1].name) in EVERYDAY]
    assert len(chosen) == len(EVERYDAY)
    for one, other in chosen:
        check_pair(one, other, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_all_pairs_of_faults_are_both_named(seed: int) -> None:
    assert len(PAIRS) > 150
    for one, other in PAIRS:
        check_pair(one, other, seed)


def test_parts_of_everything_at_once_sum_to_the_total() -> None:
    rng = np.random.default_rng(5)
    a, given = draw(rng), inputs(rng)
    b = heads_of_size_three(draw(rng))
    for fault in ("scale", "soft cap", "mask polarity", "causal alignment", "softmax dtype"):
        b = next(f for f in FAULTS if f.name == fault).make(b)
    found = attribution.between(a, b, given)
    assert_sums(found)
    # More than 8 factors: all weights and the heads are one.
    assert {part.name for part in found.parts} == {
        "weights", "number of heads", "scale", "soft cap", "mask polarity", "causal alignment",
        "softmax dtype",
    }  # fmt: skip


def test_what_is_undone_is_no_part() -> None:
    """Queries twice as large, keys half of it: powers of 2, so that nothing is left at all."""
    rng = np.random.default_rng(7)
    a, given = draw(rng), inputs(rng)
    arrays: dict[str, Any] = {name: np.array(leaf) for name, leaf in leaves(a.params).items()}
    for which, factor in (("query", 2.0), ("key", 0.5)):
        for leaf in ("kernel", "bias"):
            arrays[f"{which}.{leaf}"] *= factor
    found = attribution.between(a, replace(a, params=from_leaves(arrays)), given)
    assert found.same
    assert_sums(found)
    assert len(found.idle) >= 2
    assert all("undo it" in sentence for sentence in found.idle)


def test_what_is_below_rounding_still_sums() -> None:
    """A value so small that its part is idle next to the others is in the sum all the same."""
    rng = np.random.default_rng(11)
    a, given = draw(rng), inputs(rng)
    arrays: dict[str, Any] = {name: np.array(leaf) for name, leaf in leaves(a.params).items()}
    arrays["out.bias"] += 1e-11
    b = replace(semantic(logits_soft_cap=1e7)(a), params=from_leaves(arrays))
    found = attribution.between(a, b, given)
    assert_sums(found)


def test_a_learned_key_position_on_one_side() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    a = torch.nn.MultiheadAttention(15, 3, batch_first=True)
    b = torch.nn.MultiheadAttention(15, 3, batch_first=True, add_bias_kv=True)
    with torch.no_grad():
        for name, leaf in a.named_parameters():
            b.get_parameter(name).copy_(leaf)
    found = attribution.attribute(a, b)
    assert found.parts[0].name == "learned key position"
    assert_sums(found)


def test_inputs_wider_than_a_layer_of_torch() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    a = torch.nn.MultiheadAttention(15, 3, batch_first=True)
    b = torch.nn.MultiheadAttention(15, 3, batch_first=True).double()
    b.load_state_dict({name: leaf.double() for name, leaf in a.state_dict().items()})
    found = attribution.attribute(a, b, np.random.default_rng(0).standard_normal((2, 5, 15)))
    assert found.same
    wide = torch.nn.MultiheadAttention(16, 4)
    with pytest.raises(ValueError, match="inputs of different widths: Dq=15 and 16"):
        attribution.attribute(a, wide)


def test_a_narrow_compute_dtype_is_named() -> None:
    jnp = pytest.importorskip("jax.numpy")
    nnx = pytest.importorskip("flax.nnx")

    def layer(dtype: Any) -> Any:
        return nnx.MultiHeadAttention(
            num_heads=3, in_features=15, dtype=dtype, decode=False, rngs=nnx.Rngs(0)
        )

    found = attribution.attribute(layer(jnp.float32), layer(jnp.bfloat16))
    assert [part.name for part in found.parts] == ["compute dtype"]
    assert found.parts[0].sentence == "b computes in bfloat16, narrower than its weights"
    assert not found.same


def test_a_part_is_the_mean_over_all_orders() -> None:
    """Written out for three factors: every order, one change at a time."""
    rng = np.random.default_rng(3)
    a, given = draw(rng), inputs(rng)
    changes = [
        next(f for f in FAULTS if f.name == name).make
        for name in ("scale", "value weights", "mask polarity")
    ]

    def out(chosen: frozenset[int]) -> NDArray:
        layer = a
        for i in sorted(chosen):
            layer = changes[i](layer)
        allowed = np.asarray(layer.mask.to_array(T, S, np))
        return oracle.run(layer.params, layer.semantics, *given, allowed).output

    whole = out(frozenset(range(3))) - out(frozenset())
    expected = np.zeros(3)
    for order in permutations(range(3)):
        for place, i in enumerate(order):
            before = frozenset(order[:place])
            step = out(before | {i}) - out(before)
            expected[i] += np.vdot(step, whole) / np.vdot(whole, whole) / 6
    b = changes[2](changes[1](changes[0](a)))
    found = {part.name: part.share for part in attribution.between(a, b, given).parts}
    ours = [found[name] for name in ("scale", "value weights", "mask polarity")]
    np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-12)


def test_a_layer_that_computes_something_else_is_not_called_rounding() -> None:
    a, b, given = case(0, next(f for f in FAULTS if f.name == "scale"))
    allowed = np.asarray(a.mask.to_array(T, S, np))
    right = oracle.run(a.params, a.semantics, *given, allowed).output
    noise = np.random.default_rng(1).normal(size=right.shape)
    for size, name in ((1e-15, "rounding"), (1e-3, "unexplained")):
        found = attribution.between(a, replace(a, output=right + size * noise), given)
        assert [part.name for part in found.parts] == [name]
        assert found.same == (name == "rounding")
        assert_sums(found)
    found = attribution.between(replace(a, output=right + 1e-3 * noise), b, given)
    assert [part.name for part in found.parts] == ["scale", "unexplained"]
    assert found.parts[1].sentence.startswith("a (")
    assert_sums(found)
    broken = right.copy()
    broken[0, 0] = np.nan
    found = attribution.between(a, replace(a, output=broken), given)
    assert (found.parts[0].name, found.parts[0].not_finite) == ("unexplained", 15)


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
    import torch

    model = torch.nn.Sequential(*(torch.nn.MultiheadAttention(8, 2) for _ in range(2)))
    with pytest.raises(ValueError, match=r"2 attention blocks in a Sequential .*matching\.prove"):
        attribution.attribute(model, model)


def test_inputs_by_name_default_as_in_files() -> None:
    a, b, given = case(0, next(f for f in FAULTS if f.name == "scale"))
    x, other = given[:2]
    for named, ordered in (
        ({"query": x}, x),
        ({"query": x, "key": other}, (x, other, other)),
    ):
        a, b = (replace(layer, mask=None) for layer in (a, b))
        assert attribution.attribute(a, b, named) == attribution.attribute(a, b, ordered)


@pytest.mark.parametrize("row", [0, 6, 12])
def test_nan_in_weights_of_a_live_layer_is_of_these_weights(row: int) -> None:
    """Its softmax may make finite numbers of NaN: nothing that is unexplained."""
    import torch

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
    import torch

    from jaxmha.converters import attribute

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
    import torch

    from jaxmha.converters import attribute, flax
    from jaxmha.converters import torch as convert

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
    import torch

    from jaxmha.converters import attribute, keras
    from jaxmha.converters import torch as convert

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
