"""`explain`: the implementation that a call selects, and the reasons against the others."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax

from jaxmha import notebook
from jaxmha.arrays import Array
from jaxmha.attention import dot_product_attention
from jaxmha.implementations import SupportQuery, platforms
from jaxmha.mask import Mask

Shaped: TypeAlias = Array | jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Explanation:
    """Result of `explain`; `print` shows it as a table.

    Attributes:
      platform: platform of the call.
      chosen: the implementation that computes the call; None: none can.
      reasons: every candidate in order of preference, and why it cannot compute the call; None: it
        can.
      saved: candidates that a benchmark of this very call found fastest here (`jaxmha bench --save`).
    """

    platform: str
    chosen: str | None
    reasons: tuple[tuple[str, str | None], ...]
    saved: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, str]]:
        """Pairs of a candidate and `chosen`, `supported` (but not chosen), or its reason.

        `chosen` says so where a saved benchmark decided.

        >>> Explanation("cpu", "blocked", (("blocked", None), ("reference", None))).rows()
        [('blocked', 'chosen'), ('reference', 'supported')]
        """
        chosen = (
            "chosen: the fastest in a saved benchmark" if self.chosen in self.saved else "chosen"
        )
        return [
            (name, reason or (chosen if name == self.chosen else "supported"))
            for name, reason in self.reasons
        ]

    def __str__(self) -> str:
        width = max(len(name) for name in ("implementation", *dict(self.reasons)))
        lines = [f"{'implementation':<{width}}  on {self.platform}"]
        return "\n".join([*lines, *(f"{name:<{width}}  {what}" for name, what in self.rows())])

    def _repr_html_(self) -> str:
        columns = ("implementation", f"on {self.platform}")
        return notebook.table(f"chosen: {self.chosen or 'none'}", columns, self.rows())


def explain(
    query: Shaped,
    key: Shaped,
    value: Shaped,
    bias: Shaped | None = None,
    mask: Shaped | Mask | None = None,
    *,
    platform: str | None = None,
    implementation: str | Sequence[str] | None = None,
    **options: Any,
) -> Explanation:
    """Explains which implementation `dot_product_attention` selects for the same arguments.

    The call is not computed, so every array may be a `jax.ShapeDtypeStruct`. On the current
    platform, kernels are probed as in the call itself; on a named platform, their libraries are
    assumed to work.

    Args:
      query: `(B, T, N, H)` or `(T, N, H)`.
      key: `(B, S, K, H)`.
      value: `(B, S, K, h)`.
      bias: as in `dot_product_attention`.
      mask: as in `dot_product_attention`.
      platform: `cpu`, `gpu`, `tpu`, or a device such as `h200`; None: JAX's default backend.
      implementation: candidates, as in `dot_product_attention`.
      options: other keyword arguments of `dot_product_attention`.

    Raises:
      ValueError: a shape, a value, or the name of an implementation or platform does not fit.
      TypeError: a dtype or a keyword does not fit.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((1, 5, 2, 3), "float32")
    >>> print(explain(x, x, x, return_weights=True, implementation="blocked", platform="cpu"))
    implementation  on cpu
    blocked         weights are never materialised: return_weights must be False
    >>> half = jax.ShapeDtypeStruct((1, 8192, 16, 128), "bfloat16")
    >>> explain(half, half, half, is_causal=True, platform="h200").chosen
    'cudnn'
    """
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    # Options that hold arrays or shapes are traced; the others are passed as static values.
    traced = {
        name: x
        for name, x in options.items()
        if any(isinstance(leaf, jax.ShapeDtypeStruct | jax.Array) for leaf in jax.tree.leaves(x))
    }
    static = {name: x for name, x in options.items() if name not in traced}
    query_support = SupportQuery(implementation)
    with platforms.lowering_for(platform) if platform is not None else nullcontext():
        call = partial(dot_product_attention, **static, implementation=query_support)
        jax.eval_shape(call, **arrays, **traced)
        device = platforms.current().device
    chosen = next((name for name, reason in query_support.reasons if reason is None), None)
    return Explanation(device, chosen, tuple(query_support.reasons), query_support.faster)
