"""Importing torch tensors without a copy: the same values, the same memory, or an error."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import jaxmha
from jaxmha.converters import torch as converter
from jaxmha.converters.layout.shared import source
from jaxmha.params import leaves
from tests.masks.draws import numbers
from tests.tolerance import assert_close, assert_same

E, N, DTYPES = 32, 4, ("float32", "bfloat16", "float16")


def module(dtype: str = "float32", **settings: Any) -> torch.nn.MultiheadAttention:
    made = torch.nn.MultiheadAttention(
        E, N, batch_first=True, dtype=getattr(torch, dtype), **settings
    )
    return made.requires_grad_(False)


def pointers(tensors: Any) -> list[range]:
    """The memory of every tensor."""
    return [range(x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors]


@pytest.mark.parametrize("settings", [{}, {"kdim": 48, "vdim": 16}, {"add_bias_kv": True}], ids=str)
@pytest.mark.everyday(dtype=["bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_values_in_the_same_memory(dtype: str, settings: dict[str, Any]) -> None:
    layer = module(dtype, **settings)
    copied, shared = (leaves(converter.from_module(layer, copy=x).params) for x in (True, False))
    places = pointers(layer.state_dict().values())
    assert copied.keys() == shared.keys()
    for name, array in shared.items():
        assert isinstance(array, jax.Array)
        assert_same(array, copied[name], name)
        place = array.unsafe_buffer_pointer()
        assert any(place in memory for memory in places), name


def test_a_layer_computes_with_shared_parameters_and_sees_changes() -> None:
    layer, x = module(), numbers(2, 5, E).astype(np.float32)
    params, semantics = converter.from_module(layer, copy=False)
    expected = jaxmha.multi_head_attention(converter.from_module(layer)[0], x, semantics=semantics)
    assert_close(jaxmha.multi_head_attention(params, x, semantics=semantics), np.asarray(expected))
    assert params.out is not None
    assert params.out.bias is not None
    layer.out_proj.bias.fill_(7.0)
    assert np.asarray(params.out.bias)[0] == 7.0
    del layer  # the arrays keep the memory
    assert np.asarray(params.query.kernel).shape == (E, N, E // N)


def unaligned(state: dict[str, Any]) -> None:
    memory = torch.zeros(4 * E)
    start = (64 - memory.data_ptr() % 64) % 64 // 4 + 1
    state["out_proj.bias"] = memory[start : start + E]


def transposed(state: dict[str, Any]) -> None:
    state["out_proj.weight"] = state["out_proj.weight"].T


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "gradient": (
        lambda s: s["out_proj.bias"].requires_grad_(),
        r"float32\[32\] requires a gradient, .*: freeze the module",
    ),
    "contiguous": (transposed, r"float32\[32, 32\] is a view that is not contiguous: call contig"),
    "aligned": (unaligned, r"shape \(32,\) begins 4 bytes after a multiple of 64"),
    "device": (
        lambda s: s.update({"out_proj.bias": s["out_proj.bias"].to("meta")}),
        r"^out_proj.bias: .* of shape \(32,\) on the meta device has no values",
    ),
    "float64": (
        lambda s: s.update({"out_proj.bias": s["out_proj.bias"].double()}),
        "would be rounded to float32: call jax.config.update",
    ),
    "sparse": (
        lambda s: s.update({"out_proj.weight": s["out_proj.weight"].to_sparse()}),
        r"^out_proj.weight: .* float32 and shape \(32, 32\) is not dense .*: call to_dense\(\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    state = module().state_dict()
    change, message = REFUSED[case]
    change(state)
    with pytest.raises(ValueError, match=message):
        converter.import_params(state, num_heads=N, copy=False)


def test_trained_modules_and_other_arrays_are_refused() -> None:
    with pytest.raises(ValueError, match="requires a gradient"):
        converter.from_module(torch.nn.MultiheadAttention(E, N), copy=False)
    with pytest.raises(
        ValueError, match="is on meta, not on the CPU: move it, or import with copy"
    ):
        source(torch.zeros(3, device="meta"))  # as a tensor of a GPU
    state = {name: x.numpy() for name, x in module().state_dict().items()}
    with pytest.raises(
        TypeError, match="copy=False shares torch tensors, got ndarray: import with"
    ):
        converter.import_params(state, num_heads=N, copy=False)
