"""Multi-head attention as a `flax.nnx` module."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from jaxtyping import Float, Int

from jaxmha.arrays import Array, DTypeLike
from jaxmha.attention_options import hashable
from jaxmha.checks import floating_dtype, reject_rounding
from jaxmha.flax.cached import attend_cached
from jaxmha.flax.cached_steps import CachedSteps
from jaxmha.flax.function import attention_fn as own_attention_fn
from jaxmha.flax.function import sow
from jaxmha.flax.heads import CallSettings, Implementation, attend_layer
from jaxmha.flax.nnx_attributes import Attributes
from jaxmha.flax.nnx_dropout import dropout_key
from jaxmha.flax.nnx_parameters import declare, params_of, variable, with_given
from jaxmha.flax.nnx_views import cache_dtype
from jaxmha.flax.parameters import Initializer, extra_shapes, scale_init
from jaxmha.flax.settings import (
    UseBias,
    Window,
    as_tuple,
    behaviour,
    cast,
    head_sizes,
    input_sizes,
    read_inputs,
    read_mask,
    reject_hooks,
    reject_known,
    reject_shardings,
    settings_of,
)
from jaxmha.mask import Mask
from jaxmha.mod_arguments import MaskMod, ModFunctions, ScoreMod
from jaxmha.params import MHAParams, check, leaves
from jaxmha.rotary import Rotate
from jaxmha.semantics import Precision, Semantics

Metadata = Mapping[str, Any]
_NONE: Metadata = MappingProxyType({})


class MultiHeadAttention(CachedSteps, Attributes):
    """`flax.nnx.MultiHeadAttention` by jaxmha: same arguments, names and shapes.

    Its state equals flax's, so that checkpoints load unchanged, both ways. It computes what flax
    computes, with [these differences](../how_to/flax.md#differences-from-flax); above all, fully
    masked rows are 0 (the mean of the values, as in flax, with `semantics=Semantics.flax()`).

    The attributes `dropout_rate`, `broadcast_dropout` and `precision` read and set `semantics`;
    `use_bias`, `normalize_qk` and `attention_fn` are read-only.

    Args:
      num_heads: N.
      in_features: Dq.
      qkv_features: N * H, default Dq.
      out_features: Do, default Dq.
      num_kv_heads: K, default N; fewer are grouped-query attention.
      in_kv_features: Dk and Dv, or the pair of both; default Dq.
      dtype: of the computation; None: the promoted dtype of inputs and parameters.
      param_dtype: of the parameters.
      broadcast_dropout: batch rows and heads share a draw; None: as in `semantics` if it is given,
        else True. False: no axis shares a draw, even if `semantics` names some.
      dropout_rate: of the weights.
      deterministic: no dropout; the argument of the call takes precedence.
      precision: of matmuls.
      kernel_init, out_kernel_init, bias_init, out_bias_init: as in flax.
      use_bias: for all four projections, or the names of the projections that have one.
      attention_fn: must be left out, or be flax's or jaxmha's own.
      decode: appends keys and values to a cache (`init_cache`); the argument of the call takes
        precedence.
      normalize_qk: normalises queries and keys, with scales in `query_ln` and `key_ln`.
      qkv_promote_dtype to out_dot_general_cls: hooks of flax that must be left out.
      rngs: streams for parameters and dropout.
      keep_rngs: keeps a stream for dropout in the module.
      kernel_metadata to key_ln_scale_metadata: metadata of the parameters, such as sharding.
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

    Source: flax/nnx/nn/attention.py of flax 0.12.

    >>> from jaxmha import Mask
    >>> layer = MultiHeadAttention(4, 6, qkv_features=12, num_kv_heads=2, rngs=nnx.Rngs(0))
    >>> layer(jnp.ones((3, 5, 6)), mask=Mask.causal()).shape
    (3, 5, 6)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | tuple[int, int] | None = None,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        broadcast_dropout: bool | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: Precision = None,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = nnx.initializers.zeros_init(),
        out_bias_init: Initializer | None = None,
        use_bias: UseBias = True,
        attention_fn: Callable[..., Any] | None = None,
        decode: bool | None = None,
        normalize_qk: bool = False,
        qkv_promote_dtype: Any = None,
        out_promote_dtype: Any = None,
        ln_promote_dtype: Any = None,
        qkv_dot_general: Any = None,
        out_dot_general: Any = None,
        qkv_dot_general_cls: Any = None,
        out_dot_general_cls: Any = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Metadata = _NONE,
        out_kernel_metadata: Metadata = _NONE,
        bias_metadata: Metadata = _NONE,
        out_bias_metadata: Metadata = _NONE,
        query_ln_scale_metadata: Metadata = _NONE,
        key_ln_scale_metadata: Metadata = _NONE,
        value_head_dim: int | None = None,
        use_out: bool = True,
        use_bias_kv: bool = False,
        extra_params: Sequence[str] = (),
        semantics: Semantics | None = None,
        local_window_size: Window = None,
        rotate: Rotate | None = None,
        implementation: Implementation = None,
    ) -> None:
        reject_hooks(nnx.dot_product_attention, own_attention_fn, attention_fn=attention_fn)
        reject_hooks(
            jax.lax.dot_general, qkv_dot_general=qkv_dot_general, out_dot_general=out_dot_general
        )
        reject_hooks(
            dtypes.promote_dtype,
            qkv_promote_dtype=qkv_promote_dtype,
            out_promote_dtype=out_promote_dtype,
            ln_promote_dtype=ln_promote_dtype,
            qkv_dot_general_cls=qkv_dot_general_cls,
            out_dot_general_cls=out_dot_general_cls,
        )
        self.semantics = behaviour(
            semantics,
            dropout_rate=dropout_rate,
            broadcast_dropout=broadcast_dropout,
            precision=precision,
            normalize_qk=normalize_qk,
        )
        kv = in_features if in_kv_features is None else as_tuple(in_kv_features)
        Dk, Dv = input_sizes(in_features, kv, out_features)
        features = in_features if qkv_features is None else qkv_features
        K, H, h = head_sizes(num_heads, features, num_kv_heads, value_head_dim)
        self.num_heads, self.num_kv_heads = num_heads, K
        self.head_dim, self.value_head_dim = H, h
        self.in_features, self.in_kv_features, self.qkv_features = in_features, kv, features
        self.out_features = in_features if out_features is None else out_features
        self.dtype, self.param_dtype = dtype, param_dtype
        self.deterministic, self.decode = deterministic, decode
        self.local_window_size, self.rotate = as_tuple(local_window_size), rotate
        self.implementation = hashable(implementation)

        common = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        heads = common | {
            "precision": self.precision,
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "kernel_metadata": kernel_metadata,
            "bias_metadata": bias_metadata,
        }
        out = with_given(
            heads,
            kernel_init=out_kernel_init,
            bias_init=out_bias_init,
            kernel_metadata=out_kernel_metadata,
            bias_metadata=out_bias_metadata,
        )
        common["scale_init"] = scale_init(self.semantics.qk_norm_offset)
        norms = {
            "query_ln": common | {"scale_metadata": query_ln_scale_metadata},
            "key_ln": common | {"scale_metadata": key_ln_scale_metadata},
        }
        sizes = {
            "Dq": in_features, "Dk": Dk, "Dv": Dv, "Do": self.out_features,
            "N": num_heads, "K": K, "H": H, "h": h,
        }  # fmt: skip
        learned = self.normalize_qk and self.semantics.qk_norm_learned
        chosen = heads, out if use_out else None, norms if learned else {}
        declared = declare(
            sizes,
            *chosen,
            use_bias=as_tuple(use_bias),
            use_bias_kv=use_bias_kv,
            extra=extra_shapes(as_tuple(extra_params), sizes, norms=learned),
        )
        for name, held in declared.items():
            setattr(self, name, held)
        keeps = keep_rngs and self.dropout_rate > 0
        self.rngs = rngs.dropout.fork() if keeps else None
        self.cached_key = nnx.data(None)
        self.cached_value = nnx.data(None)
        self.cache_index = nnx.data(None)

    def __call__(
        self,
        inputs_q: Float[Array, "*B T Dq"],
        inputs_k: Float[Array, "*B S Dk"] | None = None,
        inputs_v: Float[Array, "*B S Dv"] | None = None,
        *,
        mask: Array | Mask | None = None,
        bias: Float[Array, "..."] | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: Int[Array, "..."] | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
    ) -> Float[jax.Array, "*B T Do"]:
        """Attends from `inputs_q` to `inputs_k`.

        Args:
          inputs_q: `(*B, T, Dq)`.
          inputs_k: `(*B, S, Dk)`, default `inputs_q`.
          inputs_v: `(*B, S, Dv)`, default `inputs_k`.
          mask: broadcastable to `(*B, N, T, S)`, nonzero entries attend; or a `jaxmha.Mask`.
          bias: added to the logits, broadcastable to `(*B, N, T, S)`.
          deterministic: no dropout.
          rngs: `Rngs` or a stream for dropout, instead of the module's own.
          sow_weights: sows the weights before dropout as `attention_weights`.
          decode: appends to the cache of `init_cache`, and attends to all tokens in it.
          is_causal: query i attends keys j <= i.
          out_sharding, qkv_sharding: must be left out.
          input_positions: `(*B, T)` of queries and keys for `rotate`, default their positions in
            the cache, or 0, 1, ...
          score_mod, mask_mod: score and mask functions, as in `jaxmha.multi_head_attention`; with
            decode, i and j are the slots of the cache.

        Returns:
          `(*B, T, Do)`, in `dtype` if it is given.

        Raises:
          ValueError: a shape does not fit, dropout has no rngs, or decoding has no cache.
          TypeError: a submodule was replaced by one of another type.
        """
        reject_shardings(out_sharding=out_sharding, qkv_sharding=qkv_sharding)
        inputs = read_inputs(inputs_q, inputs_k, inputs_v, self.dtype)
        params = cast(params_of(self), self.dtype)
        mask = read_mask(mask, self.local_window_size, is_causal, self.semantics)
        key = dropout_key(self, deterministic, rngs)
        settings = CallSettings(self.semantics, key, sow_weights, self.implementation)
        functions = ModFunctions(score_mod, mask_mod)
        arguments = bias, mask, self.rotate, settings, input_positions, functions
        if self.decode if decode is None else decode:
            if self.cached_key is None:
                raise ValueError("there is no cache to decode with: call init_cache first")
            cached = tuple(x[...] for x in (self.cached_key, self.cached_value, self.cache_index))
            out, weights, cached = attend_cached(params, inputs, cached, *arguments)
            self.cached_key[...], self.cached_value[...], self.cache_index[...] = cached
        else:
            out, weights = attend_layer(params, inputs, *arguments)
        if sow_weights:
            sow(self, weights)
        return out

    def init_cache(self, input_shape: tuple[int, ...], dtype: DTypeLike | None = None) -> None:
        """Makes an empty cache for the keys and values of inputs `(*B, S, Dq)`, replacing any
        other; `dtype` defaults to float32, or float64 if the module's `dtype` or parameters are.

        >>> layer = MultiHeadAttention(2, 6, decode=True, rngs=nnx.Rngs(0))
        >>> layer.init_cache((3, 5, 6))
        >>> layer(jnp.ones((3, 1, 6))).shape, int(layer.cache_index[...])
        ((3, 1, 6), 1)
        """
        shape = (*input_shape[:-1], self.num_kv_heads)
        held = floating_dtype(cache_dtype(self) if dtype is None else dtype)
        self.cached_key = nnx.Cache(jnp.zeros((*shape, self.head_dim), held))
        self.cached_value = nnx.Cache(jnp.zeros((*shape, self.value_head_dim), held))
        self.cache_index = nnx.Cache(jnp.array(0, dtype=jnp.int32))

    def to_params(self) -> tuple[MHAParams, Semantics]:
        """Parameters and semantics, as `jaxmha.multi_head_attention` and the exporters take them.

        Neither contains `rotate`, `local_window_size` and `dtype`.

        >>> MultiHeadAttention(2, 6, rngs=nnx.Rngs(0)).to_params()[0].query.kernel.shape
        (6, 2, 3)
        """
        return params_of(self), self.semantics

    @classmethod
    def from_params(
        cls,
        params: MHAParams,
        semantics: Semantics = Semantics(),
        *,
        rngs: nnx.Rngs | None = None,
        **settings: Any,
    ) -> "MultiHeadAttention":
        """A module with these parameters and semantics.

        `MultiHeadAttention.from_params(*jaxmha.converters.torch.from_module(m))` imports a layer.

        Args:
          params: of one layer.
          semantics: of that layer.
          rngs: for dropout; without them, calls with dropout need rngs.
          settings: further arguments, such as `implementation`, `dtype`, `deterministic`;
            `dropout_rate` and `precision` take precedence over `semantics`.

        Returns:
          The module.

        Raises:
          ValueError: shapes do not fit each other or `semantics`.
          TypeError: float64 would be rounded because x64 is off.

        >>> import jax
        >>> from jaxmha import init_params
        >>> params = init_params(jax.random.key(0), num_heads=2, features=6)
        >>> MultiHeadAttention.from_params(params)(jnp.ones((3, 5, 6))).shape
        (3, 5, 6)
        """
        reject_rounding(params=params)
        reject_known(settings, "in_features", "in_kv_features", "kernel_init")
        known = settings_of(params, semantics, settings)
        sizes = check(params)
        module = cls(
            in_features=sizes["Dq"],
            in_kv_features=(sizes["Dk"], sizes["Dv"]),
            rngs=nnx.Rngs(0) if rngs is None else rngs,
            kernel_init=nnx.initializers.zeros_init(),
            **{"keep_rngs": rngs is not None, **known},
        )
        for leaf, array in leaves(params).items():
            held = variable(module, leaf)
            assert held is not None
            held.set_value(jnp.asarray(array))
        return module
