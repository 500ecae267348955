"""Where each family of models keeps its attention blocks: key maps as data.

Two layouts can have the same keys; the place of a block then says which one it is. `{i}` stands
for a number, a space separates alternatives, and any path may go before.
"""

import re
from typing import NamedTuple


class Family(NamedTuple):
    """Models whose blocks stand under the same prefix, in one layout."""

    name: str
    layout: str
    prefixes: str


FAMILIES: tuple[Family, ...] = (
    Family("BERT", "bert", "encoder.layer.{i}.attention encoder.layer.{i}.crossattention"),
    Family("ViT (transformers 4)", "vit", "encoder.layer.{i}.attention"),
    Family("ViT (transformers 5)", "llama", "layers.{i}.attention"),
    Family("timm", "timm", "blocks.{i}.attn"),
    Family("GPT-2", "gpt2", "h.{i}.attn"),
    Family("GPT-NeoX", "gpt-neox", "layers.{i}.attention"),
    Family("BLOOM", "gpt-neox", "h.{i}.self_attention"),
    Family("Llama", "llama", "layers.{i}.self_attn"),
    Family("T5", "t5", "block.{i}.layer.{i}.SelfAttention block.{i}.layer.{i}.EncDecAttention"),
    Family(
        "CLIP", "linear", "text_model.encoder.layers.{i}.self_attn "
        "vision_model.encoder.layers.{i}.self_attn"
    ),
    Family("BART, OPT", "linear", "layers.{i}.self_attn layers.{i}.encoder_attn"),
    Family("nn.Transformer", "torch", "layers.{i}.self_attn layers.{i}.multihead_attn"),
    Family("torchvision ViT", "torch", "encoder_layer_{i}.self_attention"),
    Family("Annotated Transformer", "annotated", "layers.{i}.self_attn layers.{i}.src_attn"),
    Family("Keras file", "keras-file", "multi_head_attention multi_head_attention_{i}"),
    Family("Keras file", "keras-gqa-file", "grouped_query_attention grouped_query_attention_{i}"),
    Family("Keras model", "keras", "multi_head_attention multi_head_attention_{i}"),
    Family("Keras model", "keras-gqa", "grouped_query_attention grouped_query_attention_{i}"),
    Family(
        "Flax linen", "flax", "MultiHeadDotProductAttention_{i} MultiHeadAttention_{i} "
        "SelfAttention_{i}"
    ),
    Family("Haiku", "haiku", "multi_head_attention multi_head_attention_{i}"),
)  # fmt: skip


def match(layout: str, prefix: str) -> tuple[str, str] | None:
    """The family of a layout whose pattern the end of a prefix has, and the pattern.

    >>> match("gpt2", "transformer.h.11.attn")
    ('GPT-2', 'h.{i}.attn')
    >>> match("gpt2", "my.attn")
    """
    path = prefix.replace("/", ".")
    for family in FAMILIES:
        if family.layout != layout:
            continue
        for pattern in family.prefixes.split():
            numbered = re.escape(pattern).replace(r"\{i\}", r"\d+")
            if re.search(rf"(^|\.){numbered}$", path):
                return family.name, pattern
    return None
