"""Reads the semantics of attention blocks that config.json or metadata holds, but no tensor.

`blocks` puts them into the layout of each block of a file, so that every conversion carries them
over, and every comparison computes with them.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxmha.converters.discovery import (
    architectures,
    attention_blocks,
    choices,
    described,
    disentangled,
    hf_config,
    layer_kinds,
    other_behaviours,
    stored_semantics,
    unlike,
)
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.head_count import CONFIG_KEYS, Count
from jaxmha.converters.layout import registry
from jaxmha.converters.layout.base import Layout
from jaxmha.params import NORM_SCALES

# Prefixes of blocks of the part that text_config describes.
_TEXT = r"(^|[./_])(text|language)_model\b"

Values = other_behaviours.Values
_Reader = other_behaviours.Reader


def _multiplied(own: Mapping[str, Any]) -> Values:
    return {"scale": float(own["attention_multiplier"])}


def _scaled(own: Mapping[str, Any]) -> Values:
    return {"scale": float(own["query_pre_attn_scalar"]) ** -0.5}


def _capped(own: Mapping[str, Any]) -> Values:
    cap = own.get("attn_logit_softcapping", 50.0)  # the default of these classes
    return _scaled(own) | {"logits_soft_cap": None if cap is None else float(cap)}


def _normalised(own: Mapping[str, Any]) -> Values:
    return {"qk_norm": "rms", "qk_norm_epsilon": float(own["rms_norm_eps"])}


def _clipped(own: Mapping[str, Any]) -> Values:
    nested = own.get("attn_config")
    clip = (nested if isinstance(nested, dict) else own).get("clip_qkv")
    return {"clip_qkv": None if clip is None else float(clip)}


def _normalised_and_clipped(own: Mapping[str, Any]) -> Values:
    return _normalised(own) | _clipped(own)


def _with_norm_eps(own: Mapping[str, Any]) -> Values:
    return {"qk_norm": "rms", "qk_norm_epsilon": float(own["norm_eps"])}


def _offset(own: Mapping[str, Any]) -> Values:
    return _normalised(own) | {"qk_norm_offset": 1.0}


def _offset_and_scaled(own: Mapping[str, Any]) -> Values:
    """These classes have `attn_logit_softcapping` among their settings, but never apply it."""
    return _scaled(own) | _offset(own)


def _unlearned(own: Mapping[str, Any]) -> Values:
    """Norms without learned scales. They commute with the rotation, so their order is arbitrary."""
    return _normalised(own) | {"qk_norm_learned": False}


def _unlearned_and_scaled(own: Mapping[str, Any]) -> Values:
    """Norms as in `_unlearned`, and the usual scale multiplied by `qk_scale_factor`."""
    scale = float(own["qk_scale_factor"]) * float(own["head_dim"]) ** -0.5
    return _unlearned(own) | {"scale": scale}


def _normalised_if_set(own: Mapping[str, Any]) -> Values:
    return _normalised(own) if own["use_qk_norm"] else {}


def _unlearned_where_rotated(own: Mapping[str, Any]) -> Values:
    """Norms as in `_unlearned`, but only in layers with rotary positions."""
    rotated = layer_kinds.rotated(own, "llama4_text", own[LAYER])
    if not own.get("use_qk_norm", True) or not rotated:
        return {"qk_norm": None}
    return _unlearned(own)


def _only_capped(own: Mapping[str, Any]) -> Values:
    return {"logits_soft_cap": float(own["attn_logit_softcapping"])}


def _of_layer_norms(own: Mapping[str, Any]) -> Values:
    key = "norm_eps" if "layer_norm_eps" not in own else "layer_norm_eps"
    return {"qk_norm": "layer", "qk_norm_epsilon": float(own[key])}


def _torch_norms(own: Mapping[str, Any]) -> Values:
    """Layer norms with torch's default epsilon, for which these model types have no setting."""
    return {"qk_norm": "layer", "qk_norm_epsilon": 1e-5}


