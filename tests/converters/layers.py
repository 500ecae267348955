"""Live layers of every framework, as data: sizes and weights are drawn from a seed.

Sizes are different primes and D is not N * H wherever the framework allows, so that no two axes
can be confused; every parameter is random, biases and scales of norms too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

from jaxmha import MHAParams
from jaxmha.converters.layout.arrays import NDArray, to_numpy, to_torch
from jaxmha.params import leaves
from tests.drawn import to_jax
from tests.promotion import foreign

DTYPES = ("float32", "bfloat16", "float16", "float64")
B, T, S = 2, 43, 47
LENGTHS = (31, 47)


class Variant(NamedTuple):
    """A kind of layer: which letters of the dimension key are free, and which flags are set."""

    framework: str
    name: str
    free: str = ""
    flags: Mapping[str, bool] = {}


@dataclass(frozen=True)
class Config:
    """One layer. Letters are those of the dimension key.

    Attributes:
      framework: torch, keras, linen or nnx.
      bias_kv, zero_attn: torch's add_bias_kv and add_zero_attn.
      qk_norm: flax's normalize_qk.
    """

    framework: str
    name: str
    N: int
    K: int
    H: int
    h: int
    Dq: int
    Dk: int
    Dv: int
    Do: int
    bias: bool = True
    bias_kv: bool = False
    zero_attn: bool = False
    qk_norm: bool = False
    seed: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.framework}-{self.name}"

    @property
    def self_attention(self) -> bool:
        """True if one input serves as query, key and value."""
        return self.Dq == self.Dk == self.Dv


NO_BIAS, BIAS_KV, ZERO, NORM = (
    {"bias": False},
    {"bias_kv": True},
    {"zero_attn": True},
    {"qk_norm": True},
)
VARIANTS = (
    Variant("torch", "packed"),
    Variant("torch", "packed no bias", "", NO_BIAS),
    Variant("torch", "packed bias_kv", "", BIAS_KV),
    Variant("torch", "packed zero", "", ZERO),
    Variant("torch", "packed no bias bias_kv zero", "", NO_BIAS | BIAS_KV | ZERO),
    Variant("torch", "kdim vdim", "Dk Dv"),
    Variant("torch", "kdim vdim no bias", "Dk Dv", NO_BIAS),
    Variant("torch", "vdim bias_kv zero", "Dv", BIAS_KV | ZERO),
    Variant("torch", "kdim no bias bias_kv", "Dk", NO_BIAS | BIAS_KV),
    Variant("keras", "plain"),
    Variant("keras", "no bias", "", NO_BIAS),
    Variant("keras", "value_dim", "h"),
    Variant("keras", "output_shape", "Do"),
    Variant("keras", "widths", "Dk Dv"),
    Variant("keras", "everything", "h Do Dk Dv"),
    Variant("keras", "everything no bias", "h Do Dk Dv", NO_BIAS),
    Variant("linen", "qkv_features"),
    Variant("linen", "no bias", "", NO_BIAS),
    Variant("linen", "out_features", "Do"),
    Variant("linen", "normalize_qk", "", NORM),
    Variant("linen", "widths", "Dk Dv"),
    Variant("linen", "everything", "Do Dk Dv", NORM),
    Variant("linen", "everything no bias", "Do Dk Dv", NORM | NO_BIAS),
    Variant("nnx", "qkv_features"),
    Variant("nnx", "no bias", "", NO_BIAS),
    Variant("nnx", "num_kv_heads", "K"),
    Variant("nnx", "in_kv_features", "Dk"),
    Variant("nnx", "normalize_qk", "", NORM),
    Variant("nnx", "everything", "K Dk Do", NORM),
    Variant("nnx", "everything no bias", "K Dk Do", NORM | NO_BIAS),
)
_WIDTHS = (17, 29, 31, 37, 41, 53)


def draw(variant: Variant, seed: int = 0) -> Config:
    """Sizes for a variant: what is not free follows query, or is as wide as the heads are.

    Variants of one seed share sizes, so that JAX compiles for few shapes.
    """
    rng = np.random.default_rng(seed)
    free = variant.free.split()
    Dq, Dk, Dv, Do = (int(width) for width in rng.permutation(_WIDTHS)[:4])
    N, H = int(rng.choice([3, 5])), int(rng.choice([7, 11]))
    if variant.framework == "torch":
        Dq = N * H
    Dk = Dk if "Dk" in free else Dq
    Dv = Dv if "Dv" in free else Dk if variant.framework == "nnx" else Dq
    Do = Do if "Do" in free else Dq
    K, N = (N, 2 * N) if "K" in free else (N, N)
    h = 13 if "h" in free else H
    flags = dict(variant.flags)
    return Config(variant.framework, variant.name, N, K, H, h, Dq, Dk, Dv, Do, **flags, seed=seed)


def configs(*frameworks: str, seed: int = 0) -> list[Config]:
    """One configuration per variant, of the frameworks named or of all."""
    wanted = frameworks or ("torch", "keras", "linen", "nnx")
    return [draw(variant, seed) for variant in VARIANTS if variant.framework in wanted]


# One layer of each framework with every leaf, and torch's two layouts: what every run compiles.
RICH = ("everything", "packed", "vdim bias_kv zero")


def cases(*frameworks: str) -> list[Any]:
    """Configurations as parameters of a test; those that are not rich are slow."""
    return [
        pytest.param(c, id=str(c), marks=() if c.name in RICH else pytest.mark.slow)
        for c in configs(*frameworks)
    ]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a name; bfloat16 through ml_dtypes."""
    return np.dtype(jnp.bfloat16) if name == "bfloat16" else np.dtype(name)


