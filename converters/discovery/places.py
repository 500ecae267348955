"""Prefixes of blocks, and arrays next to them, that exclude a layout although its keys fit."""

import re
from collections.abc import Mapping, Sequence

from jaxmha.checkpoint.errors import printable
from jaxmha.converters.discovery import model_families
from jaxmha.converters.layout.base import Layout

Shapes = Mapping[str, Sequence[int]]
# Layouts that have the same keys as other layouts; they are read only at prefixes of their families.
OF_FAMILIES = ("timm-heads", "timm-heads-conv", "timm-nest", "x-transformers")
# Layouts that are found only at prefixes of their families, or if the user names them: elsewhere,
# arrays with these keys may be in another order.
NAMED = ("chatglm", "megatron")
_ACROSS = r"cross|x_attn|encoder_attn|perceiver"  # prefixes of cross-attention


def refuse_prefix(layout: Layout, prefix: str) -> None:
    """Raises ValueError if a layout is limited to certain prefixes, with the remedy.

    Call it if blocks of `layout` are not read back at `prefix`.
    """
    if layout.name in OF_FAMILIES:
        other = "linear-to" if layout.cyclic else "timm"
        raise ValueError(
            f"layout {layout.name} is read at prefixes of its own models alone, not at "
            f"{printable(prefix) or '(top)'}: name layout {other}"
        )
    if layout.name in NAMED:
        raise ValueError(
            f"layout {layout.name} is read at prefixes of its own models alone, not at "
            f"{printable(prefix) or '(top)'}, where its rows would be read in another order: name "
            "another layout, or give the blocks in a plan the prefixes of these models"
        )
    if layout.name == "llama-across" and not re.search(_ACROSS, prefix):
        raise ValueError(
            f"layout {layout.name} needs a name of cross-attention ({_ACROSS.replace('|', ', ')}), "
            f"not {printable(prefix) or '(top)'}: name layout llama, or rename the block"
        )


def allow(layout: Layout, prefix: str, keys: Mapping[str, str], shapes: Shapes) -> bool:
    """False if the prefix of a block, or the arrays next to it, exclude a layout whose keys fit.

    `llama` and `llama-across` have the same keys: `llama-across` is for prefixes of cross-attention
    whose queries and keys have different input widths; `llama` is for all others.
    """
    if layout.name in OF_FAMILIES and model_families.match(layout.name, prefix, shapes) is None:
        return False
    if layout.name == "timm-grouped":
        # Excluded: GCViT has the first table, and packs only keys and values; LeViT has the second,
        # and packs values that are wider than keys.
        tables = ("rel_pos.relative_position_bias_table", "attention_biases")
        return all(layout.path(prefix, table) not in shapes for table in tables)
    if layout.name == "timm":
        rows, features = shapes[keys["qkv.weight"]][-2:]
        wide, width = shapes[keys["proj.weight"]][-2:]
        # Excluded: GCViT packs only keys and values; Hiera pools the queries of a layer that widens.
        biases = layout.path(prefix, "attention_biases") in shapes
        return rows != 2 * width and features == wide and (rows == 3 * width or not biases)
    if layout.name not in ("llama", "llama-across") or not re.search(_ACROSS, prefix):
        return layout.name != "llama-across"
    queries, inputs = (shapes[keys[f"{x}_proj.weight"]][-1] for x in "qk")
    return layout.name != "llama" if queries != inputs else layout.name != "llama-across"
