"""Arrays cut as a plan says, loops over the parts, and the way back."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmha.implementations.blocks import Plan


def chunks(plan: Plan, x: jax.Array) -> jax.Array:
    """`B K S d` as `steps chunks cells keys d`, filled up where S ends."""
    missing = plan.chunks * plan.keys - plan.S
    if missing:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0)))
    d = x.shape[-1]
    x = x.reshape(plan.steps, plan.cells, plan.chunks, plan.keys * d)
    return jnp.swapaxes(x, 1, 2).reshape(plan.steps, plan.chunks, plan.cells, plan.keys, d)


def unchunked(plan: Plan, x: jax.Array) -> jax.Array:
    """The inverse of `chunks`."""
    d = x.shape[-1]
    x = jnp.swapaxes(x.reshape(plan.steps, plan.chunks, plan.cells, plan.keys * d), 1, 2)
    return x.reshape(plan.B, plan.K, plan.chunks * plan.keys, d)[:, :, : plan.S]


def tiles(plan: Plan, x: jax.Array, fill: float = 0.0) -> jax.Array:
    """`B N T d` as `steps blocks cells G*rows d`, filled up where T ends."""
    missing = plan.blocks * plan.rows - plan.T
    if missing:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0)), constant_values=fill)
    d = x.shape[-1]
    # Axes that are not 1 and trade places cost a copy: none does without groups.
    x = x.reshape(plan.steps, plan.cells * plan.G, plan.blocks, plan.rows * d)
    x = jnp.swapaxes(x, 1, 2)
    return x.reshape(plan.steps, plan.blocks, plan.cells, plan.G * plan.rows, d)


def rows(plan: Plan, x: jax.Array) -> jax.Array:
    """The inverse of `tiles`."""
    d = x.shape[-1]
    x = x.reshape(plan.steps, plan.blocks, plan.cells * plan.G, plan.rows * d)
    x = jnp.swapaxes(x, 1, 2)
    x = x.reshape(plan.B, plan.K * plan.G, plan.blocks * plan.rows, d)
    return x[:, :, : plan.T]


def each(f: Any, xs: Any) -> Any:
    """`lax.map`, without a loop around a single step."""
    return scan(lambda _, x: (None, f(x)), None, xs)[1]


def scan(f: Any, carry: Any, xs: Any) -> Any:
    """`lax.scan`, without a loop around a single step."""
    if len(jax.tree.leaves(xs)[0]) > 1:
        return jax.lax.scan(f, carry, xs)
    carry, ys = f(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda y: y[None], ys)
