"""Base class of nnx modules that `nnx.view` can configure."""

from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxmha.rotary import static_rotation


class Views(nnx.Module):  # type: ignore[misc]
    """Base class of modules whose dropout and decoding `nnx.view` can set, with a cache."""

    deterministic: bool | None
    decode: bool | None

    def __setattr__(self, name: str, value: Any) -> None:
        # Modules made alike have equal graph definitions, so that one compiled program serves all.
        super().__setattr__(name, self._checked_rotation(value) if name == "rotate" else value)

    def _checked_rotation(self, rotate: Any) -> Any:
        """Raises TypeError for what the module cannot call."""
        return static_rotation(rotate)

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Sets attributes for `nnx.view`; a decoding module without a cache gets one if both sizes
        are given.

        Args:
          deterministic: no dropout.
          decode: appends to the cache.
          batch_size: batch size of the cache, or the sizes of several batch axes.
          max_length: S, number of slots of the cache.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if batch_size is None or max_length is None or not self.decode:
            return
        one = isinstance(batch_size, int | np.integer)
        batch: Any = (batch_size,) if one else batch_size
        self._ensure_cache(tuple(batch), max_length)

    def _ensure_cache(self, batch: tuple[int, ...], length: int) -> None:
        """Makes a cache of `length` slots unless there is one."""
        raise NotImplementedError


def cache_dtype(module: nnx.Module) -> type[np.floating]:
    """Returns float64 if the module's `dtype`, or without one any parameter, is float64; else
    float32, the default of flax."""
    held = jax.tree.leaves(nnx.state(module, nnx.Param))
    dtypes = [x.dtype for x in held] if module.dtype is None else [module.dtype]
    wide = any(np.dtype(dtype) == np.float64 for dtype in dtypes)
    return np.float64 if wide else np.float32
