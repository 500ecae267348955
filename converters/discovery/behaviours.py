"""Reads the semantics of attention blocks that config.json or metadata holds, but no tensor.

`blocks` puts them into the layout of each block of a file, so that every conversion carries them
over, and every comparison computes with them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxmha import Semantics
from jaxmha.checkpoint.errors import printable
from jaxmha.converters.discovery import (
    architectures,
    attention_blocks,
    choices,
    class_defaults,
    described,
    hf_config,
    layer_settings,
    part_types,
    stored_semantics,
    unlike,
)
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.behaviour_readers import LAYER, OF_SETTINGS, reader_of
from jaxmha.converters.discovery.head_count import CONFIG_KEYS, Configured, Count
from jaxmha.converters.discovery.other_behaviours import Reader, Values
from jaxmha.converters.layout import registry
from jaxmha.converters.layout.base import Layout
from jaxmha.params import NORM_SCALES

# Prefixes of blocks of the part that text_config describes; the last alternative is for older files.
_TEXT = r"(^|[./_])(text|language)_model\b|^model[./]layers[./]"

# Model types in which only some layers have parts such as norms of queries and keys: a block without
# them counts as carried over.
_UNLIKE = ("llama4_text",)


def blocks(file: Any, known: Iterable[Layout] = registry.LAYOUTS) -> list[Block]:
    """The attention blocks of the layouts `known`, with their semantics as `configured` sets them.
    `attention_blocks.find` returns blocks with the semantics of their layouts instead.
    """
    return configured(attention_blocks.find(attention_blocks.shapes(file), known), file)


def configured(blocks: Sequence[Block], file: Any) -> list[Block]:
    """The blocks, with the semantics that the metadata or the config.json of a checkpoint gives.

    `file`: an open checkpoint, or a state in memory, which has metadata but no config.json.
    """
    if not isinstance(getattr(file, "path", None), Path):
        return [stored_semantics.described(block, file.metadata) for block in blocks]
    blocks = choices.made(blocks, file)
    content, heads = _described(blocks, file)
    found, without_heads = [], _without_heads(content)
    for block, own, model_type in _parts(blocks, content, heads):
        block = stored_semantics.described(block, file.metadata)
        read, unread = reader_of(model_type), ""
        if read is not None and not block.configured:
            values, unread = _values(read, {**own, LAYER: layer_of(block.prefix)}, model_type)
            block = _with(block, values)
        elif not model_type:
            unread = without_heads
        if not block.configured:
            block = block._replace(unlike=unlike.why(model_type), unread=unread)
        found.append(block)
    return found


def _without_heads(content: Any) -> str:
    """Why settings of a model type in `READERS` cannot be read: its configuration has no head count.

    "" if it has one, or has no such model type.
    """
    readable = next((t for t in hf_config.types_in(content) if reader_of(t)), "")
    stated = any(value is not None for _, value in hf_config.search(content, CONFIG_KEYS))
    return "" if stated or not readable else _lacks("num_attention_heads", readable)


def _lacks(key: str, model_type: str) -> str:
    return (
        f"{hf_config.CONFIG} has no {key} for model_type {model_type}: add it to that part of the "
        "file, where it has the default of its class"
    )


def _described(blocks: Sequence[Block], file: Any) -> tuple[Any, Configured | None]:
    """Returns the configuration of a checkpoint, and its head counts.

    The configuration is {} if it contradicts the tensors. The head counts are read, and the tensors
    compared, only if `READERS` or `unlike` has one of its model types; otherwise the counts are None.
    """
    content = hf_config.readable(file.path)
    if not any(reader_of(t) or unlike.why(t) for t in hf_config.types_in(content)):
        return content, None
    found = described.of(file, blocks)
    aside = found.aside or (found.heads and found.heads.wrong)
    return {} if aside else content, found.heads


def _parts(
    blocks: Sequence[Block], content: Any, heads: Configured | None
) -> Iterator[tuple[Block, Mapping[str, Any], str]]:
    """Yields every block, its part of the configuration, and the model type of that part.

    The model type is "" if the configuration has no part for the block.
    """
    for block in blocks:
        count = heads.part_of(block.prefix) if heads else None
        yield (block, *(part_of(content, count, block.prefix) or ({}, "")))


def layer_of(prefix: str) -> int | None:
    """The index of the layer that a prefix names: its first number.

    >>> layer_of("model.layers.3.self_attn"), layer_of("attn")
    (3, None)
    """
    numbers = re.findall(r"(?:^|[./])(\d+)(?=[./]|$)", prefix)
    return int(numbers[0]) if numbers else None


def _values(read: Reader, own: Mapping[str, Any], model_type: str) -> tuple[Values, str]:
    """The semantics that a reader finds, and why it found none ("": it found them)."""
    try:
        values = read(own)
        Semantics(**values)  # raises for values out of their range
    except KeyError as error:
        return {}, _lacks(str(error.args[0]), model_type)
    except (IndexError, TypeError, ValueError, ArithmeticError) as error:
        return {}, (
            f"{hf_config.CONFIG} has settings of attention for model_type {model_type} that cannot be "
            f"read ({printable(str(error))}): correct them"
        )
    return values, ""


def _with(block: Block, values: Values) -> Block:
    norms = any(NORM_SCALES & {*entry.leaves} for entry in block.layout.entries)
    learned = values.get("qk_norm") is not None and values.get("qk_norm_learned", True)
    if norms != learned or not values:
        return block
    semantics = replace(block.layout.semantics, **values)
    return block._replace(layout=replace(block.layout, semantics=semantics), configured=True)


def part_of(content: Any, count: Count | None, prefix: str) -> tuple[dict[str, Any], str] | None:
    """The part of a configuration that holds the head count of a block, and its model type.

    Without a count, returns text_config if the prefix names a text or language model, because
    configurations omit counts that equal the default of their class; otherwise None. Settings that
    apply only to the block's layer replace those of the part.
    """
    text = content.get("text_config") if isinstance(content, dict) else None
    named = isinstance(text, dict) and text.get("model_type") and re.search(_TEXT, prefix)
    if count is None and not named:
        return None
    own, model_type = part(content, ("text_config",) if count is None else count.way[:-1])
    layer = layer_of(prefix)
    with suppress(ValueError):  # the kind of the layer is not known: the readers report it
        own |= {} if layer is None else layer_settings.of(own, model_type, layer)
    return own, model_type


def part(content: Any, way: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The part of a configuration under the nested keys `way`, and the innermost model type.

    Absent keys have the defaults of the class of that model type.
    """
    model_type = part_types.of_top(content) if isinstance(content, dict) else ""
    for key in way:
        content = content.get(key) if isinstance(content, dict) else None
        if isinstance(content, dict):
            model_type = content.get("model_type") or model_type
    own = content if isinstance(content, dict) else {}
    return class_defaults.filled(own, str(model_type)), str(model_type)


