"""Nested tensors against live torch: into the layer and into SDPA, padded and packed."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from jaxmha import Mask, dot_product_attention, multi_head_attention
from jaxmha.converters.layout.arrays import to_numpy
from jaxmha.converters.masks.nested import export_nested, import_nested
from jaxmha.converters.torch import from_module
from tests.masks.torch_live import D, N, draw, module
from tests.tolerance import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
H = 11
FACTOR = 0.5
PAIRS = (((3, 5, 2), (3, 5, 2)), ((3, 5, 2), (7, 2, 4)), ((3, 2, 5), (4, 0, 7)))


def ragged(lengths: Any, *shape: int, seed: int = 0) -> list[torch.Tensor]:
    return [draw(n, *shape, seed=seed + i) for i, n in enumerate(lengths)]


def jagged(rows: list[torch.Tensor], like: Any = None) -> Any:
    """Of layout torch.jagged; tensors of one call share their offsets."""
    if like is not None:
        return torch.nested.nested_tensor_from_jagged(torch.cat(rows), like.offsets())
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("T", "S"), PAIRS)
def test_jagged_into_sdpa(T: Any, S: Any, packed: bool) -> None:
    query = jagged(ragged(T, N, H))
    key = jagged(ragged(S, N, H, seed=7), query if S == T else None)
    value = jagged(ragged(S, N, H, seed=13), key)
    tensors = [x.transpose(1, 2) for x in (query, key, value)]
    expected = scaled_dot_product_attention(*tensors).transpose(1, 2)
    q, k, v, mask = import_nested(*tensors, axes="B N T H", packed=packed)
    assert mask.array is None
    assert len(q) == (1 if packed else len(T))
    out = dot_product_attention(q, k, v, mask=mask)
    back = export_nested(out, T, axes="B N T H", jagged=True)
    assert back.shape[:2] == tensors[0].shape[:2]
    for actual, row in zip(back.transpose(1, 2).unbind(), expected.unbind(), strict=True):
        assert_close(to_numpy(actual), to_numpy(row), factor=FACTOR)


@pytest.mark.parametrize("packed", [False, True])
def test_strided_into_sdpa(packed: bool) -> None:
    T, S = PAIRS[1]
    tensors = [
        torch.nested.nested_tensor([row.transpose(0, 1).contiguous() for row in rows])
        for rows in (ragged(T, N, H), ragged(S, N, H, seed=7), ragged(S, N, H, seed=13))
    ]
    expected = scaled_dot_product_attention(tensors[0], tensors[1], tensors[2])
    q, k, v, mask = import_nested(*tensors, axes="B N T H", packed=packed)
    out = dot_product_attention(q, k, v, mask=mask)
    back = export_nested(out, T, axes="B N T H")
    for actual, row in zip(back.unbind(), expected.unbind(), strict=True):
        assert_close(to_numpy(actual), to_numpy(row), factor=FACTOR)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_into_the_layer(packed: bool, is_causal: bool) -> None:
    """Its native path alone takes them, and ignores is_causal there."""
    lengths = (3, 5, 2)
    layer = module(False, False)
    layer.batch_first = True
    x = torch.nested.nested_tensor(ragged(lengths, D))
    with torch.no_grad():
        expected, weights = layer(x, x, x, average_attn_weights=False, is_causal=is_causal)
    query, key, value, mask = import_nested(x, packed=packed)
    params, semantics = from_module(layer)
    out, ours = multi_head_attention(
        params, query, key, value, mask=mask, semantics=semantics, return_weights=True
    )
    for actual, row in zip(export_nested(out, lengths).unbind(), expected.unbind(), strict=True):
        assert_close(to_numpy(actual), to_numpy(row), factor=FACTOR)
    if not packed:
        assert_close(ours, to_numpy(weights), "weights", factor=FACTOR)


@pytest.mark.parametrize("packed", [False, True])
def test_causal_within_each_sequence(packed: bool) -> None:
    lengths = (3, 5, 2)
    rows = [row[None].transpose(1, 2) for row in ragged(lengths, N, H)]
    query, key, value, mask = import_nested([row[0] for row in rows], axes="B N T H", packed=packed)
    out = dot_product_attention(query, key, value, mask=mask & Mask.causal())
    back = export_nested(out, lengths, axes="B N T H")
    for actual, row in zip(back.unbind(), rows, strict=True):
        expected = scaled_dot_product_attention(row, row, row, is_causal=True)[0]
        assert_close(to_numpy(actual), to_numpy(expected), factor=FACTOR)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_back_and_forth(layout: torch.layout) -> None:
    lengths = (3, 0, 2)
    for packed in (False, True):
        x = torch.nested.nested_tensor(ragged(lengths, D), layout=layout)
        array, *_ = import_nested(x, packed=packed)
        back = export_nested(array, lengths, jagged=layout is torch.jagged)
        assert back.layout == layout
        for actual, row in zip(back.unbind(), x.unbind(), strict=True):
            np.testing.assert_array_equal(to_numpy(actual), to_numpy(row))


@pytest.mark.slow_variants("*layout0*")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lengths", [(0,), (3,), (0, 0), (0, 3), (2, 0, 0)])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_empty_sequences_and_one_sequence(
    layout: torch.layout, lengths: tuple[int, ...], packed: bool
) -> None:
    """Rows without positions stay rows; the output of the others is torch's."""
    rows = ragged(lengths, D)
    query, _, _, mask = import_nested(
        torch.nested.nested_tensor(rows, layout=layout), packed=packed
    )
    assert query.shape[:2] == ((1, sum(lengths)) if packed else (len(lengths), max(lengths)))
    back = export_nested(query, lengths, jagged=layout is torch.jagged)
    assert [len(row) for row in back.unbind()] == list(lengths)
    out = dot_product_attention(
        *(np.reshape(query, (*query.shape[:2], N, H)),) * 3, mask=mask, implementation="reference"
    )
    assert np.isfinite(out).all()
    outputs = export_nested(out, lengths, axes="B T N H")
    for actual, row in zip(outputs.unbind(), rows, strict=True):
        if len(row):
            heads = row.reshape(1, len(row), N, H).transpose(1, 2)
            expected = scaled_dot_product_attention(heads, heads, heads)[0].transpose(0, 1)
            assert_close(to_numpy(actual), to_numpy(expected), factor=FACTOR)


