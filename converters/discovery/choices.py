"""Layouts that a config.json chooses; without it, the arrays would be read as another layout."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmha.converters.discovery import described, hf_config
from jaxmha.converters.discovery.attention_blocks import Block, named


class _Choice(NamedTuple):
    """The layout of a model type whose configuration has `key` with `value`.

    `place` is a pattern of the prefixes of its blocks, since other parts of the model may have the
    same arrays.
    """

    model_type: str
    key: str
    value: bool
    found: str  # the layout that the arrays have without a configuration
    layout: str
    place: str = ""


_CHOICES = (
    _Choice(
        "chatglm",
        "multi_query_attention",
        True,
        "falcon",
        "chatglm",
        r"(^|[./])encoder[./]layers[./]\d+[./]self_attention$",
    ),
    _Choice("gpt_bigcode", "multi_query", False, "starcoder", "starcoder-heads"),
)


def made(blocks: Sequence[Block], file: Any) -> list[Block]:
    """The blocks of a checkpoint, with the layouts that its configuration chooses.

    Layouts that the user named stay. A configuration that contradicts the tensors changes none.
    """
    content = hf_config.readable(file.path)
    own = content if isinstance(content, dict) else {}
    choices = [
        one
        for one in _CHOICES
        if own.get("model_type") == one.model_type and own.get(one.key) is one.value
    ]
    if not choices or ((heads := described.of(file, blocks).heads) and heads.wrong):
        return list(blocks)
    return [_chosen(block, choices) for block in blocks]


def chooses(found: str, layout: str) -> bool:
    """True if a configuration can choose a layout where the arrays alone are read as `found`."""
    return any((one.found, one.layout) == (found, layout) for one in _CHOICES)


def _chosen(block: Block, choices: Sequence[_Choice]) -> Block:
    for one in choices:
        alike = block.layout.name == one.found and not block.given
        if alike and re.search(one.place, block.prefix):
            return block._replace(layout=named(one.layout), also=())
    return block
