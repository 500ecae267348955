"""`explain` and `explain_layer`: the implementation of a call, and why others do not support it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax

from jaxmha import checks, notebook
from jaxmha.arrays import Array
from jaxmha.attention import dot_product_attention
from jaxmha.implementations import SupportQuery, platforms
from jaxmha.layer import multi_head_attention
from jaxmha.mask import Mask
from jaxmha.params import MHAParams

Shaped: TypeAlias = Array | jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Explanation:
    """Result of `explain`; `print` shows it as a table.

    Attributes:
      platform: platform of the call.
      chosen: the implementation that computes the call; None: none can.
      reasons: every candidate in order of preference, and why it cannot compute the call; None: it
        can.
      saved: candidates that were fastest in a benchmark of the same call on such a device.
      source: the benchmark: a file of `jaxmha bench --save`, or a table shipped with jaxmha.
    """

    platform: str
    chosen: str | None
    reasons: tuple[tuple[str, str | None], ...]
    saved: tuple[str, ...] = ()
    source: str = ""

    def rows(self) -> list[tuple[str, str]]:
        """Pairs of a candidate and `chosen`, `supported` (after the chosen one), or its reason.

        If a benchmark decided, the text after `chosen` names it.

        >>> Explanation("cpu", "blocked", (("blocked", None), ("reference", None))).rows()
        [('blocked', 'chosen'), ('reference', 'supported')]
        """
        decided = self.chosen in self.saved
        chosen = f"chosen: the fastest in {self.source}" if decided else "chosen"
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
    platform, kernels are probed as in the call itself, up to the chosen one; others, and all on a
    named platform, are assumed to work. No reason depends on the contents of arrays: values beyond
    3.4e38 / S overflow in all implementations but `reference` and `few_queries`.

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
    query_support = SupportQuery(implementation)
    return _asked(dot_product_attention, query_support, platform, arrays, options)


@dataclass(frozen=True)
class LayerExplanation:
    """Result of `explain_layer`; `print` shows it as two tables.

    Attributes:
      attention: the explanation of the attention of the heads.
      projections: the name of each projection, and why XLA computes it and not the native kernels
        of jaxmha-cpu; None: the native kernels compute it.
    """

    attention: Explanation
    projections: tuple[tuple[str, str | None], ...]

    def rows(self) -> list[tuple[str, str]]:
        """Pairs of a projection and `native`, or `XLA` with the reason.

        >>> attention = Explanation("gpu", "cudnn", (("cudnn", None),))
        >>> LayerExplanation(attention, (("out", "not on gpu"), ("query", None))).rows()
        [('out', 'XLA: not on gpu'), ('query', 'native')]
        """
        return [
            (name, f"XLA: {reason}" if reason else "native") for name, reason in self.projections
        ]

    def __str__(self) -> str:
        width = max(len(name) for name in ("projection", *dict(self.projections)))
        head = f"{'projection':<{width}}  on {self.attention.platform}"
        lines = [head, *(f"{name:<{width}}  {what}" for name, what in self.rows())]
        return "\n".join([str(self.attention), "", *lines])

    def _repr_html_(self) -> str:
        columns = ("projection", f"on {self.attention.platform}")
        return self.attention._repr_html_() + notebook.table("projections", columns, self.rows())


def explain_layer(
    params: MHAParams,
    query: Shaped,
    key: Shaped | None = None,
    value: Shaped | None = None,
    *,
    platform: str | None = None,
    implementation: str | Sequence[str] | None = None,
    **options: Any,
) -> LayerExplanation:
    """Explains what computes the attention and the projections of `multi_head_attention`.

    The call is not computed, so every array, also in `params`, may be a `jax.ShapeDtypeStruct`.

    Args:
      params: the parameters of the layer.
      query: `(*B, T, Dq)`.
      key: `(*B, S, Dk)`; None: the query.
      value: `(*B, S, Dv)`; None: the key.
      platform: as in `explain`.
      implementation: candidates, as in `multi_head_attention`.
      options: other keyword arguments of `multi_head_attention`.

    Raises:
      ValueError: a shape, a value, or the name of an implementation or platform does not fit.
      TypeError: a dtype or a keyword does not fit.

    >>> import jax
    >>> from jaxmha import MHAParams, Projection
    >>> kernel = jax.ShapeDtypeStruct((6, 2, 3), "float32")
    >>> params = MHAParams(*[Projection(kernel)] * 3)
    >>> x = jax.ShapeDtypeStruct((1, 5, 6), "float32")
    >>> print(explain_layer(params, x, implementation="blocked", platform="cpu"))
    implementation  on cpu
    blocked         chosen
    <BLANKLINE>
    projection  on cpu
    query       XLA: implementation is blocked
    key         XLA: implementation is blocked
    value       XLA: implementation is blocked
    """
    query_support = SupportQuery(implementation)
    arrays = {"params": params, "query": query, "key": key, "value": value}
    attention = _asked(multi_head_attention, query_support, platform, arrays, options)
    gated = ["gate"] * (params.gate is not None)
    names = ["query", "key", "value", *gated, *["out"] * (params.out is not None)]
    # Projections of sharded arrays record no reason in `matmuls`.
    reasons = query_support.matmuls or ["the arrays are sharded"] * len(names)
    return LayerExplanation(attention, tuple(zip(names, reasons, strict=True)))


def _asked(
    function: Callable[..., object],
    asked: SupportQuery,
    platform: str | None,
    arrays: dict[str, Any],
    options: dict[str, Any],
) -> Explanation:
    """Traces a call, which records its candidates in `asked`, and returns its explanation."""
    # Options that hold arrays or shapes are traced, and so are `arrays`; others are passed as static
    # values, so that the call refuses other values.
    traced = {name: x for name, x in arrays.items() if _all(x, lambda leaf: hasattr(leaf, "dtype"))}
    traced |= {name: x for name, x in options.items() if not _all(x, _is_static)}
    static = {name: x for name, x in (arrays | options).items() if name not in traced}
    checks.reject_rounding(**traced)  # eval_shape would round float64 unseen
    with platforms.lowering_for(platform) if platform is not None else nullcontext():
        jax.eval_shape(partial(function, **static, implementation=asked), **traced)
        device = platforms.current().device
    chosen = next((name for name, reason in asked.reasons if reason is None), None)
    return Explanation(device, chosen, tuple(asked.reasons), *asked.preference)


def _all(tree: object, holds: Callable[[object], bool]) -> bool:
    return all(map(holds, jax.tree.leaves(tree)))


def _is_static(leaf: object) -> bool:
    return not isinstance(leaf, jax.ShapeDtypeStruct | jax.Array)
