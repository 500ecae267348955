"""Arrays next to projections that make attention a function other than softmax over keys.

A block with such an array is no block of a layout: its tensors are carried over, and named.
"""

import re
from collections.abc import Iterable

# Pattern of a key under the prefix of a block -> what the attention is.
FORMS: tuple[tuple[str, str], ...] = (
    (r"(^|[./])temperature$", "it attends over channels, or divides by a learned temperature"),
    (
        r"proj_[lw][./]|talking_heads|head_(logits|weights)_proj|(^|[./])reattn",
        "heads are mixed before or after the softmax",
    ),
    (r"(^|[./])(crpe|pos_enc)[./]", "convolutions of the values are added"),
    (r"(^|[./])pool_[qkv]([./]|$)|(^|[./])attention_pool", "queries, keys and values are pooled"),
    (r"(^|[./])(cpb_mlp|meta_mlp)[./]", "logits are scaled cosines, and a network gives a bias"),
    (r"(^|[./])to_v_gate[./]", "values are gated"),
    (r"(^|[./])per_dim_scale$", "a learned factor of every feature scales the queries"),
    (r"(^|[./])A_log$", "it is linear attention with a state that decays"),
)


def of(keys: Iterable[str]) -> str:
    """The form of the attention of a block with these keys; "" if no key shows another one.

    >>> of(["qkv.weight", "temperature"])
    'it attends over channels, or divides by a learned temperature'
    """
    keys = list(keys)
    return next((why for form, why in FORMS if any(re.search(form, key) for key in keys)), "")
