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


@pytest.mark.parametrize(("dense", "merged"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS - 3])
def test_a_missing_causal_part_is_named(dense: bool, merged: bool, lengths: NDArray) -> None:
    """Both layers have padding, as a `Mask` or an array, and one of them is causal as well."""
    padding = Mask.padding(key_value=np.arange(S) < lengths[:, None])
    causal = Mask.dense(np.tri(T, S, dtype=bool)) if dense else Mask.causal()
    a = replace(draw(np.random.default_rng(5)), mask=causal & padding)
    b = replace(a, mask=Mask.dense(padding.to_array(1, S, np)) if merged else padding)
    part = attribution.between(a, b, inputs(np.random.default_rng(6))).parts[0]
    assert part.name == "causality", part
    text = "a hides the future" if merged else "b lacks the causal part of a's mask"
    assert text in part.sentence


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
