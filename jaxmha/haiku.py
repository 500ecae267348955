"""`haiku.MultiHeadAttention` by jaxmha.

Change one line: `from jaxmha.haiku import MultiHeadAttention`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxmha.arrays import Array, require_arrays
from jaxmha.attention import dot_product_attention
from jaxmha.attention_options import hashable, of_semantics
from jaxmha.checks import reject_additive
from jaxmha.extras import needed
from jaxmha.mask import Mask
from jaxmha.mod_arguments import MaskMod, ScoreMod
from jaxmha.semantics import Semantics
from jaxmha.unattended import zero_unattended

with needed("haiku"):
    import haiku

__all__ = ["MultiHeadAttention"]

Initializer = Callable[[Sequence[int], object], jax.Array]


class MultiHeadAttention(haiku.MultiHeadAttention):  # type: ignore[misc]
    """`haiku.MultiHeadAttention` by jaxmha: same arguments, parameters and names.

    It is a subclass of haiku's module. It computes the same function, with three differences: fully
    masked rows are 0 (the mean of the values, as in haiku, with
    `semantics=Semantics.haiku()`), half precision accumulates in float32, and known additive masks,
    which haiku inverts, are refused.

    Args:
      num_heads: N.
      key_size: H.
      w_init_scale: deprecated in haiku; give `w_init`.
      w_init: draws the kernels.
      with_bias: gives all four projections biases.
      b_init: draws the biases, which are 0 by default.
      value_size: h, default H.
      model_size: Do, default N * H.
      name: of the module.
      semantics: scale, soft cap, fully masked rows, dtype of the softmax, precision and window.
      implementation: as in `jaxmha.dot_product_attention`.

    Raises:
      ValueError: no kernels can be drawn, or `semantics` has a field that the module lacks.

    Source: haiku/_src/attention.py of dm-haiku 0.0.17.

    >>> from jaxmha import Mask
    >>> def layer(x):
    ...     attention = MultiHeadAttention(2, 3, w_init=haiku.initializers.VarianceScaling())
    ...     return attention(x, x, x, Mask.causal())
    >>> model, x = haiku.without_apply_rng(haiku.transform(layer)), jnp.ones((2, 5, 6))
    >>> model.apply(model.init(jax.random.key(0), x), x).shape
    (2, 5, 6)
    """

    def __init__(
        self,
        num_heads: int,
        key_size: int,
        w_init_scale: float | None = None,
        *,
        w_init: Initializer | None = None,
        with_bias: bool = True,
        b_init: Initializer | None = None,
        value_size: int | None = None,
        model_size: int | None = None,
        name: str | None = None,
        semantics: Semantics = Semantics(),
        implementation: str | Sequence[str] | None = None,
    ) -> None:
        super().__init__(
            num_heads,
            key_size,
            w_init_scale,
            w_init=w_init,
            with_bias=with_bias,
            b_init=b_init,
            value_size=value_size,
            model_size=model_size,
            name=name,
        )
        self._semantics, self._options = semantics, of_semantics(semantics)
        self.implementation = hashable(implementation)

    def __call__(
        self,
        query: Float[Array, "*B T Dq"],
        key: Float[Array, "*#B S Dk"],
        value: Float[Array, "*#B S Dv"],
        mask: Array | Mask | None = None,
        *,
        bias: Float[Array, "..."] | None = None,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
    ) -> Float[jax.Array, "*B T Do"]:
        """Attends from `query` to `key` and `value`, which may have any number of batch axes.

        Args:
          query: `(*B, T, Dq)`.
          key: `(*B, S, Dk)`, whose batch axes may be 1 or, from the left, missing.
          value: `(*B, S, Dv)`, likewise.
          mask: nonzero = attend; has the axes `(*B, N, T, S)`, each of full size or 1. Or a
            `jaxmha.Mask`, whose batch axis is all batch axes, flattened. Features that it excludes
            may hold NaN, also for gradients, but values may not under `fully_masked="mean"`, which
            reads all of them.
          bias: added to the logits; has the axes `(*B, N, T, S)`, each of full size or 1.
          score_mod, mask_mod: score and mask functions, as in `jaxmha.dot_product_attention`; b is
            the index into all batch axes, flattened.

        Raises:
          ValueError: a shape does not fit, or a mask looks additive.
        """
        require_arrays(query=query, key=key, value=value)
        batch = query.shape[:-2]
        sizes = {"query": self.key_size, "key": self.key_size, "value": self.value_size}
        for name, x in (("key", key), ("value", value)):
            _check_batch(name, x.shape[:-2], batch)
        if mask is not None and not isinstance(mask, Mask):
            reject_additive(mask)
            mask = _by_batch("mask", mask, batch).astype(bool)
        if bias is not None:
            bias = _by_batch("bias", bias, batch)
        features = zero_unattended(
            (query, key, value), self.num_heads, bias, mask, self._semantics, mask_mod
        )
        heads: dict[str, Any] = {}
        for (name, size), x in zip(sizes.items(), features, strict=True):
            projected = self._linear(self.num_heads * size, name)(x)
            projected = projected.reshape(*x.shape[:-1], self.num_heads, size)
            heads[name] = _in_batch(name, projected, batch)
        out = dot_product_attention(
            **heads,
            bias=bias,
            mask=mask,
            score_mod=score_mod,
            mask_mod=mask_mod,
            implementation=self.implementation,
            **self._options,
        )
        out = out.reshape(*query.shape[:-1], self.num_heads * self.value_size)
        return self._linear(self.model_size)(out)  # type: ignore[no-any-return]

    @haiku.transparent  # type: ignore[untyped-decorator]
    def _linear(self, size: int, name: str | None = None) -> Callable[[Array], jax.Array]:
        return haiku.Linear(  # type: ignore[no-any-return]
            size, w_init=self.w_init, with_bias=self.with_bias, b_init=self.b_init, name=name
        )


def _in_batch(name: str, array: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """Broadcasts the axes before the last three to the batch axes of the query, and merges them into
    one axis; without batch axes, no axis is added."""
    lead, own = array.shape[:-3], array.shape[-3:]
    _check_batch(name, lead, batch)
    one = (math.prod(batch),) if batch else ()
    return jnp.broadcast_to(array, (*batch, *own)).reshape(*one, *own)


def _check_batch(name: str, lead: tuple[int, ...], batch: tuple[int, ...]) -> None:
    """Raises ValueError if the batch axes of an input do not broadcast to those of the query."""
    pairs = zip(reversed(lead), reversed(batch), strict=False)
    if len(lead) > len(batch) or any(size not in (1, full) for size, full in pairs):
        raise ValueError(
            f"{name}: expected batch axes that broadcast to *B={batch} of query, got {lead}: "
            "every batch axis must be in query; those of the others may be 1 or missing"
        )


def _by_batch(name: str, array: Array, batch: tuple[int, ...]) -> jax.Array:
    """Merges the batch axes of a mask or a bias into one; ValueError for another number of axes."""
    require_arrays(optional=False, **{name: array})
    if array.ndim != len(batch) + 3:
        raise ValueError(
            f"{name} must have the {len(batch) + 3} axes of the logits, {(*batch, 'N', 'T', 'S')}, "
            f"each of full size or 1, got shape {array.shape}: insert axes of size 1"
        )
    array = jnp.asarray(array)
    return array if len(batch) < 2 else _in_batch(name, array, batch)
