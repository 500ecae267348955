"""A live nn.MultiheadAttention with random weights, and masks of every form for it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from jaxmha.converters.layout.arrays import NDArray, to_numpy, to_torch
from jaxmha.converters.masks.spec import Masks
from tests.tolerance import assert_close

B, N, T, S, H = 3, 2, 5, 7, 11
D = N * H
# 16 floors of float32 are 1e-6 of the scale.
FACTOR = 0.5

FORMS = (None, "bool TS", "bool BNTS", "float TS", "float BNTS", "inf TS", "inf BNTS")
PADDINGS = (None, "bool", "inf")


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
    tensor: torch.Tensor = to_torch(array[0] if axes == "TS" else array)
    return tensor


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
    tensor: torch.Tensor = to_torch(array if batched else array[0])
    return tensor


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spy(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows whenever torch takes its native path."""
    native = vars(torch)["_native_multi_head_attention"]
    taken: list[int] = []

    def noted(*arguments: Any) -> Any:
        taken.append(1)
        return native(*arguments)

    monkeypatch.setattr(torch, "_native_multi_head_attention", noted)
    return taken


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
            masks[c, ..., :length] = mask.to_array(T, length, np)
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
