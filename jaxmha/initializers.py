"""Initial parameters from each framework's own distributions.

Sources: torch 2.13 `MultiheadAttention._reset_parameters` and `Linear.reset_parameters`; Keras 3.15
`MultiHeadAttention` with glorot_uniform (up to 3.14 its fans differed: kernels were about 6 times
smaller); flax 0.12 `lecun_normal` on flattened kernels, linen and nnx alike.
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from jaxmha.arrays import DTypeLike
from jaxmha.checks import floating_dtype, prng_key
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.integers import require_sizes
from jaxmha.params import MHAParams, Projection
from jaxmha.static_checks import flag, one_of


def init_params(
    key: PRNGKeyArray,
    *,
    num_heads: int,
    features: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
    key_features: int | None = None,
    value_features: int | None = None,
    out_features: int | None = None,
    use_bias: bool = True,
    use_bias_kv: bool = False,
    dtype: DTypeLike = jnp.float32,
    scheme: Literal["torch", "keras", "flax"] = "torch",
) -> MHAParams:
    """Draws the parameters of one layer. Biases start at zero in every scheme.

    Args:
      key: a PRNG key.
      num_heads: N.
      features: Dq.
      num_kv_heads: K, default N; N is a multiple of it.
      head_dim: H, default `features // num_heads`.
      value_head_dim: h, default H.
      key_features: Dk, default Dq. value_features: Dv, default Dk.
      out_features: Do, default Dq.
      use_bias: biases of all four projections. use_bias_kv: `bias_k` and `bias_v`.
      dtype: of every leaf; values are drawn in it, at least in float32.
      scheme: framework of the distribution. `torch`: Xavier-uniform, with the fans of the packed
        `in_proj_weight` where torch packs (equal widths, K = N, H = h = Dq / N), else of each
        kernel; the output kernel is U(+-1/sqrt(fan in)). `keras`: Glorot-uniform, with the sizes of
        the contracted and of the other axes as fans. `flax`: LeCun-normal, truncated at two
        standard deviations.

    Raises:
      ValueError: a size does not fit.
      TypeError: the dtype is not floating, or float64 without x64.

    >>> import jax
    >>> init_params(jax.random.key(0), num_heads=2, features=6).out.kernel.shape
    (2, 3, 6)
    """
    one_of("scheme", scheme, ("torch", "keras", "flax"))
    prng_key("key", key)
    use_bias, use_bias_kv = flag("use_bias", use_bias), flag("use_bias_kv", use_bias_kv)
    require_sizes(num_heads=num_heads, features=features)
    require_sizes(
        optional=True,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        key_features=key_features,
        value_features=value_features,
        out_features=out_features,
    )
    dtype = floating_dtype(dtype)
    if head_dim is None and features % num_heads:
        raise ValueError(
            f"features Dq={features} is not a multiple of num_heads N={num_heads}: give head_dim"
        )
    N, Dq, H = num_heads, features, head_dim or features // num_heads
    K, h = num_kv_heads or N, value_head_dim or H
    Dk = key_features or Dq
    Dv, Do = value_features or Dk, out_features or Dq
    if N % K:
        raise ValueError(f"num_heads N={N} must be a multiple of num_kv_heads K={K}")
    kernels = {"query": (Dq, N, H), "key": (Dk, K, H), "value": (Dv, K, h), "out": (N, h, Do)}
    biases = {"query": (N, H), "key": (K, H), "value": (K, h), "out": (Do,)}
    packed = Dq == Dk == Dv == N * H and K == N and h == H
    draw = Draw(scheme, dtype, 3 if packed else 1)
    keys = jax.random.split(key, 6)
    query, key_, value, out = (
        Projection(
            draw.kernel(key, name, shape), jnp.zeros(biases[name], dtype) if use_bias else None
        )
        for key, (name, shape) in zip(keys, kernels.items(), strict=False)
    )
    params = MHAParams(query, key_, value, out)
    if not use_bias_kv:
        return params
    return params._replace(
        bias_k=draw.position(keys[4], (K, H)), bias_v=draw.position(keys[5], (K, h))
    )


class Draw(NamedTuple):
    """The distributions of a scheme.

    Attributes:
      dtype: of the leaves; values are drawn in it, at least in float32.
      packed: number of kernels that torch packs into one; it multiplies their fan out.
    """

    scheme: Literal["torch", "keras", "flax"]
    dtype: np.dtype[np.floating]
    packed: int

    def kernel(self, key: jax.Array, name: str, shape: tuple[int, int, int]) -> jax.Array:
        """Draws the kernel of a projection: `(D, N, H)`, or of the output `(N, h, Do)`."""
        contracted = 2 if name == "out" else 1
        fan_in, fan_out = math.prod(shape[:contracted]), math.prod(shape[contracted:])
        if self.scheme == "flax":  # the standard deviation of a normal truncated at 2 is 0.8796
            compute = accumulation_dtype(self.dtype)
            drawn = jax.random.truncated_normal(key, -2.0, 2.0, shape, compute)
            return jnp.asarray(drawn * (fan_in**-0.5 / 0.87962566103423978), self.dtype)
        if self.scheme == "torch" and name == "out":
            return self._uniform(key, shape, fan_in**-0.5)
        if self.scheme == "torch":
            fan_out *= self.packed
        return self._uniform(key, shape, (6 / (fan_in + fan_out)) ** 0.5)

    def position(self, key: jax.Array, shape: tuple[int, int]) -> jax.Array:
        """Draws `bias_k` or `bias_v` as torch does: Xavier-normal on (1, 1, D), both fans are D."""
        drawn = jax.random.normal(key, shape, accumulation_dtype(self.dtype))
        return jnp.asarray(drawn * math.prod(shape) ** -0.5, self.dtype)

    def _uniform(self, key: jax.Array, shape: tuple[int, ...], bound: float) -> jax.Array:
        drawn: jax.Array = jax.random.uniform(
            key, shape, accumulation_dtype(self.dtype), -bound, bound
        )
        return drawn.astype(self.dtype)
