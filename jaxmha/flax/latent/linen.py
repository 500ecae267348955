"""Multi-head latent attention as a `flax.linen` module."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float, Integer, PRNGKeyArray

from jaxmha.arrays import Array, DTypeLike
from jaxmha.attention_options import hashable
from jaxmha.checks import promoted, reject_rounding, require_type
from jaxmha.flax.cached_steps import CachedSteps, with_cache
from jaxmha.flax.heads import Implementation
from jaxmha.flax.latent.steps import (
    PATHS,
    attend,
    initializer,
    reject_in_steps,
    settings_of,
    shapes_of,
)
from jaxmha.flax.linen_parameters import Parameters
from jaxmha.flax.parameters import Initializer
from jaxmha.flax.settings import require_features
from jaxmha.latent import LatentCache, LatentParams
from jaxmha.latent.params import from_leaves, leaves
from jaxmha.latent.rotation import LatentRotate, static_latent_rotation
from jaxmha.mask import Mask
from jaxmha.mod_arguments import MaskMod, ModFunctions, ScoreMod
from jaxmha.semantics import Semantics


class LatentAttention(CachedSteps, nn.Module):  # type: ignore[misc]
    """Multi-head latent attention (MLA) of DeepSeek-V2 and V3 by `jaxmha.latent`.

    Attributes:
      num_heads: N.
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
      decode: appends to a cache of latents, in the collection `cache`.
      semantics: as in `jaxmha.latent_attention`, with the dropout rate.
      rotate: `rotate(heads, positions)` of the rotary features, such as `jaxmha.rope`; or
        `jaxmha.latent.ScaledQueries`.
      implementation: as in `jaxmha.latent_attention`; decoding steps have their own implementation.

    Raises:
      ValueError: a size is not a positive integer.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.

    >>> from jaxmha import rope
    >>> layer = LatentAttention(2, latent_dim=8, rotary_dim=4, head_dim=5, rotate=rope)
    >>> x = jnp.ones((3, 5, 6))
    >>> layer.apply(layer.init(jax.random.key(0), x), x, is_causal=True).shape
    (3, 5, 6)
    """

    num_heads: int
    latent_dim: int
    rotary_dim: int
    head_dim: int
    value_head_dim: int | None = None
    query_latent_dim: int | None = None
    out_features: int | None = None
    use_bias: bool = False
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    deterministic: bool | None = None
    decode: bool = False
    semantics: Semantics = Semantics()
    rotate: LatentRotate | None = None
    implementation: Implementation = None

    def __post_init__(self) -> None:
        require_type(Semantics, semantics=self.semantics)
        self.implementation = hashable(self.implementation)  # required by flax's transformations
        self.rotate = static_latent_rotation(self.rotate)
        super().__post_init__()

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(
        self,
        inputs: Float[Array, "*B T Dq"],
        *,
        mask: Array | Mask | None = None,
        bias: Float[Array, "..."] | None = None,
        is_causal: bool = False,
        positions: Integer[Array, "*#B T"] | None = None,
        deterministic: bool | None = None,
        dropout_rng: PRNGKeyArray | None = None,
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
          dropout_rng: a PRNG key, by default made from the rng collection `dropout`.
          score_mod, mask_mod: score and mask functions, as in `jaxmha.latent_attention`; with
            decode, i and j are positions in the sequence.

        Returns:
          `(*B, T, Do)`, in `dtype` if it is given.

        Raises:
          ValueError: a shape does not fit, or a step over a cache gets dropout, bias or positions.
        """
        require_features(inputs=inputs)
        if self.decode and inputs.ndim != 3:
            raise ValueError(
                f"inputs: expected axes (B, T, Dq) with decode=True, got shape {inputs.shape}: a "
                "cache of latents has one batch axis"
            )
        params = self._declare(inputs.shape[-1])
        drops = False
        if self.semantics.dropout_rate > 0:
            drops = not nn.merge_param("deterministic", self.deterministic, deterministic)
        if drops and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        key = dropout_rng if drops else None
        functions = ModFunctions(score_mod, mask_mod)
        cached = None
        if self.decode:
            # The call that initialises the cache does not decode.
            initialised = self.has_variable("cache", "cached_latents")
            dtype = self.dtype
            if dtype is None:
                dtype = promoted(inputs=inputs, **leaves(params))
            B, T, _ = inputs.shape
            empty = LatentCache.empty(params, B, T, dtype)
            cached = [
                self.variable("cache", name, lambda x=x: x)
                for name, x in zip(("cached_latents", "cache_lengths"), empty, strict=True)
            ]
            cached = cached if initialised else None
        if cached is None:
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
        reject_in_steps(key, bias=bias, positions=positions)
        cache = LatentCache(*(x.value for x in cached))
        out, longer = with_cache(
            self,
            params,
            self.semantics,
            "extend",
            inputs,
            cache,
            mask,
            **functions._asdict(),
        )
        for x, value in zip(cached, longer, strict=True):
            x.value = value
        return out

    @nn.nowrap  # type: ignore[untyped-decorator]
    def _declare(self, features: int) -> LatentParams:
        entries: dict[str, list[tuple[str, Initializer, tuple[int, ...]]]] = {}
        found: dict[str, Any] = {}
        for leaf, shape in shapes_of(self, features).items():
            name, *tail = PATHS[leaf]
            init = initializer(leaf, self.kernel_init, self.bias_init)
            if tail:
                entries.setdefault(name, []).append((tail[0], init, shape))
            else:
                found[leaf] = self.param(name, init, shape, self.param_dtype)
        for name, rows in entries.items():
            held = Parameters(tuple(rows), self.param_dtype, name=name).declare()
            found |= {f"{name}.{tail}": array for tail, array in held.items()}
        return from_leaves(found)

    def to_params(
        self, variables: Mapping[str, Any] | None = None
    ) -> tuple[LatentParams, Semantics]:
        """Parameters and semantics, as `jaxmha.latent_attention` takes them, without `rotate`.

        Args:
          variables: `{"params": ...}`, default the variables of a bound module.

        Raises:
          ValueError: there are no variables.
        """
        if variables is None:
            variables = self.variables if self.scope is not None else {}
        if "params" not in variables:
            raise ValueError(
                "a linen module holds no parameters: pass variables with 'params', or bind it"
            )
        arrays = flatten_dict(meta.unbox(variables["params"]))
        found = {leaf: arrays[path] for leaf, path in PATHS.items() if path in arrays}
        return from_leaves(found), self.semantics

    @classmethod
    def from_params(
        cls, params: LatentParams, semantics: Semantics = Semantics(), **settings: Any
    ) -> tuple["LatentAttention", dict[str, Any]]:
        """A module and its variables, with these parameters and semantics.

        Args:
          params: of one layer, such as `converters.huggingface.import_latent_params` returns.
          semantics: of that layer.
          settings: further attributes, such as `rotate`, `dtype`, `deterministic`.

        Raises:
          ValueError: shapes do not fit each other, or no module has exactly these leaves.
          TypeError: float64 would be rounded because x64 is off.
        """
        reject_rounding(params=params)
        module = cls(**settings_of(params, semantics, settings))
        tree = {PATHS[leaf]: jnp.asarray(array) for leaf, array in leaves(params).items()}
        return module, {"params": unflatten_dict(tree)}
