"""torch, by each of the ways that `torch.nn.MultiheadAttention` goes."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal
from unittest import mock

import numpy as np

from experiments.benchmarks.cases import Case
from experiments.benchmarks.data import Array, Data
from experiments.benchmarks.program import Program, UnsupportedError
from jaxmha import MHAParams
from jaxmha.converters import torch as converter

Path = Literal["sdpa", "native", "weights"]


def program(case: Case, data: Data, *, path: Path) -> Program:
    """The layer by `path`; the core by `scaled_dot_product_attention`, on contiguous B N T H."""
    import torch

    torch.backends.mha.set_fastpath_enabled(path == "native")
    backward, core = case.direction == "backward", data.params is None
    if core and path != "sdpa":
        raise UnsupportedError("torch's core is scaled_dot_product_attention: see torch-sdpa")
    if backward and path == "native":
        raise UnsupportedError("torch's native fast path has no gradient")

    def load(x: Array) -> Any:
        tensor = torch.from_numpy(x)
        return (tensor.transpose(1, 2).contiguous() if core else tensor).requires_grad_(backward)

    loaded = {id(x): load(x) for x in data.distinct}
    query, key, value = (loaded[id(x)] for x in (data.query, data.key, data.value))
    given = None if case.lengths is None else torch.tensor(case.lengths)
    there = None if given is None else torch.arange(case.S) < given[:, None]
    weights, forward = _forward(case, data.params, there, path)
    leaves = [*weights, *loaded.values()]
    for weight in weights:
        weight.requires_grad_(backward)
    cotangent = load(data.cotangent).detach()

    def compute(cotangent: Any) -> tuple[Any, Any]:
        if not backward:
            with torch.no_grad():
                return forward(query, key, value), None
        out = forward(query, key, value)
        return out, torch.autograd.grad(out, leaves, cotangent)

    def run() -> None:
        compute(cotangent)

    def to_numpy(tensor: Any) -> Any:
        tensor = tensor.detach()
        return np.asarray(tensor.transpose(1, 2).contiguous() if core else tensor)

    def outputs(cotangent: Array) -> tuple[Any, Any]:
        if path == "native":
            assert_native(run)
        out, gradients = compute(load(cotangent).detach())
        if gradients is None:
            return to_numpy(out), None
        return to_numpy(out), [to_numpy(g) for g in gradients[len(weights) :]]

    return Program(lambda: None, run, outputs)


def _forward(
    case: Case, params: MHAParams | None, there: Any, path: Path
) -> tuple[list[Any], Callable[..., Any]]:
    """Weights, and the function from query, key and value to the output."""
    import torch

    causal, grouped = case.kind == "causal", case.K != case.N
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention,
        attn_mask=None if there is None else there[:, None, None],
        is_causal=causal,
        enable_gqa=grouped,
    )
    if params is None:
        return [], attend
    if grouped and path == "sdpa":
        return _grouped(params, attend)
    module = converter.to_module(params)
    masks: dict[str, Any] = {"need_weights": path == "weights"}
    if there is not None:
        masks["key_padding_mask"] = ~there
    if causal:
        masks["attn_mask"] = torch.ones(case.T, case.S, dtype=torch.bool).triu(1)
        masks["is_causal"] = True
    return list(module.parameters()), lambda q, k, v: module(q, k, v, **masks)[0]


def _grouped(params: MHAParams, attend: Any) -> tuple[list[Any], Callable[..., Any]]:
    """Weights and forward pass of linear layers around `attend`: torch has no grouped layer."""
    import torch

    linear = torch.nn.functional.linear
    weights = []
    for kernel, bias in params[:3]:
        flat = np.asarray(kernel).reshape(len(kernel), -1)
        weights += [torch.tensor(flat.T), torch.tensor(np.asarray(bias).reshape(-1))]
    assert params.out is not None
    kernel = np.asarray(params.out.kernel)
    weights += [torch.tensor(kernel.reshape(-1, kernel.shape[-1]).T), torch.tensor(params.out.bias)]
    H = kernel.shape[1]

    def heads(x: Any, weight: Any, bias: Any) -> Any:
        return linear(x, weight, bias).reshape(*x.shape[:2], -1, H).transpose(1, 2)

    def forward(q: Any, k: Any, v: Any) -> Any:
        inputs = (heads(x, *weights[2 * i : 2 * i + 2]) for i, x in enumerate((q, k, v)))
        return linear(attend(*inputs).transpose(1, 2).flatten(-2), *weights[6:])

    return weights, forward


def assert_native(run: Callable[[], None]) -> None:
    """torch takes its fast path in silence, or does not."""
    import torch

    native = torch._native_multi_head_attention
    with mock.patch.object(torch, "_native_multi_head_attention", side_effect=native) as taken:
        run()
    if not taken.called:
        raise UnsupportedError("torch does not take its native fast path for this case")
