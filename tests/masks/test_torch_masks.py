"""Masks of nn.MultiheadAttention against live torch: every combination of its arguments."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from jaxmha import Semantics, dot_product_attention, multi_head_attention
from jaxmha.converters.layout.arrays import to_numpy, to_torch
from jaxmha.converters.masks.spec import Masks
from jaxmha.converters.masks.torch import Path, import_masks, path_of, static_heads
from jaxmha.converters.torch import from_module, import_params
from jaxmha.projections import combine, project
from tests.drawn import to_jax
from tests.masks import ours
from tests.masks.torch_live import (
    FACTOR,
    FORMS,
    PADDINGS,
    B,
    D,
    H,
    N,
    S,
    T,
    attn_mask,
    call,
    check,
    draw,
    key_padding,
    module,
    quiet,
    spy,
    stacked,
)
from tests.tolerance import assert_close

BOTH = (False, True)
SETTINGS = list(itertools.product(BOTH, BOTH, BOTH))  # bias_kv, zero_attn, need_weights


@pytest.mark.slow_variants("*", "!True-True-True", "!False-True-False", "!False-False-False")
@pytest.mark.parametrize(("bias_kv", "zero_attn", "need_weights"), SETTINGS)
def test_every_combination(bias_kv: bool, zero_attn: bool, need_weights: bool) -> None:
    """attn_mask 7 x key_padding_mask 3 x is_causal 2 x batch_first 2 x batched 2, per setting."""
    layer = module(bias_kv, zero_attn)
    params, semantics = from_module(layer, batch_first=layer.batch_first)
    made: dict[str, Any] = {"num_heads": N, "add_bias_kv": bias_kv, "add_zero_attn": zero_attn}
    inputs = draw(B, T, D), draw(B, S, D, seed=1), draw(B, S, D, seed=2)
    calls, masks = [], []
    for batched, form, padding, is_causal in itertools.product(BOTH, FORMS, PADDINGS, BOTH):
        arguments: dict[str, Any] = {
            "attn_mask": attn_mask(form, batched),
            "key_padding_mask": key_padding(padding, batched),
            "is_causal": is_causal,
            "need_weights": need_weights,
        }
        own = inputs if batched else [x[0] for x in inputs]
        if form is None and is_causal:
            for layer.batch_first in BOTH:
                with pytest.raises(RuntimeError, match="Need attn_mask"):
                    call(layer, *own, **arguments)
            with pytest.raises(ValueError, match="torch refuses is_causal"):
                import_masks(**made, **arguments)
            continue
        masks.append(import_masks(**made, **arguments))
        for layer.batch_first in BOTH:
            expected = call(layer, *own, **arguments)
            what = f"{batched=} {form=} {padding=} {is_causal=} {layer.batch_first=}"
            calls.append((len(masks) - 1, expected, slice(None) if batched else 0, what))
    assert len(calls) == 2 * 2 * (7 * 3 * 2 - 3)
    semantics = Semantics.torch(
        "weights" if need_weights else "sdpa", add_zero_attn=semantics.add_zero_attn
    )
    arrays = stacked(masks, bias_kv + zero_attn, T)
    out, weights = ours.layer(params, inputs, arrays, semantics)
    for c, expected, rows, what in calls:
        check((out[c], weights[c]), expected, rows, what)
    assert np.isnan(out).any() == (need_weights and not bias_kv and not zero_attn)


@pytest.mark.slow_variants("*", "!False-False-True")  # native, and with weights
@pytest.mark.parametrize(("bias_kv", "zero_attn", "need_weights"), SETTINGS)
def test_every_combination_in_eval(
    bias_kv: bool, zero_attn: bool, need_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Self-attention without gradients, where torch may take its native path."""
    taken = spy(monkeypatch)
    layer = module(bias_kv, zero_attn)
    params, semantics = from_module(layer, batch_first=layer.batch_first)
    made: dict[str, Any] = {"num_heads": N, "add_bias_kv": bias_kv, "add_zero_attn": zero_attn}
    inputs = draw(B, S, D)
    calls: dict[Path, list[Any]] = {}
    masks: dict[Path, list[Masks]] = {}
    for layer.batch_first, batched, form, padding, is_causal in itertools.product(
        BOTH, BOTH, FORMS, PADDINGS, BOTH
    ):
        arguments: dict[str, Any] = {
            "attn_mask": attn_mask(form, batched, T=S),
            "key_padding_mask": key_padding(padding, batched),
            "need_weights": need_weights,
        }
        x = inputs if batched else inputs[0]
        taken.clear()
        with torch.no_grad():
            path = path_of(layer, x, x, x, **arguments)
            arguments["is_causal"] = is_causal
            if form is None and is_causal and path != "native":
                with pytest.raises(ValueError, match="torch refuses is_causal"):
                    import_masks(path=path, **made, **arguments)
                continue
            expected = call(layer, x, x, x, **arguments)
        what = f"{path=} {batched=} {form=} {padding=} {is_causal=} {layer.batch_first=}"
        assert (path == "native") == bool(taken), what
        masks.setdefault(path, []).append(import_masks(path=path, **made, **arguments))
        rows = slice(None) if batched else 0
        calls.setdefault(path, []).append((expected, rows, what))
    slow = "weights" if need_weights else "sdpa"
    assert set(calls) == ({slow} if bias_kv or zero_attn else {slow, "native"})
    for path, found in calls.items():
        out, weights = ours.layer(
            params,
            (inputs,),
            stacked(masks[path], bias_kv + zero_attn, S),
            Semantics.torch(path, add_zero_attn=semantics.add_zero_attn),
        )
        for c, (expected, rows, what) in enumerate(found):
            check((out[c], weights[c]), expected, rows, what)


