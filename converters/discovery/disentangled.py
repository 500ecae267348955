"""Reads the disentangled attention of DeBERTa: terms of content and relative position.

Source: He et al., "DeBERTa: Decoding-enhanced BERT with Disentangled Attention" (2021), and
`DisentangledSelfAttention` of transformers 5.23.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxmha import checkpoint
from jaxmha.arrays import Array
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.layout.arrays import NDArray, to_numpy

MODEL_TYPES = ("deberta", "deberta-v2", "sew-d")
KINDS = ("c2p", "p2c")
# Kind of term -> names of its projection of positions in DeBERTa and DeBERTa v2. c2p terms multiply
# queries by positions, p2c terms keys. `_SHARED`: kind -> name of the projection of contents, which
# models with share_att_key also use for positions.
_PROJECTIONS = {"c2p": ("pos_proj", "pos_key_proj"), "p2c": ("pos_q_proj", "pos_query_proj")}
_SHARED = {"c2p": "key_proj", "p2c": "query_proj"}


class Disentangled(NamedTuple):
    """A bias: products of queries with `keys`, and of keys with `queries`, scaled as the logits.

    `keys` and `queries` are projections of learned vectors, `2 span, N, H` each, for the distances
    from `-span` to `span - 1`; None: the model has no such term. `buckets` > 0: distances above
    `buckets / 2` have logarithmic buckets, up to the distance `most`.
    """

    keys: NDArray | None
    queries: NDArray | None
    scale: float
    buckets: int = 0
    most: int = 0

    def bias(self, T: int, S: int, query: Array | None = None, key: Array | None = None) -> NDArray:
        """The bias, `B N T S`; raises ValueError if `query` or `key` is None."""
        if query is None or key is None:
            raise ValueError("query and key are needed: the term has products with both")
        distance = np.arange(T)[:, None] + S - T - np.arange(S)
        if self.buckets:
            distance = _bucket(distance, self.buckets, self.most)
        found = np.zeros(())
        for table, content, form in (
            (self.keys, query, "btnh,tsnh->bnts"),
            (self.queries, key, "bsnh,tsnh->bnts"),
        ):
            if table is not None:
                near = np.clip(distance + len(table) // 2, 0, len(table) - 1)
                found = found + np.einsum(form, np.asarray(content), table[near])
        return np.asarray(found * self.scale)


def _bucket(distance: NDArray, buckets: int, most: int) -> NDArray:
    half = buckets // 2
    size = np.where(abs(distance) < half, half - 1, abs(distance)).astype(np.float32)
    far = np.log(size / half) / np.log(np.float32((most - 1) / half)) * (half - 1)
    rough = (np.ceil(far) + half) * np.sign(distance)
    return np.where(size <= half, distance, rough).astype(np.int64)


def kinds(own: Mapping[str, Any]) -> list[str]:
    """The position terms in `pos_att_type` of a configuration: a list, or a string with `|`.

    >>> kinds({"pos_att_type": "p2c|c2p"})
    ['c2p', 'p2c']
    """
    given = own.get("pos_att_type") or []
    given = given.lower().split("|") if isinstance(given, str) else given
    return [kind for kind in KINDS if kind in given]


def of(
    block: Block, own: Mapping[str, Any], heads: int | None, file: checkpoint.Checkpoint
) -> Disentangled | None:
    """The terms of a block; None if it attends by content alone.

    Raises ValueError or KeyError if a tensor or a setting is missing.
    """
    if own.get("relative_attention") is not True:
        return None
    if heads is None:
        raise ValueError("its head count is not known")
    root = block.prefix.rpartition("layer.")[0]
    vectors = to_numpy(file[f"{root}rel_embeddings.weight"]).astype(np.float64)
    if "layer_norm" in str(own.get("norm_rel_ebd", "none")).lower():
        weight, bias = (to_numpy(file[f"{root}LayerNorm.{x}"]) for x in ("weight", "bias"))
        vectors = vectors - vectors.mean(-1, keepdims=True)
        deviation = np.sqrt((vectors**2).mean(-1, keepdims=True) + float(own["layer_norm_eps"]))
        vectors = vectors / deviation * weight + bias
    most = own.get("max_relative_positions", -1)
    most = most if most >= 1 else own["max_position_embeddings"]
    buckets = max(own.get("position_buckets", -1), 0)
    vectors = vectors[: 2 * (buckets or most)]
    tables: dict[str, NDArray] = {}
    for kind in kinds(own):
        names = [_SHARED[kind]] if own.get("share_att_key") is True else [*_PROJECTIONS[kind]]
        paths = [
            path for x in names if (path := f"{block.prefix}.self.{x}") + ".weight" in file.info
        ]
        if not paths:
            raise ValueError(f"no tensor {names[-1]}.weight in the block")
        made = vectors @ to_numpy(file[f"{paths[0]}.weight"]).T
        if f"{paths[0]}.bias" in file.info:
            made = made + to_numpy(file[f"{paths[0]}.bias"])
        tables[kind] = made.reshape(len(made), heads, -1)
    width = int(own["hidden_size"]) // heads
    scale = (width * (1 + len(tables))) ** -0.5
    return Disentangled(tables.get("c2p"), tables.get("p2c"), scale, buckets, most)
