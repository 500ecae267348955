"""Multi-head attention as a `flax.linen` module."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import meta
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Float, Int, PRNGKeyArray

from jaxmha.arrays import Array, DTypeLike
from jaxmha.attention_options import hashable
from jaxmha.checks import promoted, reject_rounding
from jaxmha.flax.cached import attend_cached
from jaxmha.flax.cached_steps import CachedSteps
from jaxmha.flax.function import attention_fn as own_attention_fn
from jaxmha.flax.function import sow
from jaxmha.flax.heads import CallSettings, Implementation, Inputs, OutAndWeights, attend_layer
from jaxmha.flax.linen_parameters import declare
from jaxmha.flax.parameters import PATHS, Initializer
from jaxmha.flax.settings import (
    UseBias,
    Window,
    as_tuple,
    behaviour,
    cast,
    read_inputs,
    read_mask,
    reject_hooks,
    settings_of,
    widened,
)
from jaxmha.mask import Mask
from jaxmha.mod_arguments import MaskMod, ModFunctions, ScoreMod
from jaxmha.params import MHAParams, from_leaves, leaves
from jaxmha.rotary import Rotate, static_rotation
from jaxmha.semantics import Precision, Semantics


class MultiHeadDotProductAttention(CachedSteps, nn.Module):  # type: ignore[misc]
    """`flax.linen.MultiHeadDotProductAttention` by jaxmha: same arguments, names and shapes.

    Its variables equal flax's, so that checkpoints load unchanged, both ways. It computes what flax
    computes, with [these differences](../how_to/flax.md#differences-from-flax); above all, fully
    masked rows are 0 (the mean of the values, as in flax, with `semantics=Semantics.flax()`).

    Attributes:
      num_heads: N.
      dtype: of the computation; None: the promoted dtype of inputs and parameters.
      param_dtype: of the parameters.
      qkv_features: N * H, default the features of the queries.
      out_features: Do, default the features of the queries.
      broadcast_dropout: batch rows and heads share a draw; None: as in `semantics` if it is given,
        else True. False: no axis shares a draw, even if `semantics` names some.
      dropout_rate: of the weights.
      deterministic: no dropout; may be given in the call instead.
      precision: of matmuls.
      kernel_init: as in flax; kernels are drawn as matrices, `nn.with_partitioning` is kept.
      out_kernel_init: default `kernel_init`.
      bias_init: as in flax.
      out_bias_init: default `bias_init`.
      use_bias: for all four projections, or the names of the projections that have one.
      attention_fn: must be left out, or be flax's or jaxmha's own.
      decode: keeps `cached_key`, `cached_value` and `cache_index` in the collection `cache`.
      normalize_qk: normalises queries and keys, with scales in `query_ln` and `key_ln`.
      force_fp32_for_softmax: the softmax is in float32, also for float64; half precision is
        computed in float32 throughout, and the output is float32 if `dtype` is None.
      qkv_dot_general to attn_weights_value_einsum_cls: hooks of flax that must be left out.
      num_kv_heads: K, default N; fewer are grouped-query attention.
      value_head_dim: h, default H.
      use_out: False: heads are concatenated, and there is no output layer.
      use_bias_kv: a learned extra key position, in `bias_k` and `bias_v`.
      extra_params: names of further leaves of `MHAParams`, such as `sinks`, `gate.kernel`,
        `gate_heads.kernel` (a gate per head), `query_norm_heads` (see `jaxmha.params.CANONICAL`).
      semantics: scale, soft cap, fully masked rows, `add_zero_attn` and the like; settings with an
        argument in flax may be given by that argument or here.
      local_window_size: w or (left, right): `i - left <= j <= i + right`.
      rotate: `rotate(heads, positions)` of projected queries and keys, such as `jaxmha.rope`.
      implementation: as in `jaxmha.multi_head_attention`; it does not apply to the method
        `decode_step`.

    Raises:
      ValueError: sizes do not fit, or an argument cannot be honoured.

    Source: flax/linen/attention.py of flax 0.12.

    >>> from jaxmha import Mask
    >>> layer = MultiHeadDotProductAttention(num_heads=4, num_kv_heads=2, qkv_features=12)
    >>> x = jnp.ones((3, 5, 6))
    >>> variables = layer.init(jax.random.key(0), x)
    >>> layer.apply(variables, x, mask=Mask.causal()).shape
    (3, 5, 6)
    """

    num_heads: int
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool | None = None
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: Precision = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros_init()
    out_bias_init: Initializer | None = None
    use_bias: UseBias = True
    attention_fn: Callable[..., Any] | None = None
    decode: bool = False
    normalize_qk: bool = False
    force_fp32_for_softmax: bool = False
    qkv_dot_general: Any = None
    out_dot_general: Any = None
    qkv_dot_general_cls: Any = None
    out_dot_general_cls: Any = None
    qk_attn_weights_einsum_cls: Any = None
    attn_weights_value_einsum_cls: Any = None
    num_kv_heads: int | None = None
    value_head_dim: int | None = None
    use_out: bool = True
    use_bias_kv: bool = False
    extra_params: tuple[str, ...] = ()
    semantics: Semantics | None = None
    local_window_size: Window = None
    rotate: Rotate | None = None
    implementation: Implementation = None

    def __post_init__(self) -> None:
        self.implementation = hashable(self.implementation)  # required by flax's transformations
        self.use_bias = as_tuple(self.use_bias)
        self.extra_params = as_tuple(self.extra_params)
        self.local_window_size = as_tuple(self.local_window_size)
        self.rotate = static_rotation(self.rotate)
        super().__post_init__()

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(
        self,
        inputs_q: Float[Array, "*B T Dq"],
        inputs_k: Float[Array, "*B S Dk"] | None = None,
        inputs_v: Float[Array, "*B S Dv"] | None = None,
        *,
        inputs_kv: Float[Array, "*B S Dk"] | None = None,
        mask: Array | Mask | None = None,
        bias: Float[Array, "..."] | None = None,
        is_causal: bool = False,
        deterministic: bool | None = None,
        dropout_rng: PRNGKeyArray | None = None,
        sow_weights: bool = False,
        input_positions: Int[Array, "..."] | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
    ) -> Float[jax.Array, "*B T Do"]:
        """Attends from `inputs_q` to `inputs_k`.

        Args:
          inputs_q: `(*B, T, Dq)`.
          inputs_k: `(*B, S, Dk)`, default `inputs_q`.
          inputs_v: `(*B, S, Dv)`, default `inputs_k`.
          inputs_kv: keys and values in one; flax's older argument, with a DeprecationWarning.
          mask: broadcastable to `(*B, N, T, S)`, nonzero entries attend; or a `jaxmha.Mask`.
          bias: added to the logits, broadcastable to `(*B, N, T, S)`.
          is_causal: query i attends keys j <= i.
          deterministic: no dropout.
          dropout_rng: a PRNG key, by default made from the rng collection `dropout`.
          sow_weights: sows the weights before dropout as `intermediates/attention_weights`.
          input_positions: `(*B, T)` of queries and keys for `rotate`, default their positions in
            the cache, or 0, 1, ...
          score_mod, mask_mod: score and mask functions, as in `jaxmha.multi_head_attention`; with
            decode, i and j are the slots of the cache.

        Returns:
          `(*B, T, Do)`, in `dtype` if it is given.

        Raises:
          ValueError: a shape does not fit; names the input (query, key or value), the axes and the
            shape received.
        """
        if inputs_kv is not None:
            if inputs_k is not None or inputs_v is not None:
                raise ValueError("inputs_kv stands for both inputs_k and inputs_v: give it alone")
            warnings.warn(
                "inputs_kv is deprecated in flax: give inputs_k, which serves as both",
                DeprecationWarning,
                stacklevel=2,
            )
            inputs_k = inputs_kv
        inputs = read_inputs(inputs_q, inputs_k, inputs_v, self.dtype)
        semantics = self._semantics()
        params = cast(declare(self, inputs, semantics), self.dtype)
        named = dict(zip(("inputs_q", "inputs_k", "inputs_v"), inputs, strict=True))
        dtype = promoted(**leaves(params), **named)
        if self.force_fp32_for_softmax:
            params, inputs = widened((params, inputs))

        drops = False
        if semantics.dropout_rate > 0:
            drops = not nn.merge_param("deterministic", self.deterministic, deterministic)
        if drops and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        mask = read_mask(mask, self.local_window_size, is_causal, semantics)
        settings = CallSettings(
            semantics, dropout_rng if drops else None, sow_weights, self.implementation
        )
        functions = ModFunctions(score_mod, mask_mod)
        arguments = bias, mask, self.rotate, settings, input_positions, functions
        if self.decode:
            out, weights = self._decode(params, inputs, dtype, *arguments)
        else:
            out, weights = attend_layer(params, inputs, *arguments)
        returned: jax.Array = cast(out, self.dtype)
        if sow_weights:
            sow(self, weights)
        return returned

    @nn.nowrap  # type: ignore[untyped-decorator]
    def _semantics(self) -> Semantics:
        reject_hooks(nn.dot_product_attention, own_attention_fn, attention_fn=self.attention_fn)
        reject_hooks(
            jax.lax.dot_general,
            qkv_dot_general=self.qkv_dot_general,
            out_dot_general=self.out_dot_general,
        )
        reject_hooks(
            qkv_dot_general_cls=self.qkv_dot_general_cls,
            out_dot_general_cls=self.out_dot_general_cls,
            qk_attn_weights_einsum_cls=self.qk_attn_weights_einsum_cls,
            attn_weights_value_einsum_cls=self.attn_weights_value_einsum_cls,
        )
        return behaviour(
            self.semantics,
            dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout,
            precision=self.precision,
            normalize_qk=self.normalize_qk,
            force_fp32_for_softmax=self.force_fp32_for_softmax,
        )

    @nn.nowrap  # type: ignore[untyped-decorator]
    def _decode(
        self, params: MHAParams, inputs: Inputs, dtype: np.dtype[np.floating], *arguments: Any
    ) -> OutAndWeights:
        initialised = self.has_variable("cache", "cached_key")
        batch, S = inputs[1].shape[:-2], inputs[1].shape[-2]
        projections = (params.key, params.value)
        keys, values = (
            self.variable(
                "cache", name, jnp.zeros, (*batch, S, *projection.kernel.shape[1:]), dtype
            )
            for name, projection in zip(("cached_key", "cached_value"), projections, strict=True)
        )
        index = self.variable("cache", "cache_index", lambda: jnp.array(0, dtype=jnp.int32))
        if not initialised:  # the call that initialises the cache does not decode
            return attend_layer(params, inputs, *arguments)
        cached = keys.value, values.value, index.value
        out, weights, cached = attend_cached(params, inputs, cached, *arguments)
        keys.value, values.value, index.value = cached
        return out, weights

    def to_params(self, variables: Mapping[str, Any] | None = None) -> tuple[MHAParams, Semantics]:
        """Parameters and semantics, as `jaxmha.multi_head_attention` and the exporters take them.

        Args:
          variables: `{"params": ...}`, default the variables of a bound module.

        Raises:
          ValueError: there are no variables.

        Neither contains `rotate`, `local_window_size` and `dtype`.

        >>> layer = MultiHeadDotProductAttention(num_heads=2)
        >>> params, semantics = layer.to_params(layer.init(jax.random.key(0), jnp.ones((5, 6))))
        >>> params.query.kernel.shape
        (6, 2, 3)
        """
        if variables is None:
            variables = self.variables if self.scope is not None else {}
        if "params" not in variables:
            raise ValueError(
                "a linen module holds no parameters: pass variables with 'params', or bind it"
            )
        arrays = flatten_dict(meta.unbox(variables["params"]))
        params = from_leaves({leaf: arrays[path] for leaf, path in PATHS.items() if path in arrays})
        return params, self._semantics()

    @classmethod
    def from_params(
        cls, params: MHAParams, semantics: Semantics = Semantics(), **settings: Any
    ) -> tuple["MultiHeadDotProductAttention", dict[str, Any]]:
        """A module and its variables, with these parameters and semantics.

        `MultiHeadAttention.from_params(*jaxmha.converters.torch.from_module(m))` imports a layer.

        Args:
          params: of one layer.
          semantics: of that layer.
          settings: further attributes, such as `implementation`, `dtype`, `deterministic`;
            `dropout_rate` and `precision` take precedence over `semantics`.

        Returns:
          `(module, variables)`.

        Raises:
          ValueError: shapes do not fit each other or `semantics`.
          TypeError: float64 would be rounded because x64 is off.

        >>> from jaxmha import init_params
        >>> params = init_params(jax.random.key(0), num_heads=2, features=6)
        >>> layer, variables = MultiHeadDotProductAttention.from_params(params)
        >>> layer.apply(variables, jnp.ones((3, 5, 6))).shape
        (3, 5, 6)
        """
        reject_rounding(params=params)
        module = cls(**settings_of(params, semantics, settings))
        tree = {PATHS[leaf]: jnp.asarray(array) for leaf, array in leaves(params).items()}
        return module, {"params": unflatten_dict(tree)}


class MultiHeadAttention(MultiHeadDotProductAttention):
    """`MultiHeadDotProductAttention` by flax's other class name, which unnamed submodules take.

    >>> MultiHeadAttention(num_heads=2).init_with_output(
    ...     jax.random.key(0), jnp.ones((3, 5, 6)))[0].shape
    (3, 5, 6)
    """
