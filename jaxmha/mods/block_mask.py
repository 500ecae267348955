"""`BlockMask`: a mask function with its blocks, evaluated once for many calls of attention."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.implementations import mods
from jaxmha.implementations.mods import Blocks, Mod
from jaxmha.implementations.tiled import attended
from jaxmha.implementations.tiled.block_mask import NO_CONDITIONS
from jaxmha.implementations.tiled.tiling import Tiling
from jaxmha.integers import has_values, require_sizes
from jaxmha.mask_repr import ATTENDS, EXCLUDED, LARGEST

PARTIAL = "▪"


@partial(jax.tree_util.register_dataclass, data_fields=["mod", "blocks"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask function and the blocks of pairs that it allows; give it as `mask_mod`.

    A call of attention then need not evaluate the function to find empty and full blocks. `str`
    draws the blocks: `■` full, `▪` partial, `·` empty. A `BlockMask` is a pytree of arrays.
    """

    mod: Mod
    blocks: Blocks

    def __call__(self, b: Any, n: Any, i: Any, j: Any) -> jax.Array:
        """The value of the mask function: True where query i may attend key j."""
        found: jax.Array = jnp.vectorize(partial(mods.of_pair, self.mod))(b, n, i, j)
        return found

    @property
    def limits(self) -> mods.Limits:
        """The sizes that the axes of a call may have, given the arrays of the mask function."""
        return self.mod.limits

    @property
    def attended_share(self) -> float:
        """The fraction of blocks with an allowed pair."""
        return float(np.asarray(self.blocks.some).mean())

    def __repr__(self) -> str:
        grid = self.blocks.grid
        return f"BlockMask(T={grid.T}, S={grid.S}, blocks of {grid.rows} x {grid.keys})"

    def __str__(self) -> str:
        if not (has_values(self.blocks.some) and has_values(self.blocks.every)):
            return repr(self)
        some, every = np.asarray(self.blocks.some), np.asarray(self.blocks.every)
        if not some.ndim == every.ndim == 3:  # several in one tree
            return repr(self)
        panels = [f"{repr(self)[:-1]}, {self.attended_share:.1%} of blocks attended)"]
        for b in range(len(some)):
            panels += [f"B {b}:"] * (len(some) > 1)
            panels += [_row(*x) for x in zip(some[b][:LARGEST], every[b][:LARGEST], strict=True)]
        return "\n".join(panels)


def _row(some: "np.ndarray[Any, Any]", every: "np.ndarray[Any, Any]") -> str:
    cells = np.where(every, ATTENDS, np.where(some, PARTIAL, EXCLUDED))
    return " ".join(cells[:LARGEST])


def block_mask(
    mask_mod: Callable[..., jax.Array],
    T: int,
    S: int | None = None,
    *,
    B: int = 1,
    N: int = 1,
    block: int = 128,
) -> BlockMask:
    """Evaluates a mask function for T queries and S keys, block by block.

    Args:
      mask_mod: `mask_mod(b, n, i, j)`, True where query i may attend key j.
      T: number of queries.
      S: number of keys, default T.
      B: number of batch rows of the call; may be 1 if the function does not read b.
      N: number of heads of the call; may be 1 if the function does not read n.
      block: number of queries, and of keys, in a block.

    Raises:
      ValueError: a size is no integer or below 1. TypeError: `mask_mod` is not a function.

    >>> from jaxmha import mods
    >>> print(block_mask(mods.causal(), 6, block=2))
    BlockMask(T=6, S=6, blocks of 2 x 2, 66.7% of blocks attended)
    ▪ · ·
    ■ ▪ ·
    ■ ■ ▪
    """
    S = T if S is None else S
    require_sizes(T=T, S=S, B=B, N=N, block=block)
    mod = mods.trace("mask_mod", mask_mod, None)
    if mod is None:
        raise TypeError("mask_mod must be a function, got None")
    tiling = Tiling(B, N, 1, T, S, B, 1, min(block, T), min(block, S))
    return BlockMask(mod, _blocks(tiling, mod._replace(blocks=None)))


@partial(jax.jit, static_argnums=0)
def _blocks(tiling: Tiling, mod: Mod) -> Blocks:
    return attended.blocks_of(NO_CONDITIONS._replace(mod=mod), None, tiling)
