"""Multi-head latent attention as a `flax.nnx` module."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Integer

from jaxmha.arrays import Array, DTypeLike
from jaxmha.attention_options import hashable
from jaxmha.checks import reject_rounding, require_type
from jaxmha.flax.cached_steps import CachedSteps
from jaxmha.flax.heads import Implementation
from jaxmha.flax.latent.steps import (
    PATHS,
    attend,
    initializer,
    reject_in_steps,
    settings_of,
    shapes_of,
)
from jaxmha.flax.nnx_dropout import dropout_key
from jaxmha.flax.nnx_views import Views
from jaxmha.flax.parameters import Initializer
from jaxmha.flax.settings import reject_known
from jaxmha.latent import LatentCache, LatentParams
from jaxmha.latent.params import from_leaves, leaves
from jaxmha.latent.rotation import LatentRotate, static_latent_rotation
from jaxmha.mask import Mask
from jaxmha.mod_arguments import MaskMod, ModFunctions, ScoreMod
from jaxmha.semantics import Semantics


class Parameters(nnx.Module):  # type: ignore[misc]
    """The arrays of a projection, by name."""


class LatentAttention(CachedSteps, Views):
    """Multi-head latent attention (MLA) of DeepSeek-V2 and V3 by `jaxmha.latent`.

    Args:
      num_heads: N.
      in_features: Dq.
      latent_dim: L, features of the latent of keys and values.
      rotary_dim: R, rotated features of a query, and of the rotary key that all heads share.
      head_dim: H, features of a key without positions.
      value_head_dim: h, default H.
      query_latent_dim: P; None: queries are projected from the features.
      out_features: Do, default Dq.
      use_bias: biases of the projections of features, and of the output.
      dtype: of the computation; None: the promoted dtype of inputs and parameters.
      param_dtype: of the parameters.
      kernel_init, bias_init: as in flax; the fans are those of a matrix. Do not give them sharding
        metadata: the kernels of the latents and of the rotary key have no head axis, so no single
        spec fits all.
      deterministic: no dropout; the argument of the call takes precedence.
      decode: appends to a cache of latents (`init_cache`).
      semantics: as in `jaxmha.latent_attention`, with the dropout rate.
      rotate: `rotate(heads, positions)` of the rotary features, such as `jaxmha.rope`; or
        `jaxmha.latent.ScaledQueries`.
      implementation: as in `jaxmha.latent_attention`; decoding steps have their own implementation.
      rngs: streams for parameters and dropout.

    Raises:
      ValueError: a size is not a positive integer.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.

    >>> from jaxmha import rope
    >>> sizes = {"latent_dim": 8, "rotary_dim": 4, "head_dim": 5}
    >>> layer = LatentAttention(2, 6, **sizes, rotate=rope, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((3, 5, 6)), is_causal=True).shape
    (3, 5, 6)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        latent_dim: int,
        rotary_dim: int,
        head_dim: int,
        value_head_dim: int | None = None,
        query_latent_dim: int | None = None,
        out_features: int | None = None,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),
        bias_init: Initializer = nnx.initializers.zeros_init(),
        deterministic: bool | None = None,
        decode: bool = False,
        semantics: Semantics = Semantics(),
        rotate: LatentRotate | None = None,
        implementation: Implementation = None,
        rngs: nnx.Rngs,
    ) -> None:
        require_type(Semantics, semantics=semantics)
        self.num_heads, self.in_features, self.out_features = num_heads, in_features, out_features
        self.latent_dim, self.query_latent_dim = latent_dim, query_latent_dim
        self.rotary_dim, self.head_dim, self.value_head_dim = rotary_dim, head_dim, value_head_dim
        self.use_bias, self.dtype, self.param_dtype = use_bias, dtype, param_dtype
        self.deterministic, self.decode = deterministic, decode
        self.semantics, self.rotate = semantics, rotate
        self.implementation = hashable(implementation)
        for leaf, shape in shapes_of(self, in_features).items():
            init = initializer(leaf, kernel_init, bias_init)
            held = nnx.Param(init(rngs.params(), shape, param_dtype))
            name, *tail = PATHS[leaf]
            if not tail:
                setattr(self, name, held)
                continue
            if not hasattr(self, name):
                setattr(self, name, Parameters())
            setattr(getattr(self, name), tail[0], held)
        self.rngs = rngs.dropout.fork() if semantics.dropout_rate > 0 else None
        self.cached_latents = nnx.data(None)
        self.cache_lengths = nnx.data(None)

    def __call__(
        self,
        inputs: Float[Array, "*B T Dq"],
        *,
        mask: Array | Mask | None = None,
        bias: Float[Array, "..."] | None = None,
        is_causal: bool = False,
        positions: Integer[Array, "*#B T"] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        decode: bool | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
    ) -> Float[jax.Array, "*B T Do"]:
        """Self-attention over the tokens of `inputs`.

        Args:
          inputs: `(*B, T, Dq)`; `(B, T, Dq)` for decoding.
          mask: broadcastable to `(*B, N, T, T)`, nonzero entries attend; or a `jaxmha.Mask`.
          bias: added to the logits, broadcastable to `(*B, N, T, T)`.
          is_causal: query i attends keys j <= i; steps over a cache always are causal.
          positions: `(*B, T)` of the tokens, for `rotate`; default 0, 1, ...
          deterministic: no dropout.
          rngs: `Rngs` or a stream for dropout, instead of the module's own.
          decode: appends to the cache of `init_cache`, and attends to all tokens in it.
          score_mod, mask_mod: score and mask functions, as in `jaxmha.latent_attention`; with
            decode, i and j are positions in the sequence.

        Returns:
          `(*B, T, Do)`, in `dtype` if it is given.

        Raises:
          ValueError: a shape does not fit, dropout has no rngs, or decoding has no cache.
        """
        functions = ModFunctions(score_mod, mask_mod)
        key = dropout_key(self, deterministic, rngs)
        params, _ = self.to_params()
        if not (self.decode if decode is None else decode):
            return attend(
                self,
                params,
                inputs,
                mask,
                bias,
                key,
                functions,
                is_causal=is_causal,
                positions=positions,
            )
        if self.cached_latents is None:
            raise ValueError("there is no cache to decode with: call init_cache first")
        reject_in_steps(key, bias=bias, positions=positions)
        cache = LatentCache(self.cached_latents[...], self.cache_lengths[...])
        out, cache = self.decode_step(
            inputs, cache, mask=mask, score_mod=score_mod, mask_mod=mask_mod
        )
        self.cached_latents[...], self.cache_lengths[...] = cache
        return out

    def _checked_rotation(self, rotate: Any) -> Any:
        return static_latent_rotation(rotate)

    def init_cache(self, batch_size: int, length: int, dtype: DTypeLike | None = None) -> None:
        """Makes an empty cache for `length` tokens of each sequence, replacing any other; `dtype`
        defaults to that of the module, or else to that of the parameters.

        >>> sizes = {"latent_dim": 8, "rotary_dim": 4, "head_dim": 5}
        >>> layer = LatentAttention(2, 6, **sizes, decode=True, rngs=nnx.Rngs(0))
        >>> layer.init_cache(3, 5)
        >>> layer(jnp.ones((3, 1, 6))).shape, layer.cache_lengths[...].tolist()
        ((3, 1, 6), [1, 1, 1])
        """
        dtype = self.dtype if dtype is None else dtype
        cache = LatentCache.empty(self.to_params()[0], batch_size, length, dtype)
        self.cached_latents = nnx.Cache(cache.latents)
        self.cache_lengths = nnx.Cache(cache.lengths)

    def _ensure_cache(self, batch: tuple[int, ...], length: int) -> None:
        if self.cached_latents is not None:
            return
        if len(batch) != 1:
            raise ValueError(f"batch_size: a cache of latents has one batch axis, got {batch}")
        self.init_cache(*batch, length)

    def to_params(self) -> tuple[LatentParams, Semantics]:
        """Parameters and semantics, as `jaxmha.latent_attention` takes them, without `rotate`."""
        found: dict[str, Any] = {}
        for leaf, (name, *tail) in PATHS.items():
            held = getattr(self, name, None)
            held = getattr(held, tail[0], None) if tail else held
            if held is not None:
                found[leaf] = held.get_value()
        return from_leaves(found), self.semantics

    @classmethod
    def from_params(
        cls,
        params: LatentParams,
        semantics: Semantics = Semantics(),
        *,
        rngs: nnx.Rngs | None = None,
        **settings: Any,
    ) -> "LatentAttention":
        """A module with these parameters and semantics.

        Args:
          params: of one layer, such as `converters.huggingface.import_latent_params` returns.
          semantics: of that layer.
          rngs: for dropout; without them, calls with dropout need rngs.
          settings: further arguments, such as `rotate`, `dtype`, `deterministic`.

        Raises:
          ValueError: shapes do not fit each other, or no module has exactly these leaves.
          TypeError: float64 would be rounded because x64 is off.
        """
        reject_rounding(params=params)
        reject_known(settings, "in_features", "kernel_init")
        module = cls(
            in_features=params.latent.kernel.shape[0],
            rngs=nnx.Rngs(0) if rngs is None else rngs,
            kernel_init=nnx.initializers.zeros_init(),
            **settings_of(params, semantics, settings),
        )
        if rngs is None:
            module.rngs = None
        for leaf, array in leaves(params).items():
            name, *tail = PATHS[leaf]
            held = getattr(module, name)
            (getattr(held, tail[0]) if tail else held).set_value(jnp.asarray(array))
        return module
