"""Finds sizes and names in a config.json that contradict the tensors of a checkpoint.

A contradiction means that the config.json is another model's. Agreement proves nothing: a stale
configuration may agree in all sizes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeGuard

from jaxmha.converters.discovery import family_keymaps, model_families
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.head_count import Configured
from jaxmha.converters.discovery.hf_config import Json
from jaxmha.converters.discovery.model_types import MODEL_TYPES
from jaxmha.converters.discovery.other_layers import split
from jaxmha.converters.layout import transform
from jaxmha.dims import parse

Shapes = Mapping[str, Sequence[int]]
# Keys that hold a size of the model, and patterns of keys that hold it for a part of the model.
_WIDTH = ["hidden_size", "d_model", "n_embd", "dim", "embed_dim", "model_dim", "n_embed"]
_WIDE = r"hidden|embed|embd|d_model|dim|width|channels|project|proj_size|inner|d_latents|input"
_HEAD = [
    "head_dim",
    "d_kv",
    "kv_channels",
    "attention_head_dim",
    "head_size",
    "attention_head_size",
]
_HEAD_LIKE = r"head_dim|d_kv|d_head|kv_channels|head_size|dim_head|channels_per_head|key_dim"
_KEYS = ["num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"]
_KEYS_LIKE = r"key_value_heads|kv_heads|n_head_kv|kv_n_heads"
_LAYERS = [
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "encoder_layers",
    "num_encoder_layers",
]
_LAYER_LIKE = r"layer|depth|block|stage"
_STACK = r"(.*?\b(?:layers?|h|blocks?)\.)"
_INNER = ["intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"]
_INNER_LIKE = r"intermediate|inner|d_ff|ffn|mlp|ff_dim|expert|hidden|ffw"
# Names of the first layer of a feed-forward network, whose output has the inner width.
_FIRST = (
    r"(^|\.)(intermediate\.dense|mlp\.(fc1|gate_proj|up_proj|c_fc|dense_h_to_4h)|fc1|linear1|"
    r"DenseReluDense\.(wi|wi_0))$"
)
_VOCABULARY = (
    r"(^|\.)(word_embeddings|embed_tokens|wte|shared|embed_in|token_embedding|tok_embeddings)$"
)


def find(
    content: Json, configured: Configured | None, blocks: Sequence[Block], shapes: Shapes
) -> list[str]:
    """Describes the first contradiction of each kind between a configuration and tensors.

    `configured` holds the head counts of the configuration.
    """
    if not isinstance(content, dict) or not blocks:
        return []
    found: dict[str, str] = {}
    for block in blocks:
        for kind, text in _of_block(content, configured, block, shapes):
            found.setdefault(kind, text)
    for kind, text in (
        *_layers(content, blocks, shapes),
        *_other_layers(content, shapes),
        *_model_type(content, blocks, shapes),
    ):
        found.setdefault(kind, text)
    return list(found.values())


def _of_block(
    content: Mapping[str, Json], configured: Configured | None, block: Block, shapes: Shapes
) -> Iterator[tuple[str, str]]:
    """Compares the sizes of one block with the configuration of its part of the model."""
    count = configured.part_of(block.prefix) if configured else None
    if configured and configured.counts and count is None:
        return  # the configuration does not cover the block's part
    own = _at(content, count.way[:-1]) if count else content
    where = block.prefix or "(top)"
    arrays = {key: tuple(shapes[name]) for key, name in block.keys.items()}
    rows = _query_rows(block, arrays)
    if count and rows and rows % count.heads:
        yield "heads", f"{count.way[-1]} is {count.heads}, and {where} has {rows} rows of queries"
        return
    try:
        sizes = transform.bind_shapes(block.layout, arrays, count and count.heads, block.prefix)
    except ValueError:
        return  # the sizes fit no head count: the conversion reports it
    keys = sizes.get("K", sizes.get("N"))
    # The first layer of a model may differ in input and output width, so either may match.
    for kind, letter, found, exact, like in (
        ("width", "features", [sizes.get("Dq"), sizes.get("Do")], _WIDTH, _WIDE),
        ("head_dim", "features in a head", [sizes.get("H")], _HEAD, _HEAD_LIKE),
        ("kv", "heads of keys and values", [keys], _KEYS, _KEYS_LIKE),
    ):
        stated = _size_in(own, exact)
        if kind == "width" and count and count.stages:
            continue  # the stages have different widths, and the configuration states only one
        if kind == "kv" and own.get("multi_query") is True and found[0] == 1:
            continue  # Falcon ignores its num_kv_heads if multi_query is set,
        if kind == "kv" and own.get("new_decoder_architecture") is False:
            continue  # and before its second architecture
        if stated and found[0] is not None and not _sizes(content, like).intersection(found):
            yield kind, f"{stated[0]} is {stated[1]}, and {where} has {found[0]} {letter}"


def _query_rows(block: Block, arrays: Shapes) -> int | None:
    """The query features of all heads, N * H; None if the heads have an axis of their own."""
    for entry in block.layout.entries:
        if "query.kernel" in entry.leaves and entry.key in arrays:
            groups, shape = parse(entry.axes), arrays[entry.key]
            sizes = shape[len(shape) - len(groups) :]
            for group, size in zip(groups, sizes, strict=False):
                if "N" in group and len(group) > 1 and not size % len(entry.leaves):
                    return size // len(entry.leaves) if "qkv" in group else size
    return None


def _layers(
    content: Mapping[str, Json], blocks: Sequence[Block], shapes: Shapes
) -> Iterator[tuple[str, str]]:
    """Reports a configured number of layers that no stack of attention layers in the file has."""
    named = _size_in(content, _LAYERS)
    stacks: dict[str, int] = {}
    starts = {
        match[0] for block in blocks if (match := re.match(_STACK, block.prefix.replace("/", ".")))
    }
    for name in shapes:
        found = re.match(rf"{_STACK}(\d+)(?=\.|$)", name.replace("/", "."))
        if found and found[1] in starts:
            stacks[found[1]] = max(stacks.get(found[1], 0), int(found[2]) + 1)
    stated = _sizes(content, _LAYER_LIKE)
    stated |= {n - 1 for n in _sizes(content, "^decoder_layers$")}  # Mask2Former has n - 1 layers
    if named and stacks and not set(stacks.values()) & stated:
        shown = ", ".join(f"{stack}{{i}} has {count}" for stack, count in stacks.items())
        yield "layers", f"{named[0]} is {named[1]}, and {shown}"


def _other_layers(content: Mapping[str, Json], shapes: Shapes) -> Iterator[tuple[str, str]]:
    """Reports a configured vocabulary size or feed-forward width that no layer in the file has."""
    vocabulary, inner = _sizes(content, r"vocab"), _sizes(content, _INNER_LIKE)
    widths = {content[key] for key in _WIDTH if type(content.get(key)) is int}
    books = _sizes(content, r"codebook")
    vocabulary |= {a * b for a in vocabulary for b in books}
    vocabulary |= {a + b for a in vocabulary for b in vocabulary}
    vocabulary |= {n + 1 for n in vocabulary}  # Moshi's embeddings have one more row, for padding
    unlike: dict[str, str] = {}
    fitting: set[str] = set()
    for name, shape in shapes.items():
        prefix, _, key = split(name)
        path = prefix.replace("/", ".")
        if len(shape) != 2 or key not in ("weight", "kernel", "embedding"):
            continue
        apart = [n for n in shape if n not in widths] or shape
        fits = {size for n in apart for size in (n, n / 2)} & inner
        for kind, keys, pattern, fine in (
            ("vocabulary", ["vocab_size", "n_vocab"], _VOCABULARY, shape[0] in vocabulary),
            ("inner", _INNER, _FIRST, bool(fits)),
        ):
            if (stated := _size_in(content, keys)) and re.search(pattern, path):
                unlike.setdefault(
                    kind, f"{stated[0]} is {stated[1]}, and {name} has shape {tuple(shape)}"
                )
                fitting |= {kind} if fine else set()
    yield from ((kind, text) for kind, text in unlike.items() if kind not in fitting)


def _model_type(
    content: Mapping[str, Json], blocks: Sequence[Block], shapes: Shapes
) -> Iterator[tuple[str, str]]:
    """Reports a model type whose models have other tensor names than the file."""
    model_type = content.get("model_type")
    theirs = {
        family
        for family, types in MODEL_TYPES.items()
        if isinstance(model_type, str) and model_type in types.split()
    }
    here = {block.family[0] for block in blocks if block.family}
    # Families that differ only in the version of transformers do not contradict each other: versions
    # name the layers of one model differently, in memory and on disk.
    if not theirs or not here or {_plain(x) for x in here} & {_plain(x) for x in theirs}:
        return
    prefixes = [split(name)[0] for name in shapes]
    mine = sum(family_keymaps.kind_at(prefix, theirs) is not None for prefix in prefixes)
    other = sum(family_keymaps.kind_at(prefix, here) is not None for prefix in prefixes)
    placed = any(model_families.stands(theirs, block.prefix) for block in blocks)
    named = any(keymap.family in theirs for keymap in family_keymaps.KEYMAPS)
    # `mine` counts only names in `KEYMAPS`: without a family of the model type there, it says nothing.
    if not placed or (named and mine < other):
        shown = ", ".join(sorted(here))
        yield (
            "model_type",
            f"model_type is {model_type}, and the tensors are named as {shown} has them",
        )


def _plain(family: str) -> str:
    """The name of a family without its version.

    >>> _plain("ViT (transformers 5)"), _plain("BERT")
    ('ViT', 'BERT')
    """
    return re.sub(r" \(.*\)$", "", family)


def _at(content: Json, way: Sequence[str]) -> Mapping[str, Json]:
    for key in way:
        content = content.get(key) if isinstance(content, dict) else None
    return content if isinstance(content, dict) else {}


def _size_in(content: Mapping[str, Json], keys: Sequence[str]) -> tuple[str, int] | None:
    """The first of the keys that holds a size, and the size."""
    sizes = ((key, content.get(key)) for key in keys)
    return next(((key, size) for key, size in sizes if _is_size(size)), None)


def _is_size(value: Json) -> TypeGuard[int]:
    """True for an integer that is not a Boolean."""
    return type(value) is int


def _sizes(content: Json, pattern: str) -> set[int]:
    """Every integer under a key that matches the pattern, also inside lists."""
    found: set[int] = set()
    for key, value in _items(content):
        if re.search(pattern, key):
            several = value if isinstance(value, list) else [value]
            found |= {one for one in several if _is_size(one)}
    return found


def _items(content: Json) -> Iterator[tuple[str, Json]]:
    todo = [content]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield from ((str(key), item) for key, item in value.items())
            todo += value.values()
        elif isinstance(value, list):
            todo += [item for item in value if isinstance(item, dict | list)]