@dataclass(frozen=True)
class Values:
    """Random parameters; scales of norms lie around 1."""

    rng: np.random.Generator
    deviation: float

    def __call__(self, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray:
        """A parameter of that name."""
        centre = 1.0 if "scale" in name else 0.0
        drawn: NDArray = (centre + self.deviation * self.rng.normal(size=shape)).astype(dtype)
        return drawn


def build(config: Config, dtype: str = "float32", seed: int = 0, deviation: float = 0.35) -> Any:
    """The live layer with random parameters, ready for inference; linen: (module, variables)."""
    values = Values(np.random.default_rng([seed, config.seed]), deviation)
    made = {"torch": _torch, "keras": _keras, "linen": _linen, "nnx": _nnx}[config.framework]
    with foreign():
        return made(config, numpy_dtype(dtype), values)


def _torch(config: Config, dtype: Any, values: Values) -> Any:
    layer = torch.nn.MultiheadAttention(
        config.Dq,
        config.N,
        bias=config.bias,
        add_bias_kv=config.bias_kv,
        add_zero_attn=config.zero_attn,
        kdim=config.Dk,
        vdim=config.Dv,
        batch_first=True,
        dtype=getattr(torch, dtype.name),
    )
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(to_torch(values(name, tuple(parameter.shape), dtype)))
    return layer.eval()


def _keras(config: Config, dtype: Any, values: Values) -> Any:
    import keras

    layer = keras.layers.MultiHeadAttention(
        config.N,
        config.H,
        value_dim=config.h,
        use_bias=config.bias,
        output_shape=config.Do,
        dtype=dtype.name,
        kernel_initializer="zeros",
    )
    layer.build((None, None, config.Dq), (None, None, config.Dv), (None, None, config.Dk))
    for variable in layer.weights:
        variable.assign(values(variable.path, tuple(variable.shape), dtype))
    return layer


def _flax_settings(config: Config, dtype: Any) -> dict[str, Any]:
    return {
        "num_heads": config.N, "qkv_features": config.N * config.H, "out_features": config.Do,
        "use_bias": config.bias, "normalize_qk": config.qk_norm, "param_dtype": dtype,
        "deterministic": True, "decode": False,
    }  # fmt: skip


def _linen(config: Config, dtype: Any, values: Values) -> Any:
    module = linen.MultiHeadDotProductAttention(**_flax_settings(config, dtype))
    inputs = [np.zeros((1, 1, width), dtype) for width in (config.Dq, config.Dk, config.Dv)]
    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    return module, jax.tree_util.tree_map_with_path(
        lambda path, leaf: to_jax(values(jax.tree_util.keystr(path), leaf.shape, leaf.dtype)),
        shapes,
    )


def _zeros(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An initializer without a program for every shape."""
    return to_jax(np.zeros(shape), dtype)


def _nnx(config: Config, dtype: Any, values: Values) -> Any:
    module = nnx.MultiHeadAttention(
        in_features=config.Dq,
        in_kv_features=config.Dk,
        num_kv_heads=None if config.K == config.N else config.K,
        rngs=nnx.Rngs(0),
        kernel_init=_zeros,
        bias_init=_zeros,
        **_flax_settings(config, dtype),
    )
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        shape = variable.get_value().shape
        fresh = to_jax(values("/".join(map(str, path)), shape, dtype))
        nnx.update(module, nnx.from_flat_state([(path, variable.replace(fresh))]))
    return module


def snapshot(layer: Any) -> dict[str, NDArray]:
    """A copy of every parameter of a live layer, read without the converters' layouts."""
    if isinstance(layer, tuple):
        flat = jax.tree_util.tree_leaves_with_path(layer[1])
        return {jax.tree_util.keystr(path): to_numpy(leaf) for path, leaf in flat}
    if hasattr(layer, "weights"):  # Keras, whose layers on torch have a state dict too
        return {weight.path: to_numpy(weight) for weight in layer.weights}
    if hasattr(layer, "state_dict"):
        return {name: to_numpy(tensor) for name, tensor in layer.state_dict().items()}
    flat_state = nnx.to_flat_state(nnx.state(layer, nnx.Param))
    return {"/".join(map(str, path)): to_numpy(v.get_value()) for path, v in flat_state}


def inputs(
    config: Config, seed: int = 0, dtype: str = "float32", *, cross: bool = True
) -> tuple[NDArray, NDArray, NDArray]:
    """Query `(B, T, Dq)`, key `(B, S, Dk)` and value `(B, S, Dv)`; not cross: one array."""
    rng = np.random.default_rng([seed, 1])
    shapes = ((B, T, config.Dq), (B, S, config.Dk), (B, S, config.Dv))
    query, key, value = (rng.normal(size=shape).astype(numpy_dtype(dtype)) for shape in shapes)
    return (query, key, value) if cross else (query, query, query)


def masks(S: int) -> dict[str, NDArray | None]:
    """Canonical Boolean masks: True = attend."""
    padding = np.arange(S) < np.array(LENGTHS)[:, None]
    return {"none": None, "padding": padding[:, None, None], "causal": np.tri(T, S, dtype=bool)}


def call(
    config: Config, layer: Any, query: Any, key: Any, value: Any, mask: NDArray | None = None
) -> NDArray:
    """The framework's ordinary inference call, written out here and not by the converters."""
    if config.framework == "torch":
        return call_torch(layer, query, key, value, mask)
    full = None if mask is None else np.broadcast_to(mask, (B, 1, T, key.shape[1]))
    with foreign():
        return call_jax_or_keras(config, layer, query, key, value, full)


def call_jax_or_keras(
    config: Config, layer: Any, query: Any, key: Any, value: Any, full: NDArray | None
) -> NDArray:
    """Keras is called as (query, value, key); True in these masks means attend."""
    if config.framework == "keras":
        attention_mask = None if full is None else full[:, 0]
        options = {"attention_mask": attention_mask, "training": False}
        if config.h != config.H:  # Keras' fused path cannot on JAX
            return to_numpy(layer(query, value, key, return_attention_scores=True, **options)[0])
        return to_numpy(layer(query, value, key, **options))
    if config.framework == "linen":
        return to_numpy(layer[0].apply(layer[1], query, key, value, mask=full))
    return to_numpy(layer(query, key, value, mask=full))


def call_torch(
    layer: Any, query: Any, key: Any, value: Any, mask: NDArray | None, *, weights: bool = False
) -> NDArray:
    """torch's layer; True in its masks means blocked. `weights` selects the slow path."""
    # One tensor for all three is what torch recognises as self-attention.
    q = to_torch(query)
    k = q if key is query else to_torch(key)
    v = q if value is query else to_torch(value)
    arguments: dict[str, Any] = {}
    if mask is not None and mask.ndim == 4:
        arguments["key_padding_mask"] = to_torch(~mask[:, 0, 0])
    elif mask is not None:
        arguments["attn_mask"] = to_torch(~mask)
    with torch.no_grad():
        out, _ = layer(q, k, v, need_weights=weights, **arguments)
    return to_numpy(out)


def assert_identical(a: Mapping[str, Any] | MHAParams, b: Mapping[str, Any] | MHAParams) -> None:
    """Asserts the same leaves with the same dtypes, shapes and bits."""
    ours, theirs = (
        {name: np.asarray(array) for name, array in items.items()}
        for items in (leaves(x) if isinstance(x, MHAParams) else x for x in (a, b))
    )
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        other = theirs[name]
        assert (name, array.dtype, array.shape) == (name, other.dtype, other.shape)
        assert array.tobytes() == other.tobytes(), name