def _unscaled(own: Mapping[str, Any]) -> Values:
    return {"scale": 1.0}


def _of_half(own: Mapping[str, Any]) -> Values:
    return {"scale": (float(own["attention_head_dim"]) / 2) ** -0.5}


def _disentangled(own: Mapping[str, Any]) -> Values:
    """The scale of DeBERTa: it divides by the root of head width times number of logit terms."""
    terms = 1 + len(disentangled.kinds(own))
    width = int(own["hidden_size"]) // int(own["num_attention_heads"])
    return {"scale": None if terms == 1 else (width * terms) ** -0.5}


# Model types, and the function that reads the semantics of their blocks from a configuration. The
# zoo tests compare each with the model's own output.
READERS: tuple[tuple[str, _Reader], ...] = (
    (
        (
            "granite granitemoe granitemoeshared granite_docling_text hyperclovax granite_swa "
            "granitemoe_swa granitemoehybrid granite4_vision_text"
        ),
        _multiplied,
    ),
    ("gpt_neo dia_encoder dia_decoder", _unscaled),
    ("zamba zamba2", _of_half),
    ("gemma2 vaultgemma t5_gemma_module", _capped),
    ("olmo dbrx mpt", _clipped),
    ("olmoe", _normalised_and_clipped),
    (
        (
            "qwen3 qwen3_moe qwen3_vl_text qwen3_vl_moe_text exaone4 exaone_moe apertus hy_v3 "
            "kolibri1 mellum pe_audio_encoder dots1 flint afmoe beam olmo2 olmo3 flex_olmo "
            "olmo_hybrid minimax_m2 exaone4_5_text glm_ocr_vision glm5_next_vision "
            "qwen3_omni_moe_text qwen3_omni_moe_talker_text molmo2_text "
            "dots3_note_vision_encoder"
        ),
        _normalised,
    ),
    ("lfm2 lfm2_moe lfm3 lfm3_vl_vision", _with_norm_eps),
    (
        "qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text minimax_m3_vl_text",
        _offset,
    ),
    ("gemma3 gemma3_text t5gemma2_text", _offset_and_scaled),
    ("nanochat", _unlearned),
    ("muse_glimmer_text", _unlearned_and_scaled),
    ("sapiens2", _normalised_if_set),
    ("llama4_text", _unlearned_where_rotated),
    ("videoprism_vision_model videoprism_text_model", _only_capped),
    ("persimmon fuyu", _of_layer_norms),
    ("chameleon esmc", _torch_norms),
    ("nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp", _torch_norms),
    ("deberta deberta-v2 sew-d", _disentangled),
    *other_behaviours.READERS,
)


# Functions that read every setting of `hf_config.BEHAVIOUR` that their model types have.
_OF_SETTINGS = (
    _multiplied,
    _capped,
    _offset_and_scaled,
    _clipped,
    _normalised_and_clipped,
    _normalised_if_set,
    _unlearned_where_rotated,
    _only_capped,
    other_behaviours.of_litgpt,
)
# Key under which readers find the index of the layer, next to the keys of a configuration.
LAYER = "(layer)"
# Model types in which only some layers have parts such as norms of queries and keys.
_UNLIKE = ("llama4_text",)


def reader_of(model_type: str) -> _Reader | None:
    """The function that reads the behaviour of a model type from its configuration.

    >>> reader_of("qwen3") is not None, reader_of("bert") is None
    (True, True)
    """
    return next((found for types, found in READERS if model_type in types.split()), None)


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
    found, without_heads = [], _without_heads(file)
    for block, own, model_type in _parts(blocks, file):
        block = stored_semantics.described(block, file.metadata)
        read, why = reader_of(model_type), unlike.why(model_type)
        if read is not None and not block.configured:
            values, lacking = _values(read, {**own, LAYER: layer_of(block.prefix)})
            block, why = _with(block, values), why or _lacks(lacking, model_type)
        elif not model_type:
            why = without_heads
        found.append(block if block.configured else block._replace(unlike=why))
    return found


