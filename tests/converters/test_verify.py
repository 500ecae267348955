"""Two sides are the same, or the findings name the leaf, the element and the stage."""

import itertools
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import no_grad

from jaxmha import MHAParams, Semantics, checkpoint
from jaxmha.converters import flax, keras, torch
from jaxmha.converters.verify import comparands, comparison, comparison_report
from jaxmha.params import leaves
from tests.converters import layers

torch_config = layers.configs("torch")[0]


@pytest.fixture
def params(layer: Any) -> MHAParams:
    """Its parameters, free to be spoiled."""
    return torch.from_module(layer)[0]


def report(a: Any, b: Any, **options: Any) -> comparison_report.BlockReport:
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


def test_four_frameworks_hold_the_same(params: MHAParams, layer: Any) -> None:
    sides = [layer, layer.state_dict(), params, (params, Semantics()), keras.to_module(params)]
    sides += [flax.to_module(params), flax.to_module(params, kind="linen")]
    sides += [keras.export_params(params), flax.export_params(params, prefix="encoder")]
    for one, other in itertools.pairwise([*sides, layer]):  # each is once the first of a pair
        comparison.assert_same(one, other)


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
        "query.kernel", "query.bias", "key.kernel", "key.bias", "value.kernel", "value.bias",
        "out.kernel", "out.bias",
    ],
)  # fmt: skip
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
    other = Semantics(
        scale=0.3, logits_soft_cap=2.0, add_zero_attn=True, clip_qkv=3.0, local_window_size=(2, 1)
    )
    found = report((params, other), (params, Semantics()))
    assert found.behaviour == (
        "scale is 0.3 and None",
        "logits_soft_cap is 2.0 and None",
        "add_zero_attn is True and False",
        "clip_qkv is 3.0 and None",
        "local_window_size is (2, 1) and None",
    )
    assert not found.same


def test_different_dtypes_are_explained(params: MHAParams) -> None:
    half = spoiled(params, "query.kernel", lambda x: x.astype(np.float16))
    (difference,) = report(params, half).differences
    assert "float32" in str(difference)
    assert "float16" in str(difference)
    assert "the second is the first, rounded" in str(difference)
    wrong = spoiled(
        params, "query.kernel", lambda x: (x + np.eye(len(x), 1)[..., None]).astype(np.float16)
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
        ({"a": {}}, ValueError, r"no arrays to compare in a dict"),
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


def test_comparing_changes_nothing(layer: Any, params: MHAParams) -> None:
    before = layers.snapshot(layer)
    expected = {name: np.array(array) for name, array in leaves(params).items()}
    comparison.compare(layer, params)
    layers.assert_identical(layers.snapshot(layer), before)
    layers.assert_identical(params, expected)


def test_a_live_layer_without_numbers_is_not_the_same(params: MHAParams, layer: Any) -> None:
    """Equal bits do not show what code of its own computes."""
    layer = deepcopy(layer)
    with no_grad():
        layer.out_proj.bias[1] = np.nan
    found = report(layer, torch.from_module(layer))
    assert (found.same, found.differences) == (False, ())
    assert found.departs is not None
    assert found.departs.startswith("no output can be compared: out.bias holds NaN")


def test_a_block_of_several_dtypes_is_compared(params: MHAParams) -> None:
    mixed = spoiled(params, "key.kernel", lambda x: x.astype(np.float64))
    found = report(mixed, mixed)
    assert (found.same, found.differences) == (True, ())
    assert not report(mixed, spoiled(mixed, "key.kernel", lambda x: 2 * x)).same


def test_blocks_of_one_name_are_not_paired_with_fewer(params: MHAParams) -> None:
    named = comparands.ComparedBlock(
        "a", "torch", params, Semantics(), lambda *_: np.ones(1), False
    )
    with pytest.raises(ValueError, match="two blocks of one source have the same name"):
        comparison.pair([named, named], [named])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("leaf", ["query.kernel", "value.bias", "out.bias"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_equal_bits_that_are_not_finite_are_the_same(
    params: MHAParams, leaf: str, bad: float
) -> None:
    """No output can be compared, and a note says so."""

    def spoil(array: np.ndarray) -> np.ndarray:
        array[(1,) * array.ndim] = bad
        return array

    side = spoiled(params, leaf, spoil)
    found = report(side, side)
    assert not found.differences
    assert found.same
    assert f"{leaf} holds NaN or infinity: bits were compared, outputs were not" in str(found)
    assert comparison.compare(side, side)
    assert not report(side, params).same
    assert not report(params, side).same
