"""Projections of latent attention: features to heads in two forms, and heads to features.

`project` gives the queries, keys and values of every head. `absorb` multiplies the queries with the
key kernel instead, so that all heads attend one key per token, its latent and its rotary key: a
cache need not hold more.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer

from jaxmha import checks
from jaxmha.arrays import Array, require_arrays
from jaxmha.dims import bind
from jaxmha.implementations.base import accumulation_dtype
from jaxmha.latent.params import LatentParams, leaves, sizes
from jaxmha.latent.rotation import LatentRotate, ScaledQueries, static_latent_rotation
from jaxmha.matmul import resolved
from jaxmha.params import Projection
from jaxmha.projections import affine_map, inverse_rms
from jaxmha.rotary import apply_rotation
from jaxmha.semantics import Semantics
from jaxmha.static_checks import flag


class Checked(NamedTuple):
    """Sizes by letter, and the promoted dtype of inputs and parameters."""

    sizes: dict[str, int]
    dtype: np.dtype[np.floating]


def check_inputs(params: LatentParams, **inputs: Array) -> Checked:
    """Checks every shape and dtype of parameters and inputs, which are features or heads."""
    found = sizes(params)
    for name, x in inputs.items():
        bind(name, x.shape, "*B T N h" if name == "heads" else "*B T Dq", found)
    dtype = checks.promoted(**inputs, **{f"params.{k}": v for k, v in leaves(params).items()})
    return Checked(found, dtype)


# Fields of Semantics that latent attention does not support, and their neutral values.
_WITHOUT = {"qk_norm": None, "clip_qkv": None, "add_zero_attn": False, "attention_axes": None}


def check_arguments(
    params: LatentParams,
    semantics: Semantics,
    required: Mapping[str, Array],
    **optional: Array | None,
) -> None:
    """Raises TypeError for an argument that has a wrong type or would be rounded, and ValueError
    for semantics that latent attention does not support."""
    checks.require_type(LatentParams, params=params)
    checks.require_type(Semantics, semantics=semantics)
    require_arrays(optional=False, **required)
    require_arrays(optional=True, **optional)
    checks.reject_rounding(params=params, **required, **optional)
    for name, neutral in _WITHOUT.items():
        if getattr(semantics, name) != neutral:
            raise ValueError(
                f"semantics.{name}={getattr(semantics, name)!r}: latent attention has norms of "
                "latents (params.latent_norm), and no other norm, clip, extra position or axis"
            )


def project(
    params: LatentParams,
    x: Float[Array, "*B T Dq"],
    *,
    positions: Integer[Array, "*#B T"] | None = None,
    rotate: LatentRotate | None = None,
    semantics: Semantics = Semantics(),
) -> tuple[
    Float[jax.Array, "*B T N E"], Float[jax.Array, "*B T N E"], Float[jax.Array, "*B T N h"]
]:
    """Queries, keys and values of every head, as for training.

    Args:
      params: parameters of the layer.
      x: features.
      positions: positions of the tokens; None: 0 to T - 1.
      rotate: `rotate(heads, positions)`, such as `rope`, applied to the R rotary features of
        queries `(*B, T, N, R)` and of the shared key `(*B, T, 1, R)`; None: no rotation.
        `ScaledQueries` also multiplies queries by factors of their positions.
      semantics: `qk_norm_epsilon` is the epsilon of the norms of latents.

    Returns:
      query, key and value. The scale of their logits is `E ** -0.5`.

    >>> from jaxmha.latent import init_latent_params
    >>> params = init_latent_params(
    ...     jax.random.key(0), num_heads=3, features=8, latent_dim=6, rotary_dim=4, head_dim=5
    ... )
    >>> [x.shape for x in project(params, jnp.ones((2, 7, 8)))]
    [(2, 7, 3, 9), (2, 7, 3, 9), (2, 7, 3, 5)]
    """
    check_arguments(params, semantics, {"x": x}, positions=positions)
    found: tuple[jax.Array, jax.Array, jax.Array] = _jitted(
        params, x, positions, semantics, rotate=static_latent_rotation(rotate), absorbed=False
    )
    return found


def absorb(
    params: LatentParams,
    x: Float[Array, "*B T Dq"],
    *,
    positions: Integer[Array, "*#B T"] | None = None,
    rotate: LatentRotate | None = None,
    semantics: Semantics = Semantics(),
) -> tuple[Float[jax.Array, "*B T N C"], Float[jax.Array, "*B T C"]]:
    """Queries of every head for latents, and one key of C = L + R features per token, for decoding.

    The value of a token is the first L features of its key, its latent. `combine(absorbed=True)`
    projects the weighted latents to values. Arguments are those of `project`.

    Returns:
      query and latents. The scale of their logits is `E ** -0.5`, not `C ** -0.5`.

    >>> from jaxmha.latent import init_latent_params
    >>> params = init_latent_params(
    ...     jax.random.key(0), num_heads=3, features=8, latent_dim=6, rotary_dim=4, head_dim=5
    ... )
    >>> [x.shape for x in absorb(params, jnp.ones((2, 7, 8)))]
    [(2, 7, 3, 10), (2, 7, 10)]
    """
    check_arguments(params, semantics, {"x": x}, positions=positions)
    found: tuple[jax.Array, jax.Array] = _jitted(
        params, x, positions, semantics, rotate=static_latent_rotation(rotate), absorbed=True
    )
    return found


@partial(jax.jit, static_argnames=("rotate", "absorbed"))
def _jitted(
    params: LatentParams,
    x: jax.Array,
    positions: jax.Array | None,
    semantics: Semantics,
    *,
    rotate: LatentRotate | None,
    absorbed: bool,
) -> tuple[jax.Array, ...]:
    sizes, dtype = check_inputs(params, x=x)
    batch = x.shape[:-2]
    rows = x.reshape(math.prod(batch), *x.shape[-2:])
    at = flat_positions(positions, batch, rows.shape[0], sizes["T"])
    latent = Latent(params, semantics, dtype, rotate)
    queries, keys = latent.queries(rows, at), latent.keys(rows, at)
    found = (latent.absorbed(queries), keys) if absorbed else latent.expanded(queries, keys)
    return tuple(part.reshape(*batch, *part.shape[1:]) for part in found)


def flat_positions(
    positions: Array | None, batch: tuple[int, ...], rows: int, T: int
) -> Integer[jax.Array, "B T"]:
    """Positions of all batch rows, with one batch axis; None: 0 to T - 1."""
    if positions is None:
        found = jnp.arange(T, dtype=np.int32).reshape(1, T)
    else:
        if not jnp.issubdtype(positions.dtype, np.integer):
            raise TypeError(f"positions must be an integer array, got {positions.dtype}")
        found = checks.flatten_batch("positions", positions, batch, "T", {"T": T})
    return jnp.broadcast_to(found, (rows, T))


class Latent(NamedTuple):
    """Checked parameters, with the semantics, promoted dtype, rotation and implementation of a
    call."""

    params: LatentParams
    semantics: Semantics
    dtype: np.dtype[np.floating]
    rotate: LatentRotate | None
    implementation: str | tuple[str, ...] | None = None

    def queries(
        self,
        x: Float[jax.Array, "B T Dq"],
        positions: Integer[jax.Array, "B T"],
        attended: jax.Array | None = None,
    ) -> Float[jax.Array, "B T N E"]:
        """Projects queries, rotates their last R features, and multiplies them by the factors of
        `ScaledQueries`, if given.

        `attended`: rows of x to read, `b T`; other rows count as zeros.
        """
        params = self.params
        if params.query_latent is not None:
            latent = self._affine(x, params.query_latent, attended, rounded=False)
            x, attended = self._norm(latent, params.query_latent_norm), None
        query = self._affine(x, params.query, attended).astype(self.dtype)
        H = params.key.kernel.shape[-1]
        turned = self._rotated(query[..., H:], positions)
        found = jnp.concatenate([query[..., :H], turned], -1)
        if not isinstance(self.rotate, ScaledQueries):
            return found
        return found * self.rotate.factors(positions)[..., None, None].astype(self.dtype)

    def keys(
        self,
        x: Float[jax.Array, "B T Dq"],
        positions: Integer[jax.Array, "B T"],
        attended: jax.Array | None = None,
    ) -> Float[jax.Array, "B T C"]:
        """Normalised latents, then the rotary key. `attended`: rows of x to read, `b T`; other rows
        count as zeros."""
        latent = self._affine(x, self.params.latent, attended, rounded=False)
        latent = self._norm(latent, self.params.latent_norm)
        key = self._affine(x, self.params.rotary_key, attended).astype(self.dtype)
        turned = self._rotated(key[:, :, None], positions)[:, :, 0]
        return jnp.concatenate([latent, turned], -1)

    def expanded(
        self, query: Float[jax.Array, "B T N E"], keys: Float[jax.Array, "B T C"]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys `B T N E` and values `B T N h` of every head."""
        params = self.params
        L, N = params.key.kernel.shape[:2]
        latent, rotary = keys[..., :L], keys[..., None, L:]
        own = self._affine(latent, params.key).astype(self.dtype)
        shared = jnp.broadcast_to(rotary, (*own.shape[:2], N, rotary.shape[-1]))
        value = self._affine(latent, params.value).astype(self.dtype)
        return query, jnp.concatenate([own, shared], -1), value

    def absorbed(self, query: Float[jax.Array, "B T N E"]) -> Float[jax.Array, "B T N C"]:
        """Queries for latents and rotary keys: `query @ (kernel @ latent) = (query @ kernel) @
        latent`."""
        H = self.params.key.kernel.shape[-1]
        kernel = jnp.moveaxis(jnp.asarray(self.params.key.kernel), 2, 1)  # L H N
        own = self._by_head(query[..., :H], kernel)
        return jnp.concatenate([own, query[..., H:]], -1)

    def values(self, heads: Float[jax.Array, "B T N L"]) -> Float[jax.Array, "B T N h"]:
        """Projects weighted latents to weighted values."""
        return self._by_head(heads, jnp.moveaxis(jnp.asarray(self.params.value.kernel), 2, 0))

    def combined(self, heads: Float[jax.Array, "B T N h"]) -> Float[jax.Array, "B T Do"]:
        """Projects heads to output features, or concatenates them if `params.out` is None."""
        if self.params.out is None:
            return heads.reshape(*heads.shape[:-2], math.prod(heads.shape[-2:])).astype(self.dtype)
        return self._affine(heads, self.params.out, contracted=2).astype(self.dtype)

    def _affine(
        self,
        x: jax.Array,
        projection: Projection,
        attended: jax.Array | None = None,
        contracted: int = 1,
        rounded: bool = True,
    ) -> jax.Array:
        """Applies a projection. `rounded`: the caller rounds the result to `self.dtype` at once."""
        precision, names = self.semantics.precision, self.implementation
        return affine_map(
            x, contracted, projection, self.dtype, precision, names, attended, rounded
        )

    def _by_head(
        self, heads: Float[jax.Array, "B T N c"], kernel: Float[jax.Array, "d c N"]
    ) -> Float[jax.Array, "B T N d"]:
        """The product of every head with its own matrix."""
        precision = resolved(self.semantics.precision)
        found = jnp.einsum(
            "btnc,dcn->btnd",
            heads.astype(self.dtype),
            kernel.astype(self.dtype),
            precision=precision,
            preferred_element_type=accumulation_dtype(self.dtype),
        )
        return found.astype(self.dtype)

    def _norm(self, x: jax.Array, scale: Array | None) -> jax.Array:
        """The RMS norm of Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019)."""
        if scale is None:
            return x.astype(self.dtype)
        x = x.astype(accumulation_dtype(self.dtype))
        x = x * inverse_rms(x, -1, self.semantics.qk_norm_epsilon)
        wide = jnp.asarray(scale).astype(x.dtype).reshape((1,) * (x.ndim - 1) + scale.shape)
        return (x * wide).astype(self.dtype)

    def _rotated(self, heads: jax.Array, positions: jax.Array) -> jax.Array:
        rotate = self.rotate.rotate if isinstance(self.rotate, ScaledQueries) else self.rotate
        return heads if rotate is None else apply_rotation(rotate, heads, positions)


