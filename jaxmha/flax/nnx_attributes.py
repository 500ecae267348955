"""Attributes of flax's nnx module, derived from the semantics and parameters of jaxmha's module."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jaxmha.flax.function import attention_fn as own_attention_fn
from jaxmha.flax.nnx_views import Views
from jaxmha.flax.settings import UseBias, shared_axes
from jaxmha.semantics import Precision, Semantics


class Attributes(Views):
    """Base class whose attributes read `semantics` and the projections; `dropout_rate`,
    `broadcast_dropout` and `precision` also set `semantics`."""

    semantics: Semantics

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("dropout_rate", "precision"):
            name, value = "semantics", replace(self.semantics, **{name: value})
        elif name == "broadcast_dropout":
            shared = shared_axes(value, self.semantics.dropout_broadcast)
            name, value = "semantics", replace(self.semantics, dropout_broadcast=shared)
        elif name in ("normalize_qk", "use_bias", "attention_fn"):
            raise AttributeError(f"{name} cannot change in a module: construct another")
        super().__setattr__(name, value)

    @property
    def dropout_rate(self) -> float:
        """The dropout rate of `semantics`; may be set."""
        return self.semantics.dropout_rate

    @property
    def broadcast_dropout(self) -> bool:
        """True if any axes share a dropout draw in `semantics`; may be set."""
        return bool(self.semantics.dropout_broadcast)

    @property
    def precision(self) -> Precision:
        """The precision of `semantics`; may be set."""
        return self.semantics.precision

    @property
    def normalize_qk(self) -> bool:
        """True if queries and keys are normalised."""
        return self.semantics.qk_norm is not None

    @property
    def use_bias(self) -> UseBias:
        """True or False if all projections agree; else the names of the projections with a bias."""
        layers = {"query": self.query, "key": self.key, "value": self.value, "out": self.out}
        has_bias = {
            name: layer.bias is not None for name, layer in layers.items() if layer is not None
        }
        if len(set(has_bias.values())) == 1:
            return has_bias["query"]
        return tuple(name for name, has in has_bias.items() if has)

    @property
    def attention_fn(self) -> Callable[..., Any]:
        """`jaxmha.flax.attention_fn`, which computes the attention of this module."""
        return own_attention_fn

    def _ensure_cache(self, batch: tuple[int, ...], length: int) -> None:
        if self.cached_key is None:
            self.init_cache((*batch, length, self.in_features), self.dtype)
