"""torch, by each code path of `torch.nn.MultiheadAttention`."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal
from unittest import mock

import numpy as np

from jaxmha import MHAParams
from jaxmha.bench.case import Case
from jaxmha.bench.data import Array, Data
from jaxmha.bench.program import Program, UnsupportedError
from jaxmha.converters import torch as converter

Path = Literal["sdpa", "native", "weights"]


def program(case: Case, data: Data, *, path: Path, backend: str = "") -> Program:
    """The program of a case: a layer by the code path `path` of `torch.nn.MultiheadAttention`; the core
    by `scaled_dot_product_attention`, on contiguous B N T H.

    `backend`: cudnn, flash or efficient, on a GPU; "": torch chooses."""
    import torch

    torch.backends.mha.set_fastpath_enabled(path == "native")
    backward, core = case.direction == "backward", data.params is None
    if core and path != "sdpa":
        raise UnsupportedError("torch's core is scaled_dot_product_attention: see torch-sdpa")
    if backward and path == "native":
        raise UnsupportedError("torch's native fast path has no gradient")

    torch.backends.cuda.matmul.allow_tf32 = case.tf32
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, case.dtype)

    def load(x: Array) -> Any:
        tensor = torch.from_numpy(x).to(device, dtype)
        return (tensor.transpose(1, 2).contiguous() if core else tensor).requires_grad_(backward)

    loaded = {id(x): load(x) for x in data.distinct}
    query, key, value = (loaded[id(x)] for x in (data.query, data.key, data.value))
    weights, forward = _forward(case, data, load, path)
    leaves = [*weights, *loaded.values()]
    for weight in weights:
        weight.requires_grad_(backward)
    cotangent = load(data.cotangent).detach()

    def compute(cotangent: Any) -> tuple[Any, Any]:
        with _by(backend):
            if not backward:
                with torch.no_grad():
                    return forward(query, key, value), None
            out = forward(query, key, value)
            return out, torch.autograd.grad(out, leaves, cotangent)

    def run(calls: int = 1) -> None:
        for _ in range(calls):
            compute(cotangent)
        if device != "cpu":
            torch.cuda.synchronize()

    def to_numpy(tensor: Any) -> Any:
        tensor = tensor.detach().float().cpu()
        return np.asarray(tensor.transpose(1, 2).contiguous() if core else tensor)

    def outputs(cotangent: Array) -> tuple[Any, Any]:
        if path == "native":
            assert_native(run)
        out, gradients = compute(load(cotangent).detach())
        if gradients is None:
            return to_numpy(out), None
        return to_numpy(out), [to_numpy(g) for g in gradients[len(weights) :]]

    return Program(lambda: None, run, outputs)


def _by(backend: str) -> Any:
    """A context in which torch uses only this backend of attention; "": any."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not backend:
        return nullcontext()
    return sdpa_kernel(getattr(SDPBackend, f"{backend.upper()}_ATTENTION"))  # no Python enum


def _mask(case: Case, device: str) -> Any:
    """The conditions as Booleans `B|1 1 T|1 S`; None: no condition, or only causality."""
    import torch

    lengths = None if case.lengths is None else torch.tensor(case.lengths, device=device)
    keys = torch.arange(case.S, device=device)
    mask = None if lengths is None else (keys < lengths[:, None])[:, None, None]
    if case.window is None and not case.packed and not (case.is_causal and mask is not None):
        return mask
    first, end = (torch.tensor(x, device=device)[:, None, :, None] for x in case.bounds)
    return (first <= keys) & (keys < end)


def _forward(
    case: Case, data: Data, load: Callable[[Array], Any], path: Path
) -> tuple[list[Any], Callable[..., Any]]:
    """Weights, and the function from query, key and value to the output."""
    import torch

    params, grouped = data.params, case.K != case.N
    device = load(data.cotangent).device
    mask = _mask(case, device)
    causal = case.is_causal and mask is None and data.bias is None
    if data.bias is not None:
        added = torch.from_numpy(data.bias).to(device, getattr(torch, case.dtype))
        first, end = (torch.tensor(x, device=device)[:, None, :, None] for x in case.bounds)
        keys = torch.arange(case.S, device=device)
        mask = added.masked_fill(~((first <= keys) & (keys < end)), -torch.inf)
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention,
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=grouped,
    )
    if params is None:
        return [], attend
    if grouped and path == "sdpa":
        return _grouped(params, attend, load)
    module = converter.to_module(params).to(device, getattr(torch, case.dtype))
    masks: dict[str, Any] = {"need_weights": path == "weights"}
    if case.window is not None or case.packed:
        raise UnsupportedError("torch's layer takes no window and no packed sequences")
    if case.lengths is not None and mask is not None:
        lengths = torch.tensor(case.lengths, device=device)
        masks["key_padding_mask"] = torch.arange(case.S, device=device) >= lengths[:, None]
    if case.is_causal:
        masks["attn_mask"] = torch.ones(case.T, case.S, dtype=torch.bool, device=device).triu(1)
        masks["is_causal"] = True
    return list(module.parameters()), lambda q, k, v: module(q, k, v, **masks)[0]


def _grouped(
    params: MHAParams, attend: Any, load: Callable[[Array], Any]
) -> tuple[list[Any], Callable[..., Any]]:
    """Weights and forward pass of linear layers around `attend`: torch has no grouped layer."""
    import torch

    linear = torch.nn.functional.linear
    weights = []
    for kernel, bias in params[:3]:
        flat = np.asarray(kernel).reshape(len(kernel), -1)
        weights += [flat.T, np.asarray(bias).reshape(-1)]
    assert params.out is not None
    kernel = np.asarray(params.out.kernel)
    weights += [kernel.reshape(-1, kernel.shape[-1]).T, np.asarray(params.out.bias)]
    like = load(np.zeros((1, 1, 1, 1), np.float32))
    tensors = [torch.tensor(x, dtype=like.dtype, device=like.device) for x in weights]
    H = kernel.shape[1]

    def heads(x: Any, weight: Any, bias: Any) -> Any:
        return linear(x, weight, bias).reshape(*x.shape[:2], -1, H).transpose(1, 2)

    def forward(q: Any, k: Any, v: Any) -> Any:
        inputs = (heads(x, *tensors[2 * i : 2 * i + 2]) for i, x in enumerate((q, k, v)))
        return linear(attend(*inputs).transpose(1, 2).flatten(-2), *tensors[6:])

    return tensors, forward


def assert_native(run: Callable[[], None]) -> None:
    """Raises UnsupportedError unless torch takes its native fast path, which it does not report."""
    import torch

    native = torch._native_multi_head_attention
    with mock.patch.object(torch, "_native_multi_head_attention", side_effect=native) as taken:
        run()
    if not taken.called:
        raise UnsupportedError("torch does not take its native fast path for this case")
