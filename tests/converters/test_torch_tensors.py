"""Tensors of torch whose memory does not hold their values: refused with a remedy, or read right."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import bias, flex_attention

from jaxmha import Mask, dot_product_attention
from jaxmha.converters import lint_masks
from jaxmha.converters import torch as converter
from jaxmha.converters.layout.arrays import to_numpy
from jaxmha.converters.masks import huggingface, sdpa
from tests.tolerance import assert_close

N, D = 2, 6
TRIANGLES = {"lower right": bias.causal_lower_right, "upper left": bias.causal_upper_left}


class Own(torch.Tensor):
    """A tensor with functions of its own."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class Plain(torch.Tensor):
    """A tensor of another name."""


def unusual(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes a tensor of a kind that torch warns of."""

    def quietly(x: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(x)

    return quietly


def lazy(_: torch.Tensor) -> torch.Tensor:
    return torch.nn.parameter.UninitializedParameter()


REFUSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "sparse": (torch.Tensor.to_sparse, r"shape \(6, 6\) is not dense \(sparse_coo\): call to_de"),
    "quantised": (
        unusual(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
        "of qint8 .* is quantised: call dequantize",
    ),
    "complex32": (
        unusual(lambda x: x.to(torch.complex32)),
        "complex32 .* a dtype that NumPy lacks: conv",
    ),
    "lazy": (lazy, "is not initialised: call its module once"),
    "own": (lambda x: x.as_subclass(Own), "a torch Own of float32 .* has functions of its own"),
    "complex64": (
        lambda x: x.to(torch.complex64).conj(),
        "expected a floating array, got torch.complex64",
    ),
}
if hasattr(torch, "float4_e2m1fn_x2"):
    REFUSED["float4"] = (
        lambda x: x.to(torch.uint8).view(torch.float4_e2m1fn_x2),
        "float4_e2m1fn_x2 .* a dtype that NumPy lacks",
    )


def state() -> dict[str, Any]:
    return dict(torch.nn.MultiheadAttention(D, N).state_dict())


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    change, message = REFUSED[case]
    given = state()
    given["out_proj.weight"] = change(given["out_proj.weight"])
    with pytest.raises(ValueError, match=f"^out_proj.weight: .*{message}"):
        converter.import_params(given, num_heads=N)


def test_tensors_that_torch_traces() -> None:
    given = state()

    def call(weight: torch.Tensor) -> torch.Tensor:
        converter.import_params({**given, "out_proj.weight": weight}, num_heads=N)
        return weight.sum()

    weight = given["out_proj.weight"]
    for transformed in (torch.func.grad(call), torch.func.vmap(call)):
        with pytest.raises(ValueError, match=r"^out_proj.weight: .* is traced by torch.func"):
            transformed(weight)


def test_read() -> None:
    x = torch.tensor([1 + 2j, 3 - 5j])
    np.testing.assert_array_equal(to_numpy(x.conj()), [1 - 2j, 3 + 5j])
    np.testing.assert_array_equal(to_numpy(torch.imag(x.conj())), [-2, 5])
    np.testing.assert_array_equal(to_numpy(torch.ones(3).as_subclass(Plain)), np.ones(3))
    half = to_numpy(torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn))
    assert half.dtype.name == "float8_e4m3fn"
    np.testing.assert_array_equal(half.astype(np.float32), [1.5, -2.0])


@pytest.mark.parametrize("name", TRIANGLES)
@pytest.mark.parametrize(("T", "S"), [(3, 5), (3, 3), (5, 3)])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_causal_biases(name: str, T: int, S: int) -> None:
    made = TRIANGLES[name](T, S)
    mask, added = sdpa.import_masks(attn_mask=made)
    assert mask is not None
    assert added is None
    np.testing.assert_array_equal(mask.to_array(T, S, np)[0, 0], made._materialize())
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, n, N, D)).astype(np.float32) for n in (T, S, S))
    query, key, value = (torch.from_numpy(x).transpose(1, 2) for x in (q, k, v))
    call = torch.nn.functional.scaled_dot_product_attention
    expected = call(query, key, value, attn_mask=made)
    actual = dot_product_attention(q, k, v, mask=mask)
    assert_close(actual, expected.transpose(1, 2).numpy())


@pytest.mark.usefixtures("no_shape_hook")
def test_causal_biases_elsewhere() -> None:
    made = bias.causal_lower_right(3, 5)
    assert lint_masks("sdpa", attn_mask=made) == []
    with pytest.raises(ValueError, match=r"torch refuses a CausalBias with is_causal=True"):
        sdpa.import_masks(attn_mask=made, is_causal=True)
    with pytest.raises(ValueError, match=r"^attn_mask: a torch CausalBias .* functions of its own"):
        converter.import_masks(attn_mask=made, num_heads=N)
    with pytest.raises(TypeError, match=r"give mask\._materialize\(\)\.detach\(\)"):
        Mask.dense(made)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_shape_hook")
def test_block_masks() -> None:
    made: Any = flex_attention.create_block_mask(
        lambda b, h, q, k: q >= k, None, None, 3, 5, device="cpu", BLOCK_SIZE=2
    )
    with pytest.raises(TypeError, match=r"^attn_mask: a BlockMask .* mask_mod=block_mask.mask_mod"):
        sdpa.import_masks(attn_mask=made)
    with pytest.raises(TypeError, match=r"mask_mod=block_mask.mask_mod"):
        huggingface.import_masks(attention_mask=made)
    with pytest.raises(TypeError, match=r"got BlockMask: .* mask_mod=block_mask.mask_mod"):
        Mask.dense(made)
    with pytest.raises(TypeError, match=r"got function: give a function of positions as mask_mod="):
        Mask.dense(made.mask_mod)
    q = np.random.default_rng(0).normal(size=(1, 3, N, D)).astype(np.float32)
    k = np.random.default_rng(1).normal(size=(1, 5, N, D)).astype(np.float32)
    assert_close(
        dot_product_attention(q, k, k, mask_mod=made.mask_mod),
        np.asarray(dot_product_attention(q, k, k, mask=Mask.causal())),
    )
