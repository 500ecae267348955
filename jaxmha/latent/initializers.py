"""Initial parameters of latent attention."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from jaxmha.arrays import Array, DTypeLike
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
    dtype = floating_dtype(dtype)
    compute = accumulation_dtype(dtype)
    shapes = leaf_shapes(
        num_heads=num_heads,
        features=features,
        latent_dim=latent_dim,
        rotary_dim=rotary_dim,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        query_latent_dim=query_latent_dim,
        out_features=out_features,
        use_bias=use_bias,
    )
    kernels = [name for name in shapes if name.endswith("kernel")]
    keys = dict(zip(kernels, jax.random.split(key, len(kernels)), strict=True))
    found: dict[str, Array] = {}
    for name, shape in shapes.items():
        if name not in keys:
            found[name] = (jnp.zeros if name.endswith("bias") else jnp.ones)(shape, dtype)
            continue
        fan_in = math.prod(shape[: contracted(name)])
        values = jax.random.truncated_normal(keys[name], -2.0, 2.0, shape, compute)
        # The standard deviation of a normal truncated at 2 is 0.8796.
        found[name] = jnp.asarray(values * (fan_in**-0.5 / 0.87962566103423978), dtype)
    return from_leaves(found)


def contracted(leaf: str) -> int:
    """The number of axes of a kernel that are inputs.

    >>> contracted("out.kernel"), contracted("query.kernel")
    (2, 1)
    """
    return 2 if leaf == "out.kernel" else 1


def leaf_shapes(
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
) -> dict[str, tuple[int, ...]]:
    """The shape of every leaf of a layer, kernels first; arguments are as in `init_latent_params`.

    Raises:
      ValueError: a size is not a positive integer.
    """
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
    N, h, Do = num_heads, value_head_dim or head_dim, out_features or features
    low_rank = query_latent_dim is not None
    shapes: dict[str, tuple[int, ...]] = {
        "query.kernel": (query_latent_dim or features, N, head_dim + rotary_dim),
        "latent.kernel": (features, latent_dim),
        "rotary_key.kernel": (features, rotary_dim),
        "key.kernel": (latent_dim, N, head_dim),
        "value.kernel": (latent_dim, N, h),
        "out.kernel": (N, h, Do),
    }
    if query_latent_dim is not None:
        shapes["query_latent.kernel"] = (features, query_latent_dim)
        shapes["query_latent_norm"] = (query_latent_dim,)
    shapes["latent_norm"] = (latent_dim,)
    if flag("use_bias", use_bias):
        biased = ("latent", "rotary_key", "out", *["query_latent"] * low_rank)
        shapes |= {f"{name}.bias": shapes[f"{name}.kernel"][-1:] for name in biased}
    return shapes