def carried(blocks: Sequence[Block], file: Any) -> set[str]:
    """Returns the keys of `signs.PARTS` that the semantics of the blocks express.

    Sinks and gates count if any block has their arrays. Every other part counts if a block sets its
    field of the semantics, and so does every block whose model type has that part.
    """
    parts = {
        "scale": "scale",
        "logits_soft_cap": "soft_cap",
        "qk_norm": "qk_norm",
        "clip_qkv": "clip",
    }
    held = {leaf for b in blocks for e in b.layout.entries if e.key in b.keys for leaf in e.leaves}
    found = {part for part in ("sinks", "gate") if any(leaf.startswith(part) for leaf in held)}
    if not isinstance(getattr(file, "path", None), Path):
        return found
    parts_of = _parts(blocks, *_described(blocks, file))
    types = [(block, model_type) for block, _, model_type in parts_of]
    return found | {
        part
        for field, part in parts.items()
        if any(getattr(b.layout.semantics, field) is not None for b in blocks if b.configured)
        and all(_expresses(block, model_type, field, part) for block, model_type in types)
    }


def _expresses(block: Block, model_type: str, field: str, part: str) -> bool:
    """True if a block sets a field of its semantics, or its model type is known to lack `part`."""
    has = {*architectures.parts(model_type), *architectures.functions(model_type)}
    if model_type in architectures.KNOWN and part not in has:
        return True
    named = getattr(block.layout.semantics, field) is not None or model_type in _UNLIKE
    return block.configured and named


def refuse_unread(file: Any, blocks: Sequence[Block]) -> None:
    """Raises ValueError for settings of attention in config.json that `READERS` do not read."""
    content = hf_config.readable(file.path)
    settings = [
        part(content, way[:-1])[1]
        for way, value in hf_config.search(content, hf_config.BEHAVIOUR)
        if value not in (hf_config.BEHAVIOUR[way[-1]], None)
    ]
    parts_of = _parts(blocks, *_described(blocks, file))
    pairs = zip(parts_of, configured(blocks, file), strict=True)
    read = all(
        block.configured if reader_of(model_type) else model_type
        for (_, _, model_type), block in pairs
    )
    if not (settings and read and all(reader_of(t) in OF_SETTINGS for t in settings)):
        hf_config.refuse_behaviour(file.path)
