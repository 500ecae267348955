"""Lazy tensors of blocks of latent attention, in the form of the destination."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxmha.checkpoint import TensorInfo
from jaxmha.converters.discovery.latent_blocks import LatentBlock
from jaxmha.converters.layout import latent_forms
from jaxmha.converters.layout.arrays import NDArray
from jaxmha.converters.layout.latent_forms import FORMS, Held
from jaxmha.converters.migrate.lazy_tensors import Made, Parts


def made(
    block: LatentBlock, info: Mapping[str, Any], parts: Parts, to: str, prefix: str
) -> dict[str, Made]:
    """Returns the lazy tensors of a block in the form `to`.

    Raises ValueError if this form cannot hold the block.
    """
    if to not in FORMS:
        raise ValueError(
            f"layout {to} cannot hold latent attention: name {' or '.join(FORMS)}, or carry its "
            'tensors over, kind = "other"'
        )
    shapes = {key: tuple(info[name].shape) for key, name in block.keys.items()}
    of_leaf = latent_forms.leaf_shapes(block.held, shapes)
    found = {}
    for key, held in _target(to, of_leaf).items():
        present = [leaf for leaf in held.leaves if leaf in of_leaf]
        if not present:
            continue
        if len(present) < len(held.leaves):
            raise ValueError(f"{key} of layout {to} holds {' and '.join(held.leaves)} together")
        sources = dict.fromkeys(block.keys[block.leaves[leaf]] for leaf in held.leaves)
        dtypes = {np.dtype(info[name].dtype) for name in sources}
        if len(dtypes) > 1:
            raise ValueError(f"{key} packs arrays of one dtype, got several: cast them first")
        full = f"{prefix}.{key}" if prefix else key
        found[full] = Made(
            TensorInfo(held.shape([of_leaf[leaf] for leaf in held.leaves]), dtypes.pop()),
            partial(_load, block, held, parts),
            tuple(sources),
            f"{' + '.join(sources)} -> {' + '.join(held.leaves)}",
        )
    lost = of_leaf.keys() - {leaf for held in _target(to, of_leaf).values() for leaf in held.leaves}
    if lost:
        raise ValueError(f"layout {to} cannot hold {', '.join(sorted(lost))}")
    return found


def _target(to: str, of_leaf: Mapping[str, tuple[int, ...]]) -> dict[str, Held]:
    if to == "jaxmha":
        return latent_forms.own_keys()
    (L, N, H), h = of_leaf["key.kernel"], of_leaf["value.kernel"][-1]
    sizes = {"L": L, "N": N, "H": H, "h": h, "R": of_leaf["rotary_key.kernel"][-1]}
    low_rank = "query_latent.kernel" in of_leaf
    held = latent_forms.deepseek_keys(sizes, low_rank)
    return {key: one for key, one in held.items() if not (low_rank and key == "q_b_proj.bias")}


def _load(block: LatentBlock, held: Held, parts: Parts) -> NDArray:
    return held.join([_leaf(block, parts, leaf) for leaf in held.leaves])


def _leaf(block: LatentBlock, parts: Parts, leaf: str) -> NDArray:
    key = block.leaves[leaf]
    split = block.held[key].split
    return np.ascontiguousarray(parts.leaf(block.keys[key], leaf, lambda x: dict(split(x))))
