"""Keyword arguments of `dot_product_attention`: their types, and their values from `Semantics`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict

import jax
from jaxtyping import Float, Integer, PRNGKeyArray

from jaxmha import implementations
from jaxmha.arrays import Array, DTypeLike
from jaxmha.checks import require_type
from jaxmha.mod_arguments import MaskMod, ScoreMod
from jaxmha.semantics import FullyMasked, Precision, Semantics


class Options(TypedDict, total=False):
    """Arguments of `dot_product_attention` that do not change its return type."""

    scale: float | Float[Array, ""] | None
    is_causal: bool
    query_seq_lengths: Integer[Array, "*B"] | None
    key_value_seq_lengths: Integer[Array, "*B"] | None
    local_window_size: int | Sequence[int | None] | None
    segment_ids: (
        Integer[Array, "*B T"] | tuple[Integer[Array, "*B T"], Integer[Array, "*B S"]] | None
    )
    logits_soft_cap: float | None
    fully_masked: FullyMasked
    softmax_dtype: DTypeLike | None
    precision: Precision
    dropout_rate: float
    dropout_broadcast: tuple[str, ...]
    dropout_key: PRNGKeyArray | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    sinks: Float[Array, "N"] | None
    implementation: str | Sequence[str] | None


# Fields of `Semantics` that `dot_product_attention` has as arguments of the same names.
_FIELDS = (
    "scale",
    "logits_soft_cap",
    "fully_masked",
    "softmax_dtype",
    "precision",
    "dropout_broadcast",
    "local_window_size",
)


def of_semantics(semantics: Semantics, hint: str = "") -> dict[str, Any]:
    """Returns the arguments of `dot_product_attention` that express the semantics.

    Raises ValueError if a field outside `_FIELDS` is set; the message contains `hint`.
    """
    require_type(Semantics, semantics=semantics)
    found = {name: getattr(semantics, name) for name in _FIELDS}
    if replace(Semantics(), **found) != semantics:
        raise ValueError(
            f"semantics may set {', '.join(_FIELDS)} here, got {semantics}: {hint}for the rest "
            "use jaxmha.multi_head_attention, or a module of jaxmha.flax"
        )
    return found


def hashable(implementation: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """Converts a list of names to a tuple, so that it can be a static argument of jit. Raises
    ValueError for an unknown name."""
    if implementation is None or isinstance(implementation, implementations.SupportQuery):
        return implementation
    names: str | tuple[str, ...]
    if isinstance(implementation, str):
        names = implementation
    else:
        names = tuple(implementation if isinstance(implementation, Iterable) else [implementation])
    if names:
        implementations.known(names)
    return names


def retraced(jitted: Any, **static: Any) -> Callable[..., Any]:
    """Binds static arguments of a function of `jax.jit`; with a `SupportQuery` as `implementation`,
    every call traces it again.

    Such a trace belongs to a function of its own: JAX would keep the traces of `jitted`, one for
    each query, as long as the process lives.
    """
    if isinstance(static["implementation"], implementations.SupportQuery):
        return jax.jit(partial(jitted.__wrapped__, **static))
    return partial(jitted, **static)
