"""jaxmha, jax.nn, Flax, and Keras on JAX: jitted, weights as arguments."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxmha
from experiments.numerics import inputs, keras_runs
from experiments.numerics.compiling import compiled
from experiments.numerics.inputs import H, Run, T, UnsupportedError
from jaxmha import MHAParams
from jaxmha.converters import flax
from jaxmha.converters.layout.arrays import NDArray, to_numpy

OWN = ("reference", "blocked", "few_queries")
LEAST_KEYS = 64  # of few_queries


def one(out: Any) -> NDArray:
    """The only row of a batch."""
    rows: NDArray = to_numpy(out)[0]
    return rows


def _mask(keep: Any) -> Any:
    return None if keep is None else keep[None, None, None]


@partial(jax.jit, static_argnums=0)
def _own(name: str, weights: MHAParams, x: Any, keep: Any, bias: Any) -> Any:
    return jaxmha.multi_head_attention(
        weights, x[:, :T], x, mask=_mask(keep), bias=_mask(bias), implementation=name
    )


def own(name: str) -> Run:
    """One implementation of jaxmha."""

    def run(weights: MHAParams, x: NDArray, keep: Any, bias: Any) -> NDArray:
        if name == "few_queries" and x.shape[1] < LEAST_KEYS:
            raise UnsupportedError(f"few_queries is for at least {LEAST_KEYS} keys")
        return one(_own(name, weights, x, keep, bias))

    return run


def _jax_nn(weights: MHAParams, x: Any, keep: Any, bias: Any) -> Any:
    query, key, value = (  # biases are zero
        jnp.einsum("btd,dnh->btnh", rows, projection.kernel)
        for rows, projection in zip((x[:, :T], x, x), weights[:3], strict=True)
    )
    heads = jax.nn.dot_product_attention(
        query, key, value, bias=_mask(bias), mask=_mask(keep), scale=H**-0.5
    )
    out = weights.out
    assert out is not None
    return jnp.einsum("btnh,nhd->btd", heads, out.kernel)


_JAX_NN = jax.jit(_jax_nn)


def jax_nn(weights: MHAParams, x: NDArray, keep: Any, bias: Any) -> NDArray:
    """jax.nn.dot_product_attention between projections."""
    arrays = jax.tree.map(jnp.asarray, (weights, x, keep, bias))
    return one(compiled("jax.nn", x.dtype.name, _JAX_NN, _jax_nn, *arrays))


@partial(jax.jit, static_argnums=0)
def _linen(module: Any, variables: Any, x: Any, keep: Any) -> Any:
    return module.apply(variables, x[:, :T], x, x, mask=_mask(keep), deterministic=True)


def linen(weights: MHAParams, x: NDArray, keep: Any, bias: Any) -> NDArray:
    """flax.linen.MultiHeadDotProductAttention."""
    if bias is not None:
        raise UnsupportedError("the layer takes no additive mask")
    return one(_linen(*flax.to_module(weights, kind="linen"), x, keep))


@cache
def _nnx(dtype: str) -> tuple[Any, Any]:
    """A layer of a dtype, plain and jitted; weights are arguments."""
    from flax import nnx

    graph, _, rest = nnx.split(flax.to_module(inputs.params(dtype)), nnx.Param, ...)

    def layer(state: Any, x: Any, keep: Any) -> Any:
        module = nnx.merge(graph, state, rest)
        return module(x[:, :T], x, x, mask=_mask(keep), deterministic=True)

    return layer, jax.jit(layer)


def nnx(weights: MHAParams, x: NDArray, keep: Any, bias: Any) -> NDArray:
    """flax.nnx.MultiHeadAttention."""
    if bias is not None:
        raise UnsupportedError("the layer takes no additive mask")
    from flax import nnx

    plain, jitted = _nnx(x.dtype.name)
    state = nnx.state(flax.to_module(weights), nnx.Param)
    arrays = jax.tree.map(jnp.asarray, (x, keep))
    return one(compiled("flax nnx", x.dtype.name, jitted, plain, state, *arrays))


RUNS: dict[str, Run] = {
    **{f"jaxmha {name}": own(name) for name in OWN},
    "jax.nn": jax_nn,
    "flax linen": linen,
    "flax nnx": nnx,
    **keras_runs.runs("jax"),
}
