"""The head count of a block: read from a shape, given, or found beside the weights; never guessed."""

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmha.axes import bind, parse
from jaxmha.converters.blocks import Block
from jaxmha.converters.checkpoint.errors import UnreadableFile
from jaxmha.converters.checkpoint.limits import Budget, Limits
from jaxmha.converters.checkpoint.source import Source

CONFIG = "config.json"
_LARGEST = 16 << 20  # of a config.json
# Where configurations keep the head count.
CONFIG_KEYS = (
    *("num_attention_heads", "num_heads", "n_head", "n_heads", "nhead"),
    *("encoder_attention_heads", "decoder_attention_heads"),
)
# Key of safetensors metadata that keeps a head count no shape holds; with `.PREFIX` that of a block.
METADATA = "jaxmha.num_heads"


class UnusableConfigError(ValueError):
    """The head count is needed, and the config.json beside the file does not give one."""


def find(
    block: Block,
    shapes: Mapping[str, Sequence[int]],
    given: int | None = None,
    metadata: Mapping[str, str] | None = None,
    configured: tuple[int | None, str] | None = None,
) -> tuple[int | None, str]:
    """The head count of a block and where it is from: stored, asked for, or configured.

    `configured` is what `in_config` says of the file, which is read once and not per block.

    Raises:
      UnusableConfigError: only the configuration could say it, and does not.
      ValueError: the one given contradicts the file.
    """
    stored = in_shapes(block, shapes)
    if stored is not None and given in (None, stored):
        return stored, "shape"
    kept = next(
        (
            (int(text), "metadata")
            for key in (f"{METADATA}.{block.prefix}", METADATA)
            if (text := (metadata or {}).get(key, "")).isascii() and text.isdigit()
        ),
        configured,
    )
    if given is None and kept is not None and kept[0] is None:
        raise UnusableConfigError(f"{kept[1]}: correct it, or pass num_heads= or --num-heads")
    if given is None:
        return kept or (None, "not stored: pass --num-heads")
    if kept is not None and kept[0] not in (None, given) and stored is None:
        raise ValueError(
            f"num_heads={given} is given, and {kept[1]} says {kept[0]}: leave it out, or correct the "
            "one that is wrong"
        )
    return given, "given"


def to_metadata(heads: Mapping[str, int], whole: bool) -> dict[str, str]:
    """Head counts by prefix as metadata: one for the file where the blocks agree and are all of
    its blocks (`whole`), else one per block.

    >>> to_metadata({"a": 2, "b": 2}, whole=True)
    {'jaxmha.num_heads': '2'}
    >>> to_metadata({"a": 2, "b": 3}, whole=True)
    {'jaxmha.num_heads.a': '2', 'jaxmha.num_heads.b': '3'}
    """
    if whole and len(set(heads.values())) == 1:
        return {METADATA: str(next(iter(heads.values())))}
    return {f"{METADATA}.{prefix}": str(count) for prefix, count in heads.items()}


def in_config(path: Path) -> tuple[int | None, str] | None:
    """The head count in the config.json beside a checkpoint, with where it stands.

    None where there is no such file or key; a count of None comes with what is wrong.
    """
    config = path.parent / CONFIG
    try:
        content = _config(path)
    except (ValueError, RecursionError) as error:
        return None, f"{config} cannot be read as JSON ({type(error).__name__}: {error})"
    found = [
        (f"{where}: {key}", value)
        for where, key, value in _search(content, CONFIG, CONFIG_KEYS)
        if type(value) is int
    ]
    shown = ", ".join(f"{where} is {heads}" for where, heads in found)
    if len({heads for _, heads in found}) > 1:
        return None, f"{config} has several head counts ({shown})"
    if found and found[0][1] < 1:
        return None, f"{config} has an impossible head count ({shown})"
    return (found[0][1], found[0][0]) if found else None


# What a configuration says of attention that no tensor holds, and the value that changes nothing.
BEHAVIOUR: dict[str, Any] = {
    "attention_multiplier": None,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
}


def refuse_behaviour(path: Path) -> None:
    """Raises ValueError where the config.json beside a checkpoint changes attention itself.

    Weights alone would be read as another function.
    """
    try:
        content = _config(path)
    except (ValueError, RecursionError):
        return  # `in_config` says so where it is needed
    for _, key, value in _search(content, "", BEHAVIOUR):
        if value not in (BEHAVIOUR[key], None):
            raise ValueError(
                f"{path.parent / CONFIG} has {key}={value!r}: it changes the logits and is in no tensor, so "
                "that a file of another layout would lose it; read the blocks by import_params "
                "and set Semantics(scale=..., logits_soft_cap=...)"
            )


def epsilons(path: Path) -> dict[str, float]:
    """What the config.json beside a checkpoint says of the epsilon of norms, by key."""
    try:
        content = _config(path)
    except (ValueError, RecursionError):
        return {}
    keys = ("layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps")
    found = _search(content, "", keys)
    return {key: float(value) for _, key, value in found if type(value) in (int, float)}


def in_shapes(block: Block, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """The head count where the layout's shapes hold it."""
    sizes: dict[str, int] = {}
    for entry in block.layout.entries:
        if entry.key in block.keys and ("N",) in parse(entry.axes):
            shape = shapes[block.keys[entry.key]]
            bind(entry.key, shape[len(shape) - len(parse(entry.axes)) :], entry.axes, sizes)
            return sizes["N"]
    return None


def _config(path: Path) -> Any:
    """What the config.json beside a checkpoint holds; nothing where there is none.

    Raises ValueError or RecursionError where it cannot be read; a FIFO or device is not opened.
    """
    try:
        source = Source(path.parent / CONFIG)
    except UnreadableFile as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return {}
        raise
    try:
        Budget(source.path, 0, Limits()).spend("its size", source.size, _LARGEST)
        return json.loads(source.read(0, source.size))
    finally:
        source.close()


def _search(content: Any, where: str, keys: Container[str]) -> Iterable[tuple[str, str, Any]]:
    """Every value under one of the keys, with its key and where it stands."""
    todo: list[tuple[str, str | None, Any]] = [(where, None, content)]
    while todo:
        where, key, value = todo.pop()
        if key is not None:
            if key in keys:
                yield where, key, value
            where = f"{where}: {key}"
        if isinstance(value, dict):
            todo += [(where, *item) for item in reversed(value.items())]
        elif isinstance(value, list):
            todo += [(where, None, item) for item in reversed(value)]
