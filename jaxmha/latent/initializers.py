"""Initial parameters of latent attention."""

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jaxmha.arrays import DTypeLike
from jaxmha.checks import floating_dtype, prng_key
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.integers import require_sizes
from jaxmha.latent.params import LatentParams, from_leaves
from jaxmha.static_checks import flag


def init_latent_params(
    key: PRNGKeyArray,
    *,
    num_heads: int,
    features: int,
    latent_dim: int,
    rotary_dim: int,
    head_dim: int,
    value_head_dim: int | None = None,
    query_latent_dim: int | None = None,
    out_features: int | None = None,
    use_bias: bool = False,
    dtype: DTypeLike = jnp.float32,
) -> LatentParams:
    """Draws the parameters of one layer of latent attention.

    Kernels are LeCun-normal, truncated at two standard deviations; scales of norms start at 1 and
    biases at 0.

    Args:
      key: a PRNG key.
      num_heads: N.
      features: Dq.
      latent_dim: L, features of the latent of keys and values.
      rotary_dim: R, features of the key that all heads share and that is rotated.
      head_dim: H, features of a key without positions.
      value_head_dim: h, default H.
      query_latent_dim: P; None: queries are projected from the features.
      out_features: Do, default Dq.
      use_bias: biases of the projections of features, and of the output.
      dtype: of every leaf; values are drawn in it, at least in float32.

    Raises:
      ValueError: a size is not a positive integer.
      TypeError: the dtype is not floating, or float64 without x64.

    >>> params = init_latent_params(
    ...     jax.random.key(0), num_heads=3, features=8, latent_dim=6, rotary_dim=4, head_dim=5
    ... )
    >>> params.query.kernel.shape, params.value.kernel.shape
    ((8, 3, 9), (6, 3, 5))
    """
    prng_key("key", key)
    require_sizes(
        num_heads=num_heads,
        features=features,
        latent_dim=latent_dim,
        rotary_dim=rotary_dim,
        head_dim=head_dim,
    )
    require_sizes(
        optional=True,
        value_head_dim=value_head_dim,
        query_latent_dim=query_latent_dim,
        out_features=out_features,
    )
    dtype, N = floating_dtype(dtype), num_heads
    compute = accumulation_dtype(dtype)
    h, Do = value_head_dim or head_dim, out_features or features
    shapes: dict[str, tuple[int, ...]] = {
        "query.kernel": (query_latent_dim or features, N, head_dim + rotary_dim),
        "latent.kernel": (features, latent_dim),
        "rotary_key.kernel": (features, rotary_dim),
        "key.kernel": (latent_dim, N, head_dim),
        "value.kernel": (latent_dim, N, h),
        "out.kernel": (N, h, Do),
    }
    ones = {"latent_norm": latent_dim}
    zeros = {"latent.bias": latent_dim, "rotary_key.bias": rotary_dim, "out.bias": Do}
    if query_latent_dim is not None:
        shapes["query_latent.kernel"] = (features, query_latent_dim)
        ones["query_latent_norm"] = query_latent_dim
        zeros["query_latent.bias"] = query_latent_dim
    found = {name: jnp.ones(size, dtype) for name, size in ones.items()}
    if flag("use_bias", use_bias):
        found |= {name: jnp.zeros(size, dtype) for name, size in zeros.items()}
    keys = jax.random.split(key, len(shapes))
    for drawn, (name, shape) in zip(keys, shapes.items(), strict=True):
        fan_in = shape[0] * shape[1] if name == "out.kernel" else shape[0]
        values = jax.random.truncated_normal(drawn, -2.0, 2.0, shape, compute)
        # The standard deviation of a normal truncated at 2 is 0.8796.
        found[name] = jnp.asarray(values * (fan_in**-0.5 / 0.87962566103423978), dtype)
    return from_leaves(dict(found))
