"""`equinox.nn.MultiheadAttention` by jaxmha.

Change one line: `from jaxmha.equinox import MultiheadAttention`.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, PRNGKeyArray

from jaxmha.arrays import Array, DTypeLike, require_arrays
from jaxmha.attention import dot_product_attention
from jaxmha.attention_options import hashable, of_semantics
from jaxmha.checks import reject_rounding
from jaxmha.extras import needed
from jaxmha.integers import require_sizes
from jaxmha.mask import Mask
from jaxmha.mod_arguments import MaskMod, ScoreMod
from jaxmha.params import MHAParams, Projection, check, leaves
from jaxmha.semantics import Semantics
from jaxmha.unattended import zero_unattended

with needed("equinox"):
    import equinox

__all__ = ["MultiheadAttention"]

_Heads: TypeAlias = tuple[
    Float[jax.Array, "T N H"], Float[jax.Array, "S K H"], Float[jax.Array, "S K h"]
]
_LEAVES = {f"{name}.{part}" for name in MHAParams._fields[:4] for part in Projection._fields}
_PROJECTIONS = ("query_proj", "key_proj", "value_proj", "output_proj")


class MultiheadAttention(equinox.nn.MultiheadAttention):  # type: ignore[misc]
    """`equinox.nn.MultiheadAttention` by jaxmha: same arguments, attributes and weights.

    It is a subclass of equinox's layer, so that `equinox.tree_at`, `inference_mode` and saved
    leaves work unchanged. It computes the same function, with three differences: fully
    masked rows are 0 (the mean of the values, as in equinox, with `semantics=Semantics.equinox()`);
    half precision accumulates in float32; and dropout draws other weights from the same key.

    Args:
      num_heads: N.
      query_size: Dq.
      key_size, value_size, output_size: Dk, Dv and Do, default Dq.
      qk_size, vo_size: H and h, default Dq // N.
      use_query_bias, use_key_bias, use_value_bias, use_output_bias: give a projection a bias.
      dropout_p: the probability that a weight is dropped.
      inference: no dropout; the argument of the call takes precedence.
      dtype: of the parameters.
      key: a PRNG key for the parameters.
      num_kv_heads: K, default N; fewer are grouped-query attention.
      semantics: scale, soft cap, fully masked rows, precision, window and axes of dropout.
      implementation: as in `jaxmha.dot_product_attention`.

    Raises:
      ValueError: N is not a multiple of K, or `semantics` has a field that the module lacks.

    Source: equinox/nn/_attention.py of equinox 0.13.

    >>> from jaxmha import Mask
    >>> layer = MultiheadAttention(4, 12, num_kv_heads=2, key=jax.random.key(0))
    >>> x = jnp.ones((3, 5, 12))  # a batch: vmap, as for every layer of equinox
    >>> jax.vmap(lambda x: layer(x, x, x, Mask.causal()))(x).shape
    (3, 5, 12)
    """

    num_kv_heads: int = equinox.field(static=True)
    semantics: Semantics = equinox.field(static=True)
    implementation: str | tuple[str, ...] | None = equinox.field(static=True)

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: float = 0.0,
        inference: bool = False,
        dtype: DTypeLike | None = None,
        *,
        key: PRNGKeyArray,
        num_kv_heads: int | None = None,
        semantics: Semantics = Semantics(),
        implementation: str | Sequence[str] | None = None,
    ) -> None:
        K = num_heads if num_kv_heads is None else num_kv_heads
        require_sizes(num_heads=num_heads, num_kv_heads=K)
        if num_heads % K:
            raise ValueError(f"num_heads={num_heads} must be a multiple of num_kv_heads={K}")
        super().__init__(
            num_heads,
            query_size,
            key_size,
            value_size,
            output_size,
            qk_size,
            vo_size,
            use_query_bias,
            use_key_bias,
            use_value_bias,
            use_output_bias,
            dropout_p,
            inference,
            dtype,
            key=key,
        )
        if num_heads != K:
            for name, size, seed in (("key", self.qk_size, 1), ("value", self.vo_size, 2)):
                projection = equinox.nn.Linear(
                    getattr(self, f"{name}_size"),
                    K * size,
                    use_bias=getattr(self, f"use_{name}_bias"),
                    dtype=self.query_proj.weight.dtype,
                    key=jax.random.split(key, 4)[seed],
                )
                setattr(self, f"{name}_proj", projection)
        self.num_kv_heads = K
        of_semantics(semantics, "dropout_p is an argument; ")
        self.semantics = semantics
        self.implementation = hashable(implementation)

    def __call__(
        self,
        query: Float[Array, "T Dq"],
        key_: Float[Array, "S Dk"],
        value: Float[Array, "S Dv"],
        mask: Bool[Array, "..."] | Mask | None = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        deterministic: bool | None = None,
        process_heads: Callable[..., _Heads] | None = None,
        bias: Float[Array, "..."] | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
    ) -> Float[jax.Array, "T Do"]:
        """Attends from `query` to `key_` and `value`; for a batch, `jax.vmap` it.

        Args:
          query: `(T, Dq)`.
          key_: `(S, Dk)`.
          value: `(S, Dv)`.
          mask: Boolean `(T, S)` or `(N, T, S)`, True = attend, or shapes that broadcast to these;
            or a `jaxmha.Mask`. Features that it excludes may hold NaN, also for gradients, but
            values may not under `fully_masked="mean"`, which reads all of them.
          key: a PRNG key for dropout.
          inference: no dropout; None: the attribute `dropout.inference` decides.
          deterministic: deprecated in equinox; give `inference`.
          process_heads: maps projected queries, keys and values, `(T, N, H)`, `(S, K, H)` and
            `(S, K, h)`, to heads of the same shapes, such as rotated heads.
          bias: added to the logits, broadcastable to `(N, T, S)`.
          score_mod, mask_mod: score and mask functions, as in `jaxmha.dot_product_attention`; b is
            0, under `jax.vmap` too.

        Raises:
          ValueError: a shape does not fit.
          RuntimeError: dropout has no key.
        """
        if deterministic is not None:
            inference = deterministic
            warnings.warn(
                "MultiheadAttention()(deterministic=...) is deprecated in favour of "
                "MultiheadAttention()(inference=...)",
                stacklevel=2,
            )
        require_arrays(query=query, key_=key_, value=value)
        require_arrays(optional=True, bias=bias)
        if len(key_) != len(value):
            raise ValueError(
                f"key_ and value must have the same length S, got shapes {key_.shape} and "
                f"{value.shape}"
            )
        query, key_, value = zero_unattended(
            (query, key_, value),
            self.num_heads,
            bias,
            mask,
            self.semantics,
            mask_mod,
            keep_finite=process_heads is not None,
        )
        heads = (
            _split(self.query_proj, query, self.num_heads),
            _split(self.key_proj, key_, self.num_kv_heads),
            _split(self.value_proj, value, self.num_kv_heads),
        )
        if process_heads is not None:
            shapes = [x.shape for x in heads]
            heads = process_heads(*heads)
            if [x.shape for x in heads] != shapes:
                raise ValueError(
                    f"process_heads must not change the shape of the heads: {shapes} became "
                    f"{[x.shape for x in heads]}"
                )
        rate = self._dropout_rate(key, inference)
        out = dot_product_attention(
            *heads,
            bias,
            mask,
            **of_semantics(self.semantics),
            dropout_rate=rate,
            dropout_key=key if rate else None,
            score_mod=score_mod,
            mask_mod=mask_mod,
            implementation=self.implementation,
        )
        T, N, h = out.shape
        return jax.vmap(self.output_proj)(out.reshape(T, N * h))  # type: ignore[no-any-return]

    def _dropout_rate(self, key: PRNGKeyArray | None, inference: bool | None) -> float:
        """The dropout rate of a call: 0 at inference."""
        inference = self.dropout.inference if inference is None else inference
        if inference or self.dropout.p == 0:
            return 0.0
        if key is None:
            raise RuntimeError(
                "dropout needs a key: pass key=, or inference=True, or equinox.nn.inference_mode"
            )
        return self.dropout.p  # type: ignore[no-any-return]

    def to_params(self) -> tuple[MHAParams, Semantics]:
        """Parameters and semantics, as `jaxmha.multi_head_attention`, `prefill` and exporters take
        them.

        Raises:
          TypeError: a projection is not an `equinox.nn.Linear`, or overrides its `__call__`.

        >>> params, _ = MultiheadAttention(2, 6, key=jax.random.key(0)).to_params()
        >>> params.query.kernel.shape
        (6, 2, 3)
        """
        for name in _PROJECTIONS:
            _require_linear(getattr(self, name), name)
        return weights_of(self)

    @classmethod
    def from_params(
        cls,
        params: MHAParams,
        semantics: Semantics = Semantics(),
        *,
        inference: bool = False,
        implementation: str | Sequence[str] | None = None,
    ) -> "MultiheadAttention":
        """A module with these parameters and semantics.

        `MultiheadAttention.from_params(*jaxmha.converters.torch.from_module(m))` imports a layer.

        Raises:
          ValueError: shapes do not fit each other, or the module does not support a parameter or a
            field of `semantics`.
          TypeError: float64 would be rounded because x64 is off.

        >>> from jaxmha import init_params
        >>> params = init_params(jax.random.key(0), num_heads=2, features=6)
        >>> layer, x = MultiheadAttention.from_params(params), jnp.ones((5, 6))
        >>> layer(x, x, x).shape
        (5, 6)
        """
        sizes = check(params)
        reject_rounding(params=params)
        found = leaves(params)
        if params.out is None or not found.keys() <= _LEAVES:
            more = ", ".join(sorted(found.keys() - _LEAVES)) or "no output projection"
            raise ValueError(
                f"params: the module has query, key, value and output projections, and these have "
                f"{more}: use jaxmha.multi_head_attention, or a module of jaxmha.flax"
            )
        made: MultiheadAttention = equinox.filter_eval_shape(
            lambda: cls(
                sizes["N"],
                sizes["Dq"],
                sizes["Dk"],
                sizes["Dv"],
                sizes["Do"],
                sizes["H"],
                sizes["h"],
                use_query_bias="query.bias" in found,
                use_key_bias="key.bias" in found,
                use_value_bias="value.bias" in found,
                use_output_bias="out.bias" in found,
                dropout_p=semantics.dropout_rate,
                inference=inference,
                key=jax.random.key(0),
                num_kv_heads=sizes["K"],
                semantics=replace(semantics, dropout_rate=0.0),
                implementation=implementation,
            )
        )
        arrays: dict[str, jax.Array] = {}
        for field, name in zip(MHAParams._fields[:4], _PROJECTIONS, strict=True):
            kernel, bias = getattr(params, field)
            inputs = sizes["N"] * sizes["h"] if field == "out" else len(kernel)
            arrays[f"{name}.weight"] = jnp.asarray(kernel).reshape(inputs, -1).T
            if bias is not None:
                arrays[f"{name}.bias"] = jnp.asarray(bias).reshape(-1)
        return with_arrays(made, arrays)


def weights_of(module: MultiheadAttention) -> tuple[MHAParams, Semantics]:
    """Parameters and semantics, even if the module or a projection overrides `__call__`."""
    N, K, out = module.num_heads, module.num_kv_heads, module.output_proj
    params = MHAParams(
        _projection(module.query_proj, N),
        _projection(module.key_proj, K),
        _projection(module.value_proj, K),
        Projection(out.weight.T.reshape(N, module.vo_size, -1), out.bias),
    )
    return params, replace(module.semantics, dropout_rate=module.dropout.p)


M = TypeVar("M")


def with_arrays(module: M, arrays: Mapping[str, Array]) -> M:
    """Returns the module with `arrays` in place of its own of these names, such as `query_proj.weight`."""
    for key, array in arrays.items():
        layer, _, name = key.partition(".")
        module = equinox.tree_at(
            lambda m, at=(layer, name): getattr(getattr(m, at[0]), at[1]),
            module,
            jnp.asarray(array),
        )
    return module


def _split(linear: Callable[..., jax.Array], x: Array, heads: int) -> jax.Array:
    """Projects features and splits them into heads; `linear` may be any layer of one vector."""
    found = jax.vmap(linear)(x)
    return found.reshape(len(x), heads, found.shape[-1] // heads)  # -1 would fail if x has no rows


def _require_linear(layer: object, name: str) -> None:
    """Raises TypeError unless a projection is `equinox.nn.Linear` with its own `__call__`.

    Any other layer may compute something else than its weight and bias say.
    """
    linear = equinox.nn.Linear
    if not isinstance(layer, linear) or type(layer).__call__ is not linear.__call__:
        raise TypeError(
            f"{name} must be an equinox.nn.Linear, got {type(layer).__name__}, whose weights do not "
            "determine its output: merge it into an equinox.nn.Linear first"
        )


def _projection(linear: "equinox.nn.Linear", heads: int) -> Projection:
    weight, bias = linear.weight, linear.bias
    kernel = weight.T.reshape(weight.shape[1], heads, -1)
    return Projection(kernel, None if bias is None else bias.reshape(heads, -1))
