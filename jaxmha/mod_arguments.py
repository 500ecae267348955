"""The arguments `score_mod` and `mask_mod`: functions that change scores or exclude pairs."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxmha.arrays import DTypeLike
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.implementations.mods import Mod, trace

# `score_mod(score, b, n, i, j)` and `mask_mod(b, n, i, j)`.
ScoreMod: TypeAlias = Callable[..., jax.Array]
MaskMod: TypeAlias = Callable[..., jax.Array]


class Mods(NamedTuple):
    """Traced score and mask functions; None: not given."""

    score: Mod | None = None
    mask: Mod | None = None


def traced_mods(score_mod: ScoreMod | None, mask_mod: MaskMod | None, dtype: DTypeLike) -> Mods:
    """Traces the arguments `score_mod` and `mask_mod`, for inputs of `dtype`."""
    scores = accumulation_dtype(dtype)
    return Mods(trace("score_mod", score_mod, scores), trace("mask_mod", mask_mod, None))


def checked(name: str, mod: Mod | None, shape: tuple[int, ...], S: int) -> Mod | None:
    """Raises ValueError if an array or the blocks of a function do not fit queries of this shape
    and S keys; returns the function."""
    if mod is None:
        return None
    B, T, N, _ = shape
    sizes = {"B": B, "T": T, "N": N, "S": S}
    for limit in mod.limits.each:
        size = sizes[limit.axis]
        if isinstance(size, int) and not limit.allows(size):
            raise ValueError(
                f"{name}: {limit.argument} is for {limit.axis}={limit.size}, the call has "
                f"{limit.axis}={size}"
            )
    return _checked_blocks(mod, shape, S)


def _checked_blocks(mod: Mod, shape: tuple[int, ...], S: int) -> Mod:
    """Raises ValueError if the known blocks of a mask function do not fit queries of this shape
    and S keys; returns the mask function."""
    if mod.blocks is None:
        return mod
    B, T, N, _ = shape
    blocks = mod.blocks
    b, n = blocks.rows.shape[:2]
    grid = blocks.grid
    if (grid.T, grid.S) != (T, S) or b not in (1, B) or n not in (1, N):
        made = f"T={grid.T}, S={grid.S}"
        made += "".join(f", {x}={size}" for x, size in (("B", b), ("N", n)) if size > 1)
        raise ValueError(
            f"mask_mod: the block mask was made for {made}, the call has B={B}, T={T}, N={N}, "
            f"S={S}: make it with jaxmha.mods.block_mask for these sizes"
        )
    for letter, axis, made_for, size in (("b", "B", b, B), ("n", "N", n, N)):
        if letter in mod.program.uses and made_for == 1 != size:
            raise ValueError(
                f"mask_mod: the block mask was made for {axis}=1, its function reads {letter}, and "
                f"the call has {axis}={size}: give jaxmha.mods.block_mask {axis}={size}"
            )
    return mod


def without_extras(
    score_mod: ScoreMod | None, mask_mod: MaskMod | None, S: int, extra: int
) -> tuple[ScoreMod | None, MaskMod | None]:
    """Wraps both functions so that they do not apply to the `extra` positions after the S given
    ones: those are visible to every query, with unchanged scores."""
    if not extra:
        return score_mod, mask_mod

    def score(x: jax.Array, b: jax.Array, n: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        assert score_mod is not None
        return jnp.where(j < S, score_mod(x, b, n, i, jnp.minimum(j, S - 1)), x)

    def mask(b: jax.Array, n: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        assert mask_mod is not None
        return (j >= S) | mask_mod(b, n, i, jnp.minimum(j, S - 1))

    return None if score_mod is None else score, None if mask_mod is None else mask
