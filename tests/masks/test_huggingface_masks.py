"""Masks of transformers and of hand-written layers, against live modules."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxmha import Mask, dot_product_attention
from jaxmha.converters.layout.arrays import NDArray, to_numpy
from jaxmha.converters.masks import handwritten, huggingface
from tests.masks.draws import B, N, S, T, numbers, pairs
from tests.tolerance import assert_close

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


@pytest.mark.slow_variants("*-shape1-eager", "*-shape2-eager")
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
    present = np.arange(S) < np.array([[S], [3], [1]])
    make: Any = create_causal_mask if causal else create_bidirectional_mask
    options = {"past_key_values": None, "position_ids": None} if causal else {}
    given = torch.from_numpy(present.astype(dtype))
    theirs = make(
        config=config, inputs_embeds=torch.zeros(B, S, N * H), attention_mask=given, **options
    )
    mask, bias = huggingface.import_masks(attention_mask=given, is_causal=causal)
    assert bias is None
    assert mask is not None
    assert mask.array is None
    np.testing.assert_array_equal(mask.to_array(S, S), to_numpy(theirs) == 0)


@pytest.mark.parametrize(
    ("T", "S", "window"), [(5, 5, 3), (2, 5, 3), (1, 11, 3), (2, 5, 4), (2, 5, 7), (5, 5, 1)]
)
def test_a_causal_model_with_a_window(T: int, S: int, window: int) -> None:
    """With keys in a cache its left bound may come after the query's own index."""
    from transformers import DynamicCache, MistralConfig
    from transformers.masking_utils import create_sliding_window_causal_mask

    config = MistralConfig(num_hidden_layers=1, sliding_window=window)
    config._attn_implementation = "eager"
    cache: Any = DynamicCache()
    cache.update(*torch.zeros(2, B, N, S - T, H), 0)
    present = np.arange(S) >= np.array([[0], [1], [0]])
    make: Any = create_sliding_window_causal_mask
    theirs = make(
        config=config, inputs_embeds=torch.zeros(B, T, N * H), position_ids=None,
        attention_mask=torch.from_numpy(present), past_key_values=cache if S > T else None,
    )  # fmt: skip
    sizes: Any = {"query_length": T, "key_length": S, "is_causal": True}
    mask, _ = huggingface.import_masks(attention_mask=present, sliding_window=window, **sizes)
    assert mask is not None
    np.testing.assert_array_equal(mask.to_array(T, S, np), to_numpy(theirs) == 0)

    exported = huggingface.export_masks(mask, batch_size=B, sliding_window=window, **sizes)
    np.testing.assert_array_equal(exported["attention_mask"], present)
    causal = Mask.causal(S - T)
    without = huggingface.export_masks(causal, batch_size=1, sliding_window=window, **sizes)
    if window < S:  # the model hides none of the keys of four axes
        pairs = without["attention_mask"] == 0
        np.testing.assert_array_equal(pairs, causal.to_array(T, S, np))
    else:
        assert without == {}


def test_a_causal_model_without_a_mask() -> None:
    """Keys of a cache are not hidden: T alone does not say where the triangle is."""
    with pytest.raises(ValueError, match="without key_length="):
        huggingface.import_masks(is_causal=True, query_length=1)
    for arguments in (
        {"query_length": T, "key_length": S},
        {"query_length": T, "attention_mask": np.ones((B, S), int)},
        {"query_length": T, "key_length": S, "attention_mask": np.ones((B, S), int)},
    ):
        mask, _ = huggingface.import_masks(is_causal=True, **arguments)
        assert mask is not None
        assert mask.causal_offset == S - T
    wholes: tuple[dict[str, Any], ...] = ({}, {"key_length": S})
    for whole in wholes:
        mask, _ = huggingface.import_masks(is_causal=True, **whole)
        assert mask is not None
        assert mask.causal_offset == 0
    with pytest.raises(ValueError, match="S=9, got shape"):
        huggingface.import_masks(attention_mask=np.ones((B, S), int), key_length=9)
    with pytest.raises(ValueError, match="T=9"):
        huggingface.import_masks(attention_mask=np.zeros((B, 1, T, S), "f"), query_length=9)
    for causal in (Mask.causal(S - T), Mask.causal(S - T).to_array(T, S)):
        assert huggingface.export_masks(causal, is_causal=True, **SIZES) == {}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_exclusions_and_finite_values_of_narrow_dtypes(dtype: str) -> None:
    """-inf becomes the smallest number and comes back excluded; finite values never do."""
    wide = np.zeros((1, 1, T, S))
    wide[..., 2], wide[..., 3], wide[..., 4] = -np.inf, 2.5, -6e4
    exported = huggingface.export_masks(Mask.causal(), wide, dtype=jnp.dtype(dtype), **SIZES)
    given = exported["attention_mask"]
    assert given.dtype == dtype
    assert np.isfinite(given.astype(np.float32)).all()
    mask, bias = huggingface.import_masks(**exported)
    allowed = pairs(Mask.causal(), wide)
    np.testing.assert_array_equal(pairs(mask, bias), allowed)
    assert bias is not None
    kept = np.where(allowed, bias.astype(np.float64), 0)
    np.testing.assert_array_equal(kept, np.where(allowed, wide.astype(dtype), 0).astype(np.float64))
    for value in (1e39, -1e39):
        wide[..., 5] = value
        with pytest.raises(ValueError, match=f"finite values that {dtype} cannot.*1e\\+39"):
            huggingface.export_masks(None, wide, dtype=jnp.dtype(dtype), **SIZES)
    if dtype == "float16":
        wide[..., 5] = -1e5
        with pytest.raises(ValueError, match="pass them as -inf"):
            huggingface.export_masks(None, wide, dtype=np.float16, **SIZES)


def test_errors_of_transformers() -> None:
    with pytest.raises(ValueError, match="must hold 1"):
        huggingface.import_masks(attention_mask=np.array([[0.0, -1e9]]))
    with pytest.raises(TypeError, match="floating"):
        huggingface.import_masks(attention_mask=np.ones((B, 1, T, S), int))
    with pytest.raises(ValueError, match="attention_mask: expected axes"):
        huggingface.import_masks(attention_mask=np.ones((B, T, S), "f"))
    with pytest.raises(ValueError, match="holds padding of keys"):
        huggingface.export_masks(Mask.causal(), form="padding", **SIZES)
    with pytest.raises(ValueError, match=r"of a causal model, and is_causal=False"):
        huggingface.export_masks(None, sliding_window=3, **SIZES)
    with pytest.raises(TypeError, match=r"floating dtype of the model, got int32"):
        huggingface.export_masks(None, dtype=np.int32, **SIZES)
    for size in (-4, 4.0):
        with pytest.raises(ValueError, match=r"query_length must be an integer of at least 0"):
            huggingface.export_masks(Mask.causal(), **SIZES | {"query_length": size})


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
    mask, bias = handwritten.import_masks(mask=given, style=style, num_heads=N)
    assert (bias is None) == (style == "filled" or not empty)
    assert_close(ours(mask, bias), by_hand(given, style), f"{shape}", factor=FACTOR)


def test_additive_by_hand_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold additive values"):
        handwritten.export_masks(None, numbers(T, S), style="filled", query_length=T, key_length=S)