@pytest.mark.slow_variants("True-True", "False-False")
@pytest.mark.parametrize("need_weights", BOTH)
@pytest.mark.parametrize("batched", BOTH)
def test_structure_is_kept_and_means_the_same(batched: bool, need_weights: bool) -> None:
    layer = module(False, True)
    params, semantics = from_module(layer, batch_first=layer.batch_first)
    path: Path = "weights" if need_weights else "sdpa"
    semantics = Semantics.torch(path, add_zero_attn=semantics.add_zero_attn)
    inputs = [draw(*((B,) if batched else ()), length, D) for length in (T, S, S)]
    bottom_right = to_torch(~np.tri(T, S, S - T, dtype=bool))
    arguments: dict[str, Any] = {
        "attn_mask": bottom_right,
        "key_padding_mask": key_padding("bool", batched),
        "is_causal": True,
        "need_weights": need_weights,
    }
    mask, bias = import_masks(num_heads=N, add_zero_attn=True, **arguments)
    assert mask is not None
    assert mask.causal_offset == S - T
    assert mask.array is None
    assert mask.key_value_padding is not None
    assert mask.key_value_padding.shape == ((B, S) if batched else (1, S))
    assert bias is None
    given = [to_jax(to_numpy(x)) for x in inputs]
    actual = multi_head_attention(
        params, *given, mask=mask, semantics=semantics, return_weights=True
    )
    check(actual, call(layer, *inputs, **arguments), slice(None), f"{batched=} {need_weights=}")


def test_floats_that_only_exclude_are_a_mask() -> None:
    causal = torch.nn.Transformer.generate_square_subsequent_mask(S)
    mask, bias = import_masks(attn_mask=causal, is_causal=True)
    assert mask is not None
    assert (mask.causal_offset, mask.array, bias) == (0, None, None)
    mask, bias = import_masks(attn_mask=causal)
    assert mask is not None
    assert bias is None
    np.testing.assert_array_equal(mask.array, np.tri(S, dtype=bool)[None, None])
    padding = torch.zeros(B, S, dtype=torch.bfloat16)
    padding[1, 2:] = -torch.inf
    mask, bias = import_masks(key_padding_mask=padding)
    assert mask is not None
    assert bias is None
    np.testing.assert_array_equal(mask.key_value_padding, to_numpy(padding == 0))