def _without_heads(file: Any) -> str:
    """Says that a configuration of a type in `READERS` has no head count; "" for all others."""
    content = hf_config.readable(file.path)
    readable = next((t for t in hf_config.types_in(content) if reader_of(t)), "")
    stated = any(hf_config.search(content, CONFIG_KEYS))
    return "" if stated or not readable else _lacks("num_attention_heads", readable)


def _lacks(key: str, model_type: str) -> str:
    """Says that config.json lacks `key`; "" for an empty key.

    Configurations omit values that equal the defaults of their class.
    """
    return key and (
        f"{hf_config.CONFIG} has no {key} for model_type {model_type}: add it to that part of the "
        "file, where it has the default of its class"
    )


def _parts(blocks: Sequence[Block], file: Any) -> Iterator[tuple[Block, Mapping[str, Any], str]]:
    """Yields every block, its part of the configuration, and the model type of that part.

    The model type is "" if neither `READERS` nor `unlike` has a model type of the configuration, or
    if the configuration has no part for the block.
    """
    content = hf_config.readable(file.path)
    readable = any(reader_of(t) or unlike.why(t) for t in hf_config.types_in(content))
    heads = described.of(file, blocks).heads if readable else None
    content = {} if heads and heads.wrong else content  # it describes other tensors
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


def _values(read: _Reader, own: Mapping[str, Any]) -> tuple[Values, str]:
    """The semantics that a reader finds, and the first key missing from its input ("": none)."""
    try:
        return read(own), ""
    except KeyError as error:
        return {}, str(error.args[0])
    except (IndexError, TypeError, ValueError, ZeroDivisionError, OverflowError):
        return {}, ""


def _with(block: Block, values: Values) -> Block:
    norms = any(NORM_SCALES & {*entry.leaves} for entry in block.layout.entries)
    learned = values.get("qk_norm") is not None and values.get("qk_norm_learned", True)
    if norms != learned or not values:
        return block
    try:
        semantics = replace(block.layout.semantics, **values)
    except (TypeError, ValueError):
        return block
    return block._replace(layout=replace(block.layout, semantics=semantics), configured=True)


def part_of(content: Any, count: Count | None, prefix: str) -> tuple[dict[str, Any], str] | None:
    """The part of a configuration that holds the head count of a block, and its model type.

    Without a count, returns text_config if the prefix names a text or language model, because
    configurations omit counts that equal the default of their class; otherwise None.
    """
    if count is not None:
        return part(content, count.way[:-1])
    text = content.get("text_config") if isinstance(content, dict) else None
    named = isinstance(text, dict) and text.get("model_type") and re.search(_TEXT, prefix)
    return part(content, ("text_config",)) if named else None


def part(content: Any, way: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The part of a configuration under the nested keys `way`, and the innermost model type."""
    model_type = content.get("model_type", "") if isinstance(content, dict) else ""
    for key in way:
        content = content.get(key) if isinstance(content, dict) else None
        if isinstance(content, dict):
            model_type = content.get("model_type") or model_type
    return (content if isinstance(content, dict) else {}), str(model_type)


def carried(blocks: Sequence[Block], file: Any) -> set[str]:
    """Returns the keys of `signs.PARTS` that the semantics of the blocks express.

    Sinks and gates: if any block has their arrays. Others: if a block sets the field, and so does
    every block whose model type has that computation.
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
    types = [(block, model_type) for block, _, model_type in _parts(blocks, file)]
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
    pairs = zip(_parts(blocks, file), configured(blocks, file), strict=True)
    read = all(
        block.configured if reader_of(model_type) else model_type
        for (_, _, model_type), block in pairs
    )
    if not (settings and read and all(reader_of(t) in _OF_SETTINGS for t in settings)):
        hf_config.refuse_behaviour(file.path)
