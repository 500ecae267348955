"""Which implementation a call gets, and why the others do not."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxmha.attention import dot_product_attention
from jaxmha.implementations import UnsupportedError, candidates


@dataclass(frozen=True)
class Explanation:
    """What `explain` found; `print` shows it as a table.

    Attributes:
      platform: of the call.
      chosen: the implementation that computes it; None: none can.
      reasons: every candidate in order of preference, and why it cannot; None: it can.
    """

    platform: str
    chosen: str | None
    reasons: tuple[tuple[str, str | None], ...]

    def __str__(self) -> str:
        width = max(len(name) for name in ("implementation", *dict(self.reasons)))
        lines = [f"{'implementation':<{width}}  on {self.platform}"]
        for name, reason in self.reasons:
            lines.append(f"{name:<{width}}  {reason or ('could', 'chosen')[name == self.chosen]}")
        return "\n".join(lines)


def explain(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    platform: str | None = None,
    implementation: str | Sequence[str] | None = None,
    **options: Any,
) -> Explanation:
    """Which implementation `dot_product_attention` picks for the same arguments.

    Nothing is computed, so every array may be a `jax.ShapeDtypeStruct`.

    Args:
      query: `(B, T, N, H)` or `(T, N, H)`.
      key: `(B, S, K, H)`.
      value: `(B, S, K, h)`.
      bias: as in `dot_product_attention`.
      mask: as in `dot_product_attention`.
      platform: `cpu`, `gpu` or `tpu`; None: JAX's default backend.
      implementation: candidates, as in `dot_product_attention`.
      options: its other keyword arguments.

    Raises:
      ValueError: a shape, a value or the name of an implementation does not fit.
      TypeError: a dtype or a keyword does not fit.

    >>> import jax
    >>> x = jax.ShapeDtypeStruct((1, 5, 2, 3), "float32")
    >>> print(explain(x, x, x, return_weights=True, implementation="blocked", platform="cpu"))
    implementation  on cpu
    blocked         weights are never materialised: return_weights must be False
    """
    platform = platform or jax.default_backend()
    arrays = {"query": query, "key": key, "value": value, "bias": bias, "mask": mask}
    # Options with shapes are traced, the others shape the program.
    traced = {
        name: x
        for name, x in options.items()
        if any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(x))
    }
    static = {name: x for name, x in options.items() if name not in traced}
    found: list[tuple[str, str | None]] = []
    for name in candidates(implementation, platform):
        try:
            call = partial(dot_product_attention, **static, implementation=name)
            jax.eval_shape(call, **arrays, **traced)
            found.append((name, None))
        except UnsupportedError as error:
            found.append((name, error.reasons[name]))
    chosen = next((name for name, reason in found if reason is None), None)
    return Explanation(platform, chosen, tuple(found))
