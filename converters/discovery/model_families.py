"""Prefixes of the attention blocks of each family of models.

If two layouts have the same keys, the prefix of a block decides between them. A pattern matches the
end of a prefix: `{i}` stands for a number, and spaces separate alternatives.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

Shapes = Mapping[str, Sequence[int]]


class Family(NamedTuple):
    """Models whose blocks have the same prefix and layout.

    `recognises` distinguishes the family from others with the same prefix; its arguments are the
    prefix and the shapes of all tensors. `refused` is the reason why the layout misreads the
    family's blocks, with the remedy; "" if it reads them correctly.
    """

    name: str
    layout: str
    prefixes: str
    recognises: Callable[[str, Shapes], bool] = lambda prefix, shapes: True
    refused: str = ""


def _normalised_twice(prefix: str, shapes: Shapes) -> bool:
    """True if sublayers have a norm before and after, as in Gemma 2; Llama has only the first."""
    return f"{prefix.rpartition('.')[0]}.pre_feedforward_layernorm.weight" in shapes


def _unevenly_packed(prefix: str, shapes: Shapes) -> bool:
    """True if the packed rows hold fewer key and value heads than query heads."""
    rows, (_, queries) = (
        shapes[f"{prefix}.{name}.weight"][-2:] for name in ("query_key_value", "dense")
    )
    return rows[0] != 3 * queries


def _grouped(prefix: str, shapes: Shapes) -> bool:
    """True if there are fewer key heads than query heads."""
    keys, queries = (shapes[f"{prefix}.to_{x}.weight"][-2] for x in "kq")
    return keys != queries


def _without_planes(prefix: str, shapes: Shapes) -> bool:
    """True if a block of timm has a position table of two axes, or a network that computes it.

    Blocks with a table of three axes hold TensorFlow's weights, and pack all queries before all keys.
    """
    table = shapes.get(f"{prefix}.rel_pos.relative_position_bias_table", ())
    return len(table) == 2 or f"{prefix}.rel_pos.mlp.fc1.weight" in shapes


FAMILIES: tuple[Family, ...] = (
    Family(
        "MaxViT of timm", "timm-heads",
        "blocks.{i}.attn_block.attn blocks.{i}.attn_grid.attn", _without_planes,
    ),
    Family(
        "TinyViT of timm", "timm-heads", "stages.{i}.blocks.{i}.attn",
        lambda prefix, shapes: f"{prefix}.attention_biases" in shapes,
    ),
    Family("CoAtNet of timm", "timm-heads-conv", "stages.{i}.blocks.{i}.attn", _without_planes),
    Family("NesT of timm", "timm-nest", "levels.{i}.transformer_encoder.{i}.attn"),
    Family("x-transformers", "x-transformers", "attn_layers.layers.{i}.{i}", _grouped),
    Family(
        "Gemma 2", "llama", "layers.{i}.self_attn", _normalised_twice,
        "its scale (query_pre_attn_scalar ** -0.5) and soft cap (attn_logit_softcapping) are in "
        "config.json and in no array: take its arrays by linear.import_params(layout='llama') and "
        "give multi_head_attention Semantics(scale=, logits_soft_cap=)",
    ),
    Family("Falcon", "falcon", "h.{i}.self_attention", _unevenly_packed),
    Family("ChatGLM", "chatglm", "transformer.encoder.layers.{i}.self_attention", _unevenly_packed),
    Family("Megatron-Core", "megatron", "decoder.layers.{i}.self_attention"),
    Family("StarCoder", "starcoder", "h.{i}.attn"),
    Family("Phi-3", "phi3", "layers.{i}.self_attn"),
    Family("BERT", "bert", "encoder.layer.{i}.attention encoder.layer.{i}.crossattention"),
    Family("LXMERT", "lxmert", "x_layers.{i}.visual_attention"),
    Family("DeBERTa", "deberta-1", "encoder.layer.{i}.attention"),
    Family("ALBERT", "linear-query", "albert_layers.{i}.attention encoder.layer.{i}.attention"),
    Family("SegFormer, PVT", "bert", "block.{i}.{i}.attention"),
    Family("PVT v2", "linear-query-proj", "layers.{i}.blocks.{i}.attention"),
    Family("Swin", "bert", "layers.{i}.blocks.{i}.attention"),
    Family(
        "Perceiver", "bert",
        "self_attends.{i}.attention cross_attention.attention decoding_cross_attention.attention",
    ),
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
    Family("Whisper", "whisper", "layers.{i}.self_attn layers.{i}.encoder_attn"),
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


_NAMES = frozenset(family.name for family in FAMILIES)


def stands(names: Collection[str], prefix: str) -> bool:
    """True if one of the named families has blocks at this prefix, in any layout.

    >>> stands(["GPT-2"], "transformer.h.3.attn"), stands(["BERT"], "layers.0.self_attn")
    (True, False)
    """
    path = prefix.replace("/", ".")
    return any(
        _fits(pattern, path)
        for family in FAMILIES
        if family.name in names
        for pattern in family.prefixes.split()
    )


def stands_any(prefix: str) -> bool:
    """True if any known family has blocks at this prefix, in any layout.

    >>> stands_any("encoder.layer.3.attention"), stands_any("my_layer")
    (True, False)
    """
    return stands(_NAMES, prefix)


def match(layout: str, prefix: str, shapes: Shapes) -> tuple[Family, str] | None:
    """The first family of a layout that matches a prefix, and the pattern; None if none matches.

    >>> family, pattern = match("gpt2", "transformer.h.11.attn", {})
    >>> family.name, pattern
    ('GPT-2', 'h.{i}.attn')
    >>> match("gpt2", "my.attn", {})
    """
    path = prefix.replace("/", ".")
    for family in FAMILIES:
        if family.layout != layout:
            continue
        for pattern in family.prefixes.split():
            if _fits(pattern, path) and family.recognises(prefix, shapes):
                return family, pattern
    return None


def _fits(pattern: str, path: str) -> bool:
    numbered = re.escape(pattern).replace(r"\{i\}", r"\d+")
    return re.search(rf"(^|\.){numbered}$", path) is not None
