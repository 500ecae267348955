"""jaxmha, jax.nn, Flax, and Keras on JAX: jitted, weights as arguments."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from experiments.numerics import inputs
from experiments.numerics.inputs import UNCOMPILED, Run, T
from jaxmha import MHAParams
from jaxmha.bench import jax_peers
from jaxmha.bench.jax_peers import Attend
from jaxmha.bench.program import UnsupportedError
from jaxmha.converters.layout.arrays import NDArray, to_numpy

LEAST_KEYS = 64  # of few_queries
LAYERS: dict[str, Callable[[MHAParams], Any]] = {
    **{
        f"jaxmha {name}": partial(jax_peers.jaxmha_layer, implementation=name)
        for name in ("reference", "blocked", "few_queries")
    },
    "jax.nn": jax_peers.jax_nn_layer,
    "flax linen": jax_peers.linen_layer,
    "flax nnx": jax_peers.nnx_layer,
    "keras on jax, fused": jax_peers.keras_layer,
    "keras on jax, scores": partial(jax_peers.keras_layer, scores=True),
}


@cache
def _programs(name: str, dtype: str) -> tuple[Any, Any]:
    """The layer of a dtype on the first T rows, jitted and plain; weights are arguments."""
    _, layer = LAYERS[name](inputs.params(dtype))

    def run(variables: Any, x: Any, keep: Any, bias: Any) -> Any:
        return layer(variables, x[:, :T], x, x, Attend(keep=keep, bias=bias))

    return jax.jit(run), run


def _run(name: str, weights: MHAParams, x: NDArray, keep: Any, bias: Any) -> NDArray:
    """Runs one layer, compiled if possible; dtypes that cannot be compiled go to `UNCOMPILED`."""
    if name.endswith("few_queries") and x.shape[1] < LEAST_KEYS:
        raise UnsupportedError(f"few_queries is for at least {LEAST_KEYS} keys")
    keep = None if keep is None else keep[None]
    bias = None if bias is None else bias[None, None, None]
    variables, dtype = LAYERS[name](weights)[0], x.dtype.name
    arguments = jax.tree.map(jnp.asarray, (variables, x, keep, bias))
    jitted, plain = _programs(name, dtype)
    out = None
    if dtype not in UNCOMPILED.get(name, ()):
        try:
            out = jitted(*arguments)
        except ValueError as error:
            if "is not supported by dot_general" not in str(error):
                raise
            UNCOMPILED.setdefault(name, set()).add(dtype)
    first: NDArray = to_numpy(plain(*arguments) if out is None else out)[0]
    return first


RUNS: dict[str, Run] = {name: partial(_run, name) for name in LAYERS}