def test_finite_constants_add_up_as_in_torch() -> None:
    """Two of them are -inf where they overflow, and are no exclusion where they do not."""
    low = float(np.finfo(np.float32).min)
    layer = module(False, False)
    params, _ = from_module(layer, batch_first=layer.batch_first)
    inputs = draw(B, T, D), draw(B, S, D, seed=1), draw(B, S, D, seed=2)
    for constant in (low, -1e9):
        arguments: dict[str, Any] = {
            "attn_mask": torch.full((T, S), constant).triu(1),
            "key_padding_mask": torch.tensor([[0.0] * 5 + [constant] * 2] * B),
        }
        arguments["key_padding_mask"][1] = constant
        mask, bias = import_masks(num_heads=N, **arguments)
        assert mask is None
        assert bias is not None
        assert bias.shape == (B, 1, T, S)
        assert np.isinf(bias).any() == (constant == low)
        given = [to_jax(to_numpy(x)) for x in inputs]
        actual = multi_head_attention(
            params, *given, bias=bias, semantics=Semantics.torch(), return_weights=True
        )
        check(actual, call(layer, *inputs, **arguments), slice(None), f"{constant=}")


@pytest.mark.everyday(need_weights=[True])
@pytest.mark.parametrize("need_weights", BOTH)
def test_separate_widths_and_averaged_weights(need_weights: bool) -> None:
    """`use_separate_proj_weight`; the average over heads is the caller's."""
    layer = module(True, True, widths=(13, 17))
    params, semantics = from_module(layer, batch_first=layer.batch_first)
    inputs = draw(B, T, D), draw(B, S, 13, seed=1), draw(B, S, 17, seed=2)
    arguments: dict[str, Any] = {
        "attn_mask": attn_mask("bool BNTS", True),
        "key_padding_mask": key_padding("bool", True),
        "need_weights": need_weights,
    }
    layer.batch_first = True
    out, averaged = layer(*inputs, **arguments)
    mask, bias = import_masks(num_heads=N, add_bias_kv=True, add_zero_attn=True, **arguments)
    given = [to_jax(to_numpy(x)) for x in inputs]
    actual, weights = multi_head_attention(
        params, *given, mask=mask, bias=bias, semantics=semantics, return_weights=True
    )
    assert_close(actual, to_numpy(out), factor=FACTOR)
    assert (averaged is not None) == need_weights
    if need_weights:
        assert_close(weights.mean(1), to_numpy(averaged), "weights", factor=FACTOR)


@pytest.mark.slow_variants("True-True", "False-False")
@pytest.mark.parametrize(("zero_attn", "need_weights"), list(itertools.product(BOTH, BOTH)))
def test_static_keys_and_values(zero_attn: bool, need_weights: bool) -> None:
    """`F.multi_head_attention_forward` with keys and values that are projected already."""
    layer = module(False, zero_attn)
    state = {name: to_numpy(array) for name, array in layer.state_dict().items()}
    params, _ = import_params(state, num_heads=N)
    query, key = draw(T, B, D), draw(S, B, D, seed=1)
    static_k, static_v = draw(B * N, S, H, seed=2), draw(B * N, S, H, seed=3)
    masks: dict[str, Any] = {
        "attn_mask": attn_mask("bool BNTS", True),
        "key_padding_mask": key_padding("inf", True),
        "need_weights": need_weights,
    }
    with quiet():
        expected, weights = torch.nn.functional.multi_head_attention_forward(
            query,
            key,
            key,
            embed_dim_to_check=D,
            num_heads=N,
            in_proj_weight=layer.in_proj_weight,
            in_proj_bias=layer.in_proj_bias,
            bias_k=None,
            bias_v=None,
            add_zero_attn=zero_attn,
            dropout_p=0.0,
            out_proj_weight=layer.out_proj.weight,
            out_proj_bias=layer.out_proj.bias,
            static_k=static_k,
            static_v=static_v,
            average_attn_weights=False,
            **masks,
        )
    mask, bias = import_masks(num_heads=N, add_zero_attn=zero_attn, **masks)
    arrays = stacked([(mask, bias)], int(zero_attn), T)
    given = to_jax(to_numpy(query.transpose(0, 1)))
    extra = ((0, 0), (0, int(zero_attn)), (0, 0), (0, 0))
    k, v = (np.pad(static_heads(x, N), extra) for x in (static_k, static_v))
    out, actual = dot_product_attention(
        project(params, given, given)[0],
        k,
        v,
        mask=arrays["mask"][0],
        bias=arrays["bias"][0],
        fully_masked="nan" if need_weights else "zero",
        return_weights=True,
    )
    assert_close(combine(params, out), to_numpy(expected.transpose(0, 1)), factor=FACTOR)
    assert (weights is not None) == need_weights
    if weights is not None:
        assert_close(actual, to_numpy(weights), "weights", factor=FACTOR)
