"""Reads torch tensors into NumPy; refuses tensors whose memory does not hold their values."""

from functools import cache
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


def from_torch(tensor: object, name: str = "") -> NDArray[Any]:
    """A NumPy copy of a torch tensor; `name` is shown in errors.

    Raises:
      TypeError: it is another object of torch.
      ValueError: its memory does not hold its values, or NumPy lacks its dtype.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        kind = type(tensor).__name__
        remedy = "pass an array or a tensor"
        if hasattr(tensor, "mask_mod"):
            remedy = (
                "it holds a function of positions: pass mask_mod=block_mask.mask_mod to "
                "jaxmha.dot_product_attention, with operators in place of functions of torch"
            )
        raise TypeError(f"{_at(name)}a {kind} of torch is not an array: {remedy}")
    refuse_unreadable(tensor, name)
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    dtype = _dtype_of(tensor.dtype)
    if dtype is None:
        return np.array(tensor.numpy(), copy=True)
    width = {1: torch.int8, 2: torch.int16}[dtype.itemsize]
    return np.array(tensor.view(width).numpy().view(dtype), copy=True)


def refuse_unreadable(tensor: object, name: str = "") -> None:
    """Raises ValueError, with the name, for a torch tensor whose memory does not hold its values;
    does nothing for objects that are not torch tensors."""
    if not any(base.__module__.startswith("torch") for base in type(tensor).__mro__):
        return
    import torch

    if not isinstance(tensor, torch.Tensor):
        return
    if torch.nn.parameter.is_lazy(tensor):
        raise ValueError(
            f"{_at(name)}a parameter of torch is not initialised: call its module once, with an "
            "input, which gives it a shape"
        )
    if tensor.is_meta:
        raise ValueError(
            f"{_at(name)}a torch tensor of shape {tuple(tensor.shape)} on the meta device has no "
            "values: move the module with to_empty(device='cpu') and load its weights first"
        )
    if problem := _problem(tensor):
        raise ValueError(f"{_at(name)}{_shown(tensor)} {problem}")


def _problem(tensor: "torch.Tensor") -> str:
    """The reason why the memory of a tensor does not hold its values, and a remedy; or ""."""
    import torch

    if _has_own_functions(type(tensor)):
        return (
            "has functions of its own (__torch_function__ or __torch_dispatch__), so its memory may "
            "not hold its values: pass a plain tensor of them, by a method such as full_tensor() or "
            "dequantize(), or as_subclass(torch.Tensor) if its memory does hold them"
        )
    if tensor.is_nested:
        return "is nested: pad it to a plain tensor, with to_padded_tensor(0.0)"
    if tensor.layout != torch.strided:
        return f"is not dense ({str(tensor.layout).removeprefix('torch.')}): call to_dense()"
    if tensor.is_quantized:
        return "is quantised: call dequantize()"
    try:
        tensor.untyped_storage()
    except RuntimeError:
        if tensor.device.type == "cpu":
            return (
                "is traced by torch.func and has no values: read it outside of the transformation"
            )
    try:
        _dtype_of(tensor.dtype)
    except TypeError:
        return "has a dtype that NumPy lacks: convert its values to torch.float32 or another dtype"
    return ""


def _at(name: str) -> str:
    return f"{name}: " * bool(name)


def _shown(tensor: "torch.Tensor") -> str:
    kind, dtype = type(tensor).__name__, str(tensor.dtype).removeprefix("torch.")
    kind = "tensor" if kind in ("Tensor", "Parameter") else kind
    return f"a torch {kind} of {dtype} and shape {_shape(tensor)}"


def _shape(tensor: "torch.Tensor") -> tuple[Any, ...]:
    try:
        return tuple(tensor.shape)
    except RuntimeError:  # a nested tensor has no shape
        return ()


def _has_own_functions(kind: type) -> bool:
    """True for a subclass of `torch.Tensor` that replaces the functions of torch."""
    import torch

    plain = (torch.Tensor, torch.nn.Parameter)
    return kind not in plain and any(
        all(getattr_static(kind, name) is not getattr_static(one, name) for one in plain)
        for name in ("__torch_function__", "__torch_dispatch__")
    )


@cache
def _dtype_of(dtype: "torch.dtype") -> np.dtype[Any] | None:
    """The dtype of ml_dtypes for one that NumPy lacks; None if NumPy has it.

    Raises TypeError if neither has it.
    """
    import ml_dtypes
    import torch

    try:
        torch.empty(0, dtype=dtype, device="cpu").numpy()
        return None
    except (TypeError, RuntimeError):
        kind = getattr(ml_dtypes, str(dtype).removeprefix("torch."), None)
    found: np.dtype[Any] | None = None if kind is None else np.dtype(kind)
    if found is None or found.itemsize > 2:
        raise TypeError(str(dtype))
    return found
