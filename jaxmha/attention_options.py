"""Types of the keyword arguments of `dot_product_attention`."""

from collections.abc import Sequence
from typing import TypedDict

from jaxtyping import Float, Integer, PRNGKeyArray

from jaxmha.arrays import Array, DTypeLike
from jaxmha.mod_arguments import MaskMod, ScoreMod
from jaxmha.semantics import FullyMasked, Precision


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
