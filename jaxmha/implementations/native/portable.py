"""The native attention kernels in plain XLA, with the same operands and the same lse and gradients.

A program contains them in place of the native ones if it is exported, lowered for another platform,
or partitioned by XLA. They are tiled attention or, where a kernel itself is differentiated, as in
second derivatives, `reference`, since the `custom_vjp` of tiled attention has no forward mode.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmha.implementations import reference
from jaxmha.implementations.base import Request
from jaxmha.implementations.mods import trace
from jaxmha.implementations.native.operands import (
    FAR,
    RANKS,
    RANKS_OF_RESIDUALS,
    Problem,
    Residuals,
    Settings,
    batch,
    given,
    unit,
)
from jaxmha.implementations.tiled import attention as blocked
from jaxmha.mask import Mask
from jaxmha.semantics import Semantics


def attend(settings: Settings, *operands: Any, by: ModuleType = blocked) -> list[Any]:
    """Computes the output, row max and row sum by the implementation `by`, which returns only the lse.

    In place of row max and row sum stand lse / `unit` and 1, which give the same weights and lse; a
    fully masked row has the lowest float32 and 0. `operands`: the fields of `Problem`.
    """

    def one(*operands: Any) -> tuple[Any, ...]:
        problem = Problem(*operands)
        out, lse = _attend(by, settings, problem)
        some = lse != -jnp.inf
        row_max = jnp.where(some, lse / unit(settings, problem), np.finfo(np.float32).min)
        return out.astype(settings.out), row_max, some.astype(np.float32)

    return list(_over_batch(one, operands, RANKS))


def attend_backward(settings: Settings, *operands: Any, by: ModuleType = blocked) -> list[Any]:
    """Gradients of query, key and value, and zeros for delta, which only native kernels read.

    `operands`: the fields of `Problem` and `Residuals`, and the output. `by`: the implementation whose
    gradients they are.
    """

    def one(*operands: Any) -> tuple[Any, ...]:
        problem, residuals = _split(operands)

        def run(query: Any, key: Any, value: Any) -> Any:
            return _attend(by, settings, problem._replace(query=query, key=key, value=value))

        found = _pulled(run, problem[:3], residuals)
        return *found, jnp.zeros(residuals.row_max.shape, np.float32)

    ranks = (*RANKS, *RANKS_OF_RESIDUALS, 3)
    return list(_over_batch(one, operands, ranks))


def bias_gradient(settings: Settings, *operands: Any, by: ModuleType = blocked) -> list[Any]:
    """The gradient of the bias by the implementation `by`. `operands`: the fields of `Problem` and
    `Residuals`, and delta, which is not read."""

    def one(*operands: Any) -> tuple[Any, ...]:
        problem, residuals = _split(operands)

        def run(bias: Any) -> Any:
            return _attend(by, settings, problem._replace(bias=bias))

        return tuple(_pulled(run, (problem.bias,), residuals))

    ranks = (*RANKS, *RANKS_OF_RESIDUALS, 2)
    return list(_over_batch(one, operands, ranks))


def _split(operands: tuple[Any, ...]) -> tuple[Problem, Residuals]:
    first, last = len(RANKS), len(RANKS) + len(RANKS_OF_RESIDUALS)
    return Problem(*operands[:first]), Residuals(*operands[first:last])


def _pulled(run: Callable[..., Any], primals: tuple[Any, ...], residuals: Residuals) -> Any:
    (out, lse), pull = jax.vjp(run, *primals)
    d_lse = given(residuals.d_lse)
    return pull(
        (residuals.d_out.astype(out.dtype), jnp.zeros_like(lse) if d_lse is None else d_lse)
    )


def _attend(by: ModuleType, settings: Settings, problem: Problem) -> tuple[Any, Any]:
    query, key, value, bias, *_ = problem
    offset = given(problem.offset)
    above = settings.above if settings.above < FAR else None
    if offset is None:
        offset = above
    elif above is not None:
        offset = jnp.minimum(offset, above)
    mask = Mask(
        offset,
        None if settings.below == FAR else (settings.below, None),
        query_padding=given(problem.rows),
        key_value_padding=given(problem.keys),
        query_segments=given(problem.query_ids),
        key_value_segments=given(problem.key_ids),
        array=given(problem.allowed),
    )
    if problem.bits.size:
        mask &= Mask.dense(_unpacked(problem.bits, query.shape[1]))
    semantics = Semantics(scale=settings.scale, logits_soft_cap=settings.soft_cap)
    T, distances = query.shape[1], query.shape[1] + key.shape[1] - 1
    diagonals = bias.size > 0 and T > 1 and bias.shape[2:] == (1, distances)
    request = Request(
        query,
        key,
        value,
        None if diagonals else given(bias),
        mask,
        semantics,
        None,
        False,
        return_lse=True,
        score_mod=trace("score_mod", partial(_biased, bias, T), bias.dtype) if diagonals else None,
    )
    found = by.attend(request)
    return found.out, found.lse


def _biased(bias: jax.Array, T: int, score: jax.Array, b: Any, n: Any, i: Any, j: Any) -> jax.Array:
    """Adds to a score the entry of `bias`, `b n 1 (T + S - 1)`, for its distance `j - i`."""
    at = b if bias.shape[0] > 1 else 0, n if bias.shape[1] > 1 else 0
    return score + bias[*at, 0, j - i + (T - 1)]


def _unpacked(bits: Any, T: int) -> Any:
    b, n, t, s = bits.shape
    rows = jnp.arange(8, dtype=np.uint8).reshape(1, 1, 1, 8, 1)
    return (bits[:, :, :, None] >> rows & 1 != 0).reshape(b, n, 8 * t, s)[:, :, :T]


def _over_batch(
    run: Callable[..., Any], operands: tuple[Any, ...], ranks: tuple[int, ...]
) -> tuple[Any, ...]:
    """Applies `run`, which takes operands with one batch axis, to operands with several, by `vmap`
    over all batch axes but the last. `ranks`: the number of axes of each operand after its batch axes.
    """
    lead = batch(operands, ranks)
    if len(lead) == 1:
        found: tuple[Any, ...] = run(*operands)
        return found
    mapped = [bool(x.size) and x.shape[0] == lead[0] for x in operands]
    rest = [
        x if one or not x.size else x.reshape(x.shape[1:])
        for x, one in zip(operands, mapped, strict=True)
    ]

    def inner(*operands: Any) -> Any:
        return _over_batch(run, operands, ranks)

    in_axes = tuple(0 if one else None for one in mapped)
    result: tuple[Any, ...] = jax.vmap(inner, in_axes)(*rest)
    return result


def differentiated(
    kernel: Callable[..., list[Any]], settings: Settings, primals: Any, tangents: Any
) -> tuple[list[Any], list[Any]]:
    """Results of `kernel`, a function of this module, and their tangents, by `reference`. `primals`,
    `tangents`: of all operands; a tangent of None is zero."""
    moving = [i for i, tangent in enumerate(tangents) if tangent is not None]

    def run(*arrays: Any) -> list[Any]:
        operands = list(primals)
        for i, x in zip(moving, arrays, strict=True):
            operands[i] = x
        return kernel(settings, *operands, by=reference)

    found: tuple[list[Any], list[Any]] = jax.jvp(
        run, [primals[i] for i in moving], [tangents[i] for i in moving]
    )
    return found
