"""Masks of nn.MultiheadAttention against live torch: every combination of its arguments."""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from jaxmha import Semantics, multi_head_attention
from jaxmha.converters.arrays import NDArray, to_numpy, to_torch
from jaxmha.converters.masks.argument import Masks
from jaxmha.converters.masks.torch import import_masks, path_of
from jaxmha.converters.torch import from_module
from tests.tolerance import assert_close

B, N, T, S, H = 3, 2, 5, 7, 11
D = N * H
# 16 floors of float32 are 1e-6 of the scale.
FACTOR = 0.5

FORMS = (None, "bool TS", "bool BNTS", "float TS", "float BNTS", "inf TS", "inf BNTS")
PADDINGS = (None, "bool", "inf")
BOTH = (False, True)
SETTINGS = list(itertools.product(BOTH, BOTH, BOTH))  # bias_kv, zero_attn, need_weights


@cache
def module(
    bias_kv: bool, zero_attn: bool, widths: tuple[int, int] = (D, D)
) -> torch.nn.MultiheadAttention:
    """A layer with random weights and biases, in eval mode, its gradients recorded."""
    kdim, vdim = widths
    layer = torch.nn.MultiheadAttention(
        D, N, add_bias_kv=bias_kv, add_zero_attn=zero_attn, kdim=kdim, vdim=vdim
    )
    generator = torch.Generator().manual_seed(2 * bias_kv + zero_attn)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return layer.eval()


def attn_mask(form: str | None, batched: bool, S: int = S, T: int = T) -> torch.Tensor | None:
    """Random; two rows have nothing left, unless every value is finite."""
    if form is None:
        return None
    kind, axes = form.split()
    rows = {"TS": 1, "BNTS": B * N if batched else N}[axes]
    rng = np.random.default_rng([len(form), rows, S])
    blocked = rng.random((rows, T, S)) < 0.4
    blocked[0, 2] = blocked[-1, 3] = True
    array: NDArray = blocked
    if kind != "bool":
        array = rng.standard_normal(blocked.shape).astype(np.float32)
        array = np.where(blocked, np.float32(-np.inf), array) if kind == "inf" else array
    return to_torch(array[0] if axes == "TS" else array)


def key_padding(form: str | None, batched: bool, S: int = S) -> torch.Tensor | None:
    """Random; the second batch row is all padding."""
    if form is None:
        return None
    rng = np.random.default_rng(S)
    blocked = rng.random((B, S)) < 0.3
    blocked[1] = True
    array: NDArray = blocked
    if form == "inf":
        added = rng.standard_normal((B, S)).astype(np.float32)
        array = np.where(blocked, np.float32(-np.inf), added)
    return to_torch(array if batched else array[0])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def quiet() -> Iterator[None]:
    """torch advises against masks of two dtypes, and takes them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        yield


def stacked(made: list[Masks], extra: int, T: int, S: int = S) -> Any:
    """Masks of many calls as one `(C, B, N, T, S + extra)`, so that one program computes them."""
    masks = np.ones((len(made), B, N, T, S + extra), bool)
    biases = np.zeros(masks.shape, np.float32)
    for c, (mask, bias) in enumerate(made):
        if mask is not None:
            own = mask.array is not None and mask.array.shape[-1] == S + extra
            length = S + extra if own else S
            masks[c, ..., :length] = mask.to_array(T, length)
        if bias is not None:
            biases[c, ..., :S] = bias
    return {"mask": masks, "bias": biases}


def check(actual: Any, expected: Any, rows: Any, what: str) -> None:
    """Output, and weights where torch returns them, of the batch rows given."""
    for ours, theirs in zip(actual, expected, strict=True):
        if theirs is not None:
            assert_close(ours[rows], to_numpy(theirs), what, factor=FACTOR)


def call(layer: torch.nn.MultiheadAttention, *inputs: torch.Tensor, **arguments: Any) -> Any:
    """The live layer on `(B, T, D)` or `(T, D)`, whatever its `batch_first`."""
    turn = inputs[0].dim() == 3 and not layer.batch_first
    if turn:
        own = inputs[0].transpose(0, 1)
        inputs = tuple(own if x is inputs[0] else x.transpose(0, 1) for x in inputs)
    with quiet():
        out, weights = layer(*inputs, average_attn_weights=False, **arguments)
    return out.transpose(0, 1) if turn else out, weights


@pytest.mark.parametrize(("bias_kv", "zero_attn", "need_weights"), SETTINGS)
def test_every_combination(bias_kv: bool, zero_attn: bool, need_weights: bool) -> None:
    """attn_mask 7 x key_padding_mask 3 x is_causal 2 x batch_first 2 x batched 2, per setting."""
    layer = module(bias_kv, zero_attn)
    params, semantics = from_module(layer)
    made = {"num_heads": N, "add_bias_kv": bias_kv, "add_zero_attn": zero_attn}
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
    many = [np.broadcast_to(to_numpy(x), (len(masks), *x.shape)) for x in inputs]
    answer = multi_head_attention(
        params,
        *many,
        semantics=semantics,
        return_weights=True,
        **stacked(masks, bias_kv + zero_attn, T),
    )
    out, weights = map(np.asarray, answer)
    for c, expected, rows, what in calls:
        check((out[c], weights[c]), expected, rows, what)
    assert np.isnan(out).any() == (need_weights and not bias_kv and not zero_attn)


@pytest.mark.parametrize(("bias_kv", "zero_attn", "need_weights"), SETTINGS)
def test_every_combination_in_eval(
    bias_kv: bool, zero_attn: bool, need_weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Self-attention without gradients, where torch may take its native path."""
    native, taken = torch._native_multi_head_attention, []  # type: ignore[attr-defined]
    monkeypatch.setattr(
        torch, "_native_multi_head_attention", lambda *a: (taken.append(1), native(*a))[1]
    )
    layer = module(bias_kv, zero_attn)
    params, semantics = from_module(layer)
    made = {"num_heads": N, "add_bias_kv": bias_kv, "add_zero_attn": zero_attn}
    inputs = draw(B, S, D)
    calls: dict[str, list[Any]] = {}
    masks: dict[str, list[Masks]] = {}
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
        x = np.broadcast_to(to_numpy(inputs), (len(found), *inputs.shape))
        preset: Any = Semantics.torch
        answer = multi_head_attention(
            params,
            x,
            semantics=preset(path, add_zero_attn=semantics.add_zero_attn),
            return_weights=True,
            **stacked(masks[path], bias_kv + zero_attn, S),
        )
        out, weights = map(np.asarray, answer)
        for c, (expected, rows, what) in enumerate(found):
            check((out[c], weights[c]), expected, rows, what)
