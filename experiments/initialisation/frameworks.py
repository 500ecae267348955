"""Freshly made attention layers of every framework, and jaxmha's counterpart of each."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from jaxmha import init_params
from jaxmha.converters import equinox as of_equinox
from jaxmha.converters import flax as of_flax
from jaxmha.converters import keras as of_keras
from jaxmha.converters import linear
from jaxmha.converters import torch as of_torch
from jaxmha.converters.layout.arrays import to_numpy
from jaxmha.params import leaves

Leaves = dict[str, NDArray[Any]]
# Widths of keys and values by which torch keeps its projections apart, by those of queries.
APART = 2, 4


class Start(NamedTuple):
    """How a framework starts a layer.

    Attributes:
      theirs: of (seed, D, N): the leaves of a new layer of the framework itself.
      ours: the same by `init_params`.
      counterpart: what `ours` is, in words.
      formula: of the kernels of query, key and value.
    """

    theirs: Callable[[int, int, int], Leaves]
    ours: Callable[[int, int, int], Leaves]
    counterpart: str
    formula: str


def torch_layer(seed: int, D: int, N: int, parts: tuple[int, int] = (1, 1)) -> Leaves:
    """`torch.nn.MultiheadAttention`: one matrix for query, key and value where widths agree."""
    import torch

    torch.manual_seed(seed)
    layer = torch.nn.MultiheadAttention(D, N, kdim=D // parts[0], vdim=D // parts[1])
    return _numpy(of_torch.from_module(layer, batch_first=False)[0])


def torch_linear(seed: int, D: int, N: int) -> Leaves:
    """Four `torch.nn.Linear`."""
    import torch

    torch.manual_seed(seed)
    state = {
        f"{name}_proj.{key}": to_numpy(array)
        for name in ("q", "k", "v", "out")
        for key, array in torch.nn.Linear(D, D).state_dict().items()
    }
    return _numpy(linear.import_params(state, layout="linear", num_heads=N)[0])


def keras_layer(seed: int, D: int, N: int) -> Leaves:
    """`keras.layers.MultiHeadAttention`."""
    import keras

    keras.utils.set_random_seed(seed)
    layer = keras.layers.MultiHeadAttention(N, D // N)
    layer.build(*[(None, None, D)] * 2)
    return _numpy(of_keras.from_module(layer)[0])


def keras_dense(seed: int, D: int, N: int) -> Leaves:
    """Four `keras.layers.Dense`."""
    import keras

    keras.utils.set_random_seed(seed)
    state: Leaves = {}
    for name in ("q", "k", "v", "out"):
        layer = keras.layers.Dense(D)
        layer.build((None, D))
        state |= {f"{name}_proj/{w.path.split('/')[-1]}": to_numpy(w) for w in layer.weights}
    return _numpy(linear.import_params(state, layout="dense", num_heads=N)[0])


def flax_linen(seed: int, D: int, N: int) -> Leaves:
    """`flax.linen.MultiHeadDotProductAttention`."""
    from flax import linen

    layer = linen.MultiHeadDotProductAttention(N)
    variables = layer.init(jax.random.key(seed), np.zeros((1, 1, D), np.float32))
    return _numpy(of_flax.from_module(layer, variables)[0])


def flax_nnx(seed: int, D: int, N: int) -> Leaves:
    """`flax.nnx.MultiHeadAttention`."""
    from flax import nnx

    layer = nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(seed))
    return _numpy(of_flax.from_module(layer)[0])


def equinox(seed: int, D: int, N: int) -> Leaves:
    """`equinox.nn.MultiheadAttention`."""
    import equinox as library

    layer = library.nn.MultiheadAttention(N, D, key=jax.random.key(seed))
    names = ("query_proj", "key_proj", "value_proj", "output_proj")
    state = {f"{name}.weight": to_numpy(getattr(layer, name).weight) for name in names}
    return _numpy(of_equinox.import_params(state, num_heads=N)[0])


def haiku_refuses(D: int, N: int) -> str:
    """`haiku.MultiHeadAttention` has no default: what it says without `w_init`."""
    import haiku

    def forward(x: Any) -> Any:
        return haiku.MultiHeadAttention(N, D // N, model_size=D)(x, x, x)

    try:
        haiku.transform(forward).init(jax.random.key(0), np.zeros((1, 1, D), np.float32))
    except ValueError as error:
        return str(error)
    raise AssertionError("haiku has a default now: measure it")


def _numpy(params: Any) -> Leaves:
    return {name: to_numpy(leaf) for name, leaf in leaves(params).items()}


def _scheme(scheme: Any, **parts: int) -> Callable[[int, int, int], Leaves]:
    def drawn(seed: int, D: int, N: int) -> Leaves:
        widths: dict[str, Any] = {name: D // part for name, part in parts.items()}
        key = jax.random.key(seed)
        return _numpy(init_params(key, num_heads=N, features=D, scheme=scheme, **widths))

    return drawn


def _outputs(seed: int, D: int, N: int) -> Leaves:
    """Every kernel drawn as the output kernel of torch's scheme; no biases."""
    drawn = {}
    for i, name in enumerate(("query", "key", "value", "out")):
        key = jax.random.fold_in(jax.random.key(seed), i)
        params = init_params(key, num_heads=N, features=D, scheme="torch", use_bias=False)
        kernel = _numpy(params)["out.kernel"]
        drawn[f"{name}.kernel"] = kernel if name == "out" else kernel.reshape(D, N, D // N)
    return drawn


_APART = _scheme("torch", key_features=APART[0], value_features=APART[1])
_LIKE_OUT = 'the output kernel of `scheme="torch"`'
STARTS: dict[str, Start] = {
    "torch, packed": Start(torch_layer, _scheme("torch"), '`scheme="torch"`', "U(±√(6 / 4D))"),
    "torch, separate": Start(
        partial(torch_layer, parts=APART),
        _APART,
        '`scheme="torch"`, other widths',
        "U(±√(6 / (width + D)))",
    ),
    "torch, four Linear": Start(torch_linear, _outputs, _LIKE_OUT, "U(±1/√D), biases too"),
    "keras": Start(keras_layer, _scheme("keras"), '`scheme="keras"`', "U(±√(6 / 2D))"),
    "keras, four Dense": Start(keras_dense, _scheme("keras"), '`scheme="keras"`', "U(±√(6 / 2D))"),
    "flax linen": Start(
        flax_linen, _scheme("flax"), '`scheme="flax"`', "N(0, 1/D), truncated at 2σ"
    ),
    "flax nnx": Start(flax_nnx, _scheme("flax"), '`scheme="flax"`', "N(0, 1/D), truncated at 2σ"),
    "equinox": Start(equinox, _outputs, _LIKE_OUT, "U(±1/√D), no biases"),
}
