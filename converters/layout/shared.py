"""Arrays of JAX in the memory of torch tensors, without a copy."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.arrays import is_rounded
from jaxmha.converters.layout.torch_arrays import refuse_unreadable
from jaxmha.extras import needed

if TYPE_CHECKING:
    import torch

_ELSE = "or import with copy=True"


def source(tensor: Any) -> "torch.Tensor":
    """Returns the tensor unchanged after checking that a JAX array may share its memory.

    Raises:
      TypeError: it is not a torch tensor.
      ValueError: it is not on the CPU, or not dense and contiguous; it requires a gradient; or JAX
        would round its dtype. The message gives a remedy.
    """
    with needed("torch"):
        import torch

    if not isinstance(tensor, torch.Tensor):
        raise TypeError(
            f"copy=False shares torch tensors, got {type(tensor).__name__}: {_ELSE[3:]}"
        )
    shown = f"copy=False: a tensor {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    if tensor.device.type != "cpu":
        raise ValueError(f"{shown} is on {tensor.device}, not on the CPU: move it, {_ELSE}")
    refuse_unreadable(tensor)
    if tensor.requires_grad:
        raise ValueError(
            f"{shown} requires a gradient, so training in torch would change the arrays of JAX, which "
            f"must not change: freeze the module with requires_grad_(False), {_ELSE}"
        )
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        raise ValueError(f"{shown} is a view that is not contiguous: call contiguous(), {_ELSE}")
    if tensor.dtype == torch.float64 and is_rounded(np.float64):
        raise ValueError(
            f"{shown} would be rounded to float32: call jax.config.update('jax_enable_x64', True)"
        )
    return tensor


def leaf(part: "torch.Tensor") -> jax.Array:
    """Part of a tensor, such as a leaf of a packed array, as a JAX array in the same memory.

    Raises:
      ValueError: JAX would copy the part, because its address is not a multiple of 64 bytes.
    """
    made: jax.Array = jnp.from_dlpack(part)
    if part.numel() and made.unsafe_buffer_pointer() != part.data_ptr():
        raise ValueError(
            f"copy=False: a part of shape {tuple(part.shape)} begins {part.data_ptr() % 64} bytes "
            f"after a multiple of 64, where JAX cannot read it in place: {_ELSE[3:]}"
        )
    return made
