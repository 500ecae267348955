"""The arguments `score_mod` and `mask_mod`: functions that change scores or exclude pairs."""

from collections.abc import Callable, Container, Mapping
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxmha.arrays import DTypeLike
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.implementations.mods import Limits, Mod, of_pair, trace

# `score_mod(score, b, n, i, j)` and `mask_mod(b, n, i, j)`.
ScoreMod: TypeAlias = Callable[..., jax.Array]
MaskMod: TypeAlias = Callable[..., jax.Array]


class Mods(NamedTuple):
    """Traced score and mask functions; None: not given."""

    score: Mod | None = None
    mask: Mod | None = None


class ModFunctions(NamedTuple):
    """Untraced `score_mod` and `mask_mod` of a layer: they are traced once its dtype is known."""

    score_mod: ScoreMod | None = None
    mask_mod: MaskMod | None = None

    @property
    def given(self) -> bool:
        """True if either function is given."""
        return self.score_mod is not None or self.mask_mod is not None


def traced_mods(score_mod: ScoreMod | None, mask_mod: MaskMod | None, dtype: DTypeLike) -> Mods:
    """Traces the arguments `score_mod` and `mask_mod`, for inputs of `dtype`."""
    scores = accumulation_dtype(dtype)
    return Mods(trace("score_mod", score_mod, scores), trace("mask_mod", mask_mod, None))


def checked(mods: Mods, sizes: Mapping[str, int]) -> Mods:
    """Raises ValueError if an array or the block mask of a function does not fit a call of the
    sizes B, T, N and S; returns the functions.

    A step over a cache gives only B and N: arrays over T or S cover the whole sequence.
    """
    for name, mod in (("score_mod", mods.score), ("mask_mod", mods.mask)):
        if mod is None:
            continue
        for limit in mod.limits.each:
            size = sizes.get(limit.axis)
            if isinstance(size, int) and not limit.allows(size):
                raise ValueError(
                    f"{name}: {limit.argument} is for {limit.axis}={limit.size}, the call has "
                    f"{limit.axis}={size}"
                )
        _check_blocks(mod, sizes)
    return mods


def of_cached(mods: Mods, sizes: Mapping[str, int]) -> Mods:
    """Returns the functions for steps over a cache, without limits on T and S and without block mask:
    queries and slots of a step are only parts of the sequence that these describe.

    Raises:
      ValueError: an array or the block mask of a function does not fit the sizes B and N.
    """
    given = checked(mods, {x: sizes[x] for x in "BN"})
    score, mask = (
        x and x._replace(blocks=None, limits=Limits()) for x in (given.score, given.mask)
    )
    return Mods(score, mask)


def after(mods: Mods, tokens: jax.Array) -> Mods:
    """Returns the functions for queries that follow `tokens` earlier ones: query 0 is i = tokens."""
    score, mask = (x and x.shift(0, 0, tokens, 0) for x in (mods.score, mods.mask))
    return Mods(score, mask)


def _check_blocks(mod: Mod, sizes: Mapping[str, int]) -> None:
    """Raises ValueError if the block mask of a mask function does not fit a call of these sizes."""
    if mod.blocks is None:
        return
    b, n = mod.blocks.rows.shape[:2]
    grid = mod.blocks.grid
    made = {"T": grid.T, "S": grid.S, "B": b, "N": n}
    rows = {x: size for x, size in made.items() if x in "BN" and size == 1}  # it broadcasts
    if any(sizes[x] != size for x, size in made.items() if x in sizes and x not in rows):
        raise ValueError(
            f"mask_mod: the block mask was made for {_listed(made, 'TSBN', rows)}, the call has "
            f"{_listed(sizes, 'BTNS')}: make it with jaxmha.mods.block_mask for these sizes"
        )
    for letter, axis in (("b", "B"), ("n", "N")):
        if letter in mod.program.uses and axis in rows and sizes[axis] != 1:
            raise ValueError(
                f"mask_mod: the block mask was made for {axis}=1, its function reads {letter}, and "
                f"the call has {axis}={sizes[axis]}: give jaxmha.mods.block_mask "
                f"{axis}={sizes[axis]}"
            )


def _listed(sizes: Mapping[str, int], axes: str, omitted: Container[str] = ()) -> str:
    return ", ".join(f"{x}={sizes[x]}" for x in axes if x in sizes and x not in omitted)


def without_extras(mods: Mods, sizes: Mapping[str, int], extra: int, dtype: DTypeLike) -> Mods:
    """Returns the functions for a call with `extra` positions after the S given ones: every query
    attends the extra positions, with unchanged scores.

    `sizes`: the sizes of the call without extra positions, which the functions must fit.

    Raises:
      ValueError: an array or the block mask of a function does not fit.
    """
    if not extra:
        return mods
    given, S = checked(mods, sizes), sizes["S"]

    def score(x: jax.Array, b: jax.Array, n: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        assert given.score is not None
        return jnp.where(j < S, of_pair(given.score, x, b, n, i, jnp.minimum(j, S - 1)), x)

    def mask(b: jax.Array, n: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
        assert given.mask is not None
        return (j >= S) | of_pair(given.mask, b, n, i, jnp.minimum(j, S - 1))

    return traced_mods(
        None if given.score is None else score, None if given.mask is None else mask, dtype
    )
