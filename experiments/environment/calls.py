"""Time of a call on the smallest arrays: eager and under jit, of jaxmha and of jax.nn."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import jaxmha


def collect(calls: int = 1000) -> dict[str, dict[str, float]]:
    """Microseconds of a call by function and way to call it."""
    heads = jnp.ones((1, 1, 1, 8))
    params = jaxmha.init_params(jax.random.key(0), num_heads=1, features=8)
    called: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "dot_product_attention": (jaxmha.dot_product_attention, (heads, heads, heads)),
        "multi_head_attention": (jaxmha.multi_head_attention, (params, jnp.ones((1, 1, 8)))),
        "jax.nn.dot_product_attention": (jax.nn.dot_product_attention, (heads, heads, heads)),
    }
    return {
        name: {
            "eager": _microseconds(function, arguments, calls),
            "under jit": _microseconds(jax.jit(function), arguments, calls),
        }
        for name, (function, arguments) in called.items()
    }


def _microseconds(function: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> float:
    wait: Any = jax.block_until_ready
    wait(function(*arguments))
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        wait(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return 1e6 * median(seconds)


def table(found: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
    """One row per function.

    >>> table({"f": {"eager": 30.2, "under jit": 9.0}})
    [('function', 'eager', 'under jit'), ('`f`', '30', '9')]
    """
    rows: list[tuple[str, ...]] = [("function", *next(iter(found.values())))]
    rows += [(f"`{name}`", *(f"{x:.0f}" for x in ways.values())) for name, ways in found.items()]
    return rows
