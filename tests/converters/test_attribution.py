"""A difference between two layers is taken apart: every injected fault is named, parts sum to it."""

from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest

from jaxmha import Mask
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.verify import attribution, oracle
from jaxmha.params import from_leaves, leaves
from tests.converters.faults import (
    FAULTS,
    LENGTHS,
    Fault,
    S,
    T,
    assert_sums,
    case,
    draw,
    heads_of_size_three,
    inputs,
    semantic,
)


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