def test_offsets_with_holes() -> None:
    """Sequences that are parts of a longer row, whose rest is not read."""
    whole = draw(3, 6, D)
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([3, 0, 4])
    narrow = torch.nested.narrow(whole, 1, starts, lengths, layout=torch.jagged)
    holes = torch.nested.nested_tensor_from_jagged(
        whole.flatten(0, 1), torch.tensor([0, 6, 12, 18]), lengths
    )
    for tensor, first in ((narrow, starts), (holes, torch.zeros(3, dtype=torch.int64))):
        assert not tensor.is_contiguous()
        array, _, _, mask = import_nested(tensor)
        np.testing.assert_array_equal(mask.query_lengths, lengths)
        assert array.shape == (3, 4, D)
        for b, (i, n) in enumerate(zip(first.tolist(), lengths.tolist(), strict=True)):
            np.testing.assert_array_equal(array[b, :n], to_numpy(whole[b, i : i + n]))
            assert not array[b, n:].any()


def test_layouts_and_half_precision_say_the_same() -> None:
    rows = [row.bfloat16() for row in ragged((3, 0, 2), N, H)]
    jag = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    strided = torch.nested.nested_tensor([row.transpose(0, 1) for row in rows])
    first, second = (import_nested(x, axes="B N T H") for x in (jag, strided))
    for ours, theirs in zip(first[:3], second[:3], strict=True):
        assert ours.dtype == "bfloat16"
        np.testing.assert_array_equal(ours.astype("f"), theirs.astype("f"))
    np.testing.assert_array_equal(first[3].query_lengths, second[3].query_lengths)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"query has no rows: expected axes \(B T D\) with B >= 1"):
        import_nested([])
    with pytest.raises(ValueError, match=r"key: expected rows of axes \(T D\).*\(2, 5\) in row 1"):
        import_nested([np.ones((3, 4))] * 2, [np.ones((3, 4)), np.ones((2, 5))])
    with pytest.raises(ValueError, match=r"query: expected rows of axes \(N T H\).*\(3, 4\)"):
        import_nested([np.ones((3, 4))], axes="B N T H")
    for lengths in ((), (2, -1)):
        with pytest.raises(ValueError, match="lengths must be one or more integers >= 0"):
            export_nested(np.ones((2, 4, 3)), lengths)
    with pytest.raises(
        ValueError, match=r"array: expected axes \(B T N H\), got shape \(2, 4, 3\)"
    ):
        export_nested(np.ones((2, 4, 3)), (2, 1), axes="B N T H")
    rows = [np.ones((n, 3)) for n in (2, 5)]
    with pytest.raises(ValueError, match=r"got lengths \[2, 5\], \[2, 5\], \[5, 2\]"):
        import_nested(rows, rows, rows[::-1])
    with pytest.raises(ValueError, match="as many rows"):
        import_nested(rows, rows[:1])
    with pytest.raises(ValueError, match=r"B=2, T >= 5, or packed \(1, 7, \.\.\.\)"):
        export_nested(np.ones((2, 4, 3)), (2, 5))


@pytest.mark.usefixtures("no_shape_hook")
def test_axes_are_named() -> None:
    with pytest.raises(ValueError, match="axes must be one of"):
        import_nested([np.ones((2, 3))], axes="T B D")  # type: ignore[arg-type]