def combine(
    params: LatentParams,
    heads: Float[Array, "*B T N h"] | Float[Array, "*B T N L"],
    *,
    absorbed: bool = False,
    semantics: Semantics = Semantics(),
) -> Float[jax.Array, "*B T Do"]:
    """Combines heads with the output projection, or concatenates them if `params.out` is None.

    `absorbed`: the heads are weighted latents `(*B, T, N, L)`, and are projected to values first.

    >>> from jaxmha.latent import init_latent_params
    >>> params = init_latent_params(
    ...     jax.random.key(0), num_heads=3, features=8, latent_dim=6, rotary_dim=4, head_dim=5
    ... )
    >>> combine(params, jnp.ones((2, 7, 3, 6)), absorbed=True).shape
    (2, 7, 8)
    """
    check_arguments(params, semantics, {"heads": heads})
    out: jax.Array = _combine(params, heads, semantics, absorbed=flag("absorbed", absorbed))
    return out


@partial(jax.jit, static_argnames=("absorbed",))
def _combine(
    params: LatentParams, heads: jax.Array, semantics: Semantics, *, absorbed: bool
) -> jax.Array:
    found = sizes(params)
    bind("heads", heads.shape, f"*B T N {'L' if absorbed else 'h'}", found)
    named = {f"params.{name}": x for name, x in leaves(params).items()}
    latent = Latent(params, semantics, checks.promoted(heads=heads, **named), None)
    rows = heads.reshape(math.prod(heads.shape[:-3]), *heads.shape[-3:])
    out = latent.combined(latent.values(rows) if absorbed else rows)
    return out.reshape(*heads.shape[:-2], out.shape[-1])
