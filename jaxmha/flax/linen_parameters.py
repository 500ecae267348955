"""Parameters of the linen module, in submodules with the names of flax's own layers."""

from typing import Any

from flax import linen as nn

from jaxmha.arrays import DTypeLike
from jaxmha.flax.parameters import Initializer


class Parameters(nn.Module):  # type: ignore[misc]
    """A submodule of parameters; `entries` are (name, initialiser, shape)."""

    entries: tuple[tuple[str, Initializer, tuple[int, ...]], ...]
    param_dtype: DTypeLike

    @nn.compact  # type: ignore[untyped-decorator]
    def declare(self) -> dict[str, Any]:
        """The parameters by name; missing ones are drawn."""
        return {
            name: self.param(name, init, shape, self.param_dtype)
            for name, init, shape in self.entries
        }
