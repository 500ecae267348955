"""Masks on their way out of every exporter: empty axes, dtypes, sizes, rows that are not there."""

from typing import Any

import numpy as np
import pytest

from jaxmha import Mask
from jaxmha.converters.masks.compose import array_of, checked, padding_of, refuse_emptied
from tests.masks.draws import Sizes, pairs
from tests.masks.frameworks import APIS

SIZES = Sizes(3, 2, 5, 7)
# A field that does not fit, and what the message says of it.
WRONG = {
    "keys": (Mask.padding(key_value=np.ones((3, 4), bool)), r"\(#B, S\) with .*S=7.*\(3, 4\)"),
    "queries": (Mask.padding(query=np.ones((3, 4), bool)), r"\(#B, T\) with .*T=5.*\(3, 4\)"),
    "array": (Mask.dense(np.ones((3, 1, 5, 6), bool)), r"#S\) with .*S=7.*\(3, 1, 5, 6\)"),
    "axes": (Mask.dense(np.ones((1, 3, 2, 5, 7), bool)), r"#S\) with .*\(1, 3, 2, 5, 7\)"),
    "segments": (
        Mask.segments(query_ids=np.ones((1, 5), int), key_value_ids=np.ones((1, 5), int)),
        r"S=7.*\(1, 5\)",
    ),
    "rows": (
        Mask.padding(key_value=np.ones((3, 7), bool)) & Mask.lengths(key_value=np.ones(4, int)),
        r"B=[34].*got shape \((3, 7|4,)\)",
    ),
}
KEYS = {
    "lengths": Mask.lengths(key_value=np.zeros(2, int)),
    "padding": Mask.padding(key_value=np.ones((2, 0), bool)),
    "causal": Mask.causal(),
    "array": Mask.dense(np.ones((2, 1, 3, 0), bool)),
    "window": Mask.window(1, 1),
}


def exported(name: str, mask: Any, sizes: Sizes) -> dict[str, Any]:
    api = APIS[name]
    given: dict[str, Any] = api.module.export_masks(
        mask, None, **sizes.named(*api.sizes), **api.exporting
    )
    return given


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", APIS)
def test_what_does_not_fit_is_named(name: str, wrong: str) -> None:
    """The axes expected, the shape that came, and what to do."""
    mask, message = WRONG[wrong]
    with pytest.raises(
        ValueError, match=f"mask.*: expected axes .*{message}: crop or pad the mask"
    ):
        exported(name, mask, SIZES)


@pytest.mark.parametrize("name", [n for n, api in APIS.items() if "batch_size" in api.sizes])
def test_a_wrong_batch_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"mask.key_value_lengths: .* with B=3, got shape \(4,\)"):
        exported(name, Mask.lengths(key_value=np.ones(4, int)), SIZES)


@pytest.mark.parametrize("what", KEYS)
@pytest.mark.parametrize("name", APIS)
def test_no_keys(name: str, what: str) -> None:
    """S = 0: an array without entries, or none."""
    sizes = Sizes(2, 2, 3, 0)
    if name == "added":
        with pytest.raises(ValueError, match="nothing to attend"):
            exported(name, KEYS[what], sizes)
        return
    arguments = exported(name, KEYS[what], sizes)
    arrays = [x for x in arguments.values() if isinstance(x, np.ndarray) and x.ndim > 1]
    assert all(array.shape[-1] == 0 for array in arrays)
    if arguments:
        api = APIS[name]
        mask, bias = api.module.import_masks(**api.importing(sizes), **arguments)
        assert bias is None
        assert pairs(mask, None, sizes).shape == (2, 2, 3, 0)


@pytest.mark.parametrize("name", [n for n, api in APIS.items() if not api.beyond])
def test_rows_beyond_a_length_are_not_dropped_in_silence(name: str) -> None:
    lengths = Mask.lengths(query=np.array([5, 2, 0]))
    with pytest.raises(
        ValueError, match=r"query lengths, beyond which rows are 0.*padding\(query="
    ):
        exported(name, lengths, SIZES)
    if name not in ("causal model", "scores"):  # which say it by an array
        assert exported(name, Mask.lengths(query=np.array([5, 6, 5])), SIZES) == {}


def test_no_keys_of_one_side() -> None:
    mask = checked(Mask.padding(key_value=np.ones((2, 0), bool)), {"S": 0})
    padding, array = padding_of(mask, "key_value", 0), array_of(mask, 3, 0)
    assert padding is not None
    assert padding.shape == (2, 0)
    assert array is not None
    assert array.shape[-1] == 0


def test_dtypes_are_checked() -> None:
    with pytest.raises(TypeError, match="key_value_padding must be a Boolean array"):
        checked(Mask(key_value_padding=np.array([[2, 0, 1]])), {})
    with pytest.raises(TypeError, match="query_lengths must be an integer array"):
        checked(Mask(query_lengths=np.array([1.0])), {})
    with pytest.raises(ValueError, match="segment ids for only one"):
        checked(Mask(query_segments=np.ones((1, 5), int)), {})


def test_rows_that_no_array_shows() -> None:
    """Where T is unknown every row that structure may have counts."""
    low = np.zeros((1, 1, 1, 3))
    low[..., :2] = -np.inf
    for mask, emptied in ((Mask.causal(), True), (Mask.window(1, None), False), (None, False)):
        if emptied:
            with pytest.raises(ValueError, match="batch row 0, head 0, query 0: the framework"):
                refuse_emptied(mask, low, {"S": 3})
        else:
            refuse_emptied(mask, low, {"S": 3})
    with pytest.raises(ValueError, match="query 3"):
        refuse_emptied(Mask.window(1, 0), np.array([0.0, 0.0, -np.inf])[None, None, None], {"S": 3})
    refuse_emptied(Mask.causal(), low, {"S": 3, "T": 0})
