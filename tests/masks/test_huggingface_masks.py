"""Masks of transformers and of hand-written layers, against live modules."""

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import seed

from jaxmha import Mask, dot_product_attention
from jaxmha.converters.arrays import NDArray, to_numpy
from jaxmha.converters.masks import huggingface, seeds
from tests.masks.draws import B, N, S, T, draws, many, numbers, pairs, random_mask
from tests.tolerance import assert_close

SEED = int(os.environ["JAXMHA_PROPERTY_SEED"])
H = 11
FACTOR = 0.5  # 16 floors of float32 are 1e-6 of the scale
LOWEST = float(np.finfo(np.float32).min)
SIZES: Any = {"batch_size": B, "query_length": T, "key_length": S}
HEADS: Any = [numbers(B, T, N, H), numbers(B, S, N, H, seed=1), numbers(B, S, N, H, seed=2)]


def interface(implementation: str, mask: NDArray | None) -> NDArray:
    """BERT's attention on heads, as its layer calls it: `(B, T, N, H)`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.models.bert import modeling_bert

    eager = modeling_bert.eager_attention_forward
    run: Any = eager if implementation == "eager" else sdpa_attention_forward
    module = torch.nn.Module().eval()
    module.is_causal = False  # type: ignore[assignment]
    heads = (torch.from_numpy(x).transpose(1, 2) for x in HEADS)
    given = None if mask is None else torch.from_numpy(mask)
    out, _ = run(module, *heads, given, scaling=H**-0.5, dropout=0.0)
    return to_numpy(out)


def ours(mask: Mask | None, bias: NDArray | None, fully_masked: Any = "mean") -> NDArray:
    added = None if bias is None else bias.astype(np.float32)
    query, key, value = HEADS
    out = dot_product_attention(query, key, value, added, mask, fully_masked=fully_masked)
    return np.asarray(out)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("shape", [(B, 1, T, S), (1, 1, T, S), (B, 1, 1, S), (B, N, T, S)])
@pytest.mark.parametrize("what", ["constants", "infinite", "twice", "bias"])
def test_four_axes(implementation: str, shape: tuple[int, ...], what: str) -> None:
    """Constants, -inf, constants added twice, and constants over a bias, with empty rows."""
    rng = np.random.default_rng(len(what))
    added = np.where(rng.random(shape) < 0.6, 0, LOWEST).astype(np.float32)
    if what == "infinite":
        added[added != 0] = -np.inf
        added[..., 0] = 0
    else:
        added[:, :, -1] = LOWEST
    if what == "twice":
        added[..., 1:3] = -np.inf
    if what == "bias":
        added += numbers(*shape)
    mask, bias = huggingface.import_masks(attention_mask=added, num_heads=N)
    if what in ("constants", "infinite"):
        assert bias is None
    expected = interface(implementation, added)
    assert_close(ours(mask, bias), expected, what, factor=FACTOR)


def test_boolean_four_axes() -> None:
    """True attends under sdpa, where an empty row is 0; eager adds 1 and masks nothing."""
    kept = np.random.default_rng(0).random((B, 1, T, S)) < 0.6
    kept[0, 0, 2] = False
    mask, bias = huggingface.import_masks(attention_mask=kept, attn_implementation="sdpa")
    assert_close(ours(mask, bias, "zero"), interface("sdpa", kept), factor=FACTOR)
    implementation: Any
    for implementation in (None, "eager"):
        with pytest.raises(TypeError, match="four axes is Boolean"):
            huggingface.import_masks(attention_mask=kept, attn_implementation=implementation)
    assert_close(ours(None, kept.astype("f")), interface("eager", kept), factor=FACTOR)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [bool, np.int64, np.float32])
def test_two_axes(causal: bool, dtype: Any) -> None:
    """The same pairs as the mask that transformers makes of it."""
    from transformers import BertConfig
    from transformers.masking_utils import create_bidirectional_mask, create_causal_mask

    config = BertConfig(hidden_size=N * H, num_attention_heads=N)
    config._attn_implementation = "eager"
    there = np.arange(S) < np.array([[S], [3], [1]])
    make: Any = create_causal_mask if causal else create_bidirectional_mask
    options = {"past_key_values": None, "position_ids": None} if causal else {}
    given = torch.from_numpy(there.astype(dtype))
    theirs = make(
        config=config, inputs_embeds=torch.zeros(B, S, N * H), attention_mask=given, **options
    )
    mask, bias = huggingface.import_masks(attention_mask=given, is_causal=causal)
    assert bias is None
    assert mask is not None
    assert mask.array is None
    np.testing.assert_array_equal(mask.to_array(S, S), to_numpy(theirs) == 0)


def test_cache_is_aligned_to_the_last_key() -> None:
    mask, _ = huggingface.import_masks(
        attention_mask=np.ones((B, S), int), is_causal=True, query_length=T
    )
    assert mask is not None
    assert mask.causal_offset == S - T


@pytest.mark.parametrize("causal", [False, True])
def test_export_then_import(causal: bool) -> None:
    """The identity on what masks and biases mean."""
    forms = set()

    @many
    @seed(SEED)
    @draws
    def check(number: int, kinds: set[str], excluded: float) -> None:
        mask = random_mask(number, kinds, excluded)
        if number % 4 == 0:  # padding of keys alone has two axes
            there = np.random.default_rng(number).random((B, S)) >= excluded
            mask = Mask.padding(key_value=there)
        if causal and "offset" not in kinds:
            mask &= Mask.causal(S - T)
        bias = numbers(N, 1, S, seed=number) if number % 2 else None
        exported = huggingface.export_masks(mask, bias, is_causal=causal, **SIZES)
        if "attention_mask" in exported:
            forms.add(exported["attention_mask"].ndim)
        after, added = huggingface.import_masks(is_causal=causal, query_length=T, **exported)
        if not exported and causal:
            after = Mask.causal(S - T)
        allowed = pairs(mask)
        np.testing.assert_array_equal(pairs(after), allowed)
        if bias is not None:
            left = np.zeros(()) if added is None else added
            np.testing.assert_array_equal(
                np.where(allowed, left, 0), np.where(allowed, bias[None], 0)
            )

    check()
    assert forms == {2, 4}


def test_refusals_of_transformers() -> None:
    with pytest.raises(ValueError, match="must hold 1"):
        huggingface.import_masks(attention_mask=np.array([[0.0, -1e9]]))
    with pytest.raises(TypeError, match="floating"):
        huggingface.import_masks(attention_mask=np.ones((B, 1, T, S), int))
    with pytest.raises(ValueError, match="attention_mask: expected axes"):
        huggingface.import_masks(attention_mask=np.ones((B, T, S), "f"))
    with pytest.raises(ValueError, match="holds padding of keys"):
        huggingface.export_masks(Mask.causal(), form="padding", **SIZES)


# ------------------------------------------------------------------------ hand-written layers


def by_hand(mask: NDArray, style: str) -> NDArray:
    """Attention with the mask applied as those layers do."""
    q, k, v = (torch.from_numpy(x).transpose(1, 2) for x in HEADS)
    logits, given = q @ k.transpose(-2, -1) / H**0.5, torch.from_numpy(mask).unsqueeze(1)
    if style == "filled":
        logits = logits.masked_fill(given == 0, -1e9)
        assert torch.equal(given == 0, ~given.bool())
    else:
        logits = logits + given.float() * -1e9
    return to_numpy((logits.softmax(-1) @ v).transpose(1, 2))


@pytest.mark.parametrize("style", ["filled", "added"])
@pytest.mark.parametrize("shape", [(N, S), (B, T, S), (B, 1, S), (1, T, S), (B, T, 1)])
@pytest.mark.parametrize("empty", [False, True])
def test_hand_written(style: Any, shape: tuple[int, ...], empty: bool) -> None:
    """Rows with nothing left are means; the mask of the second style says what to block."""
    given = (np.random.default_rng(1).random(shape) < 0.6).astype(np.float32)
    given[..., 0] = style == "filled"
    if empty:
        given[-1] = style == "added"
    mask, bias = seeds.import_masks(mask=given, style=style, num_heads=N)
    assert (bias is None) == (style == "filled" or not empty)
    assert_close(ours(mask, bias), by_hand(given, style), f"{shape}", factor=FACTOR)


@pytest.mark.parametrize("style", ["filled", "added"])
def test_hand_written_export_then_import(style: Any) -> None:
    """The identity on what a mask means, or a refusal that says why."""
    held = [0]

    @many
    @seed(SEED)
    @draws
    def check(number: int, kinds: set[str], excluded: float) -> None:
        mask = random_mask(number, kinds, excluded)
        before = pairs(mask)
        heads = (before != before[:, :1]).any()
        wide = (before != before[:1]).any() or (before != before[:, :, :1]).any()
        options: Any = {"style": style, "query_length": T, "key_length": S}
        if (heads and wide) or (style == "added" and not before.any(-1).all()):
            with pytest.raises(ValueError, match=r"nothing to attend|cannot hold a mask"):
                seeds.export_masks(mask, **options)
            return
        exported = seeds.export_masks(mask, **options)
        if exported:
            after, bias = seeds.import_masks(style=style, **exported)
            assert bias is None
            np.testing.assert_array_equal(pairs(after), before)
        else:
            assert before.all()
        held[0] += 1

    check()
    assert held[0] >= 40


def test_additive_by_hand_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold additive values"):
        seeds.export_masks(None, numbers(T, S), style="filled", query_length=T, key_length=S)
