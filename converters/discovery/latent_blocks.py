"""Finds blocks of latent attention, and reads their semantics from the model's configuration."""

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmha.converters.discovery import (
    behaviours,
    hf_config,
    latent,
    positions,
    rotary_settings,
    stored_semantics,
)
from jaxmha.converters.discovery.attention_blocks import natural
from jaxmha.converters.discovery.query_scale import QueryScale
from jaxmha.converters.layout import latent_forms
from jaxmha.converters.layout.latent import OWN, SIGN
from jaxmha.converters.layout.latent_forms import DEEPSEEK, Held
from jaxmha.latent.rotation import ScaledQueries
from jaxmha.rotary_frequencies import parameters_of

_OWN_SIGN = OWN["latent.kernel"]
_REQUIRED = (
    "query.kernel", "latent.kernel", "rotary_key.kernel", "key.kernel", "value.kernel",
    "latent_norm", "out.kernel",
)  # fmt: skip


class LatentBlock(NamedTuple):
    """A block of latent attention: its form (`latent_forms.FORMS`), and the names of its arrays.

    `held`: key -> axes and leaves of its array. `facts`: key of metadata, without the prefix -> text on
    the semantics or positions of the block. `place`: the positions, if a configuration gives them.
    """

    prefix: str
    form: str
    keys: Mapping[str, str]
    held: Mapping[str, Held]
    facts: Mapping[str, str]
    place: positions.Positions | None = None

    @property
    def leaves(self) -> dict[str, str]:
        """Leaf -> key of the array that holds it."""
        return {leaf: key for key in self.keys for leaf in self.held[key].leaves}


def find(
    file: Any, *, known: bool = True, at: str | None = None, length: int = 0
) -> list[LatentBlock]:
    """Every block of latent attention whose function is known, in the order of layers.

    `known`: False also returns blocks whose function is unknown, to compare their arrays. `at`:
    returns only the block with this prefix. `length`: the longest sequence, on which frequencies of
    some rope types depend; 0: the trained length.

    The function of a block with DeepSeek's keys is known if a config.json next to the file has one
    of the model types of `latent_behaviour`: other models use the same keys for other functions.
    """
    found = [*_own(file, at), *_deepseek(file, known, at, length)]
    return sorted(found, key=lambda block: natural(block.prefix))


def every(file: Any, length: int = 0) -> list[LatentBlock]:
    """Every block of latent attention; `facts` is empty if its function is unknown.

    `length`: as in `find`.
    """
    known = {block.prefix: block for block in find(file, length=length)}
    return [known.get(block.prefix, block) for block in find(file, known=False)]


def _own(file: Any, at: str | None) -> Iterator[LatentBlock]:
    held = latent_forms.own_keys()
    for prefix in _prefixes(file.info, _OWN_SIGN, at):
        keys = {key: full for key in held if (full := _path(prefix, key)) in file.info}
        leaves = {held[key].leaves[0] for key in keys}
        if leaves.issuperset(_REQUIRED):
            facts = {
                name: file.metadata[full]
                for name in (stored_semantics.METADATA, positions.METADATA)
                if (full := f"{name}.{prefix}") in file.metadata
            }
            yield LatentBlock(prefix, "jaxmha", keys, held, facts)


def _deepseek(file: Any, known: bool, at: str | None, length: int) -> Iterator[LatentBlock]:
    prefixes = list(_prefixes(file.info, SIGN, at))
    content = hf_config.readable(file.path) if _has_folder(file) and prefixes and known else {}
    names = sorted(file.info) if prefixes else []
    computed: dict[tuple[int, ...], tuple[dict[str, str], positions.Positions | None]] = {}
    for prefix in prefixes:
        own = {_key(prefix, name): name for name in _under(prefix, names)}
        own = {key: name for key, name in own.items() if not key.endswith("inv_freq")}
        shapes = {key: tuple(file.info[name].shape) for key, name in own.items()}
        try:
            sizes = latent_forms.sizes_of(shapes)
        except (KeyError, ValueError, IndexError):
            continue
        held = latent_forms.deepseek_keys(sizes, "q_a_proj.weight" in own)
        leaves = {leaf for key in own if key in held for leaf in held[key].leaves}
        if (size := tuple(sizes.values())) not in computed:
            computed[size] = _configured(content, sizes, length)
        facts, place = computed[size]
        whole = own.keys() <= held.keys() and {*_REQUIRED} <= leaves <= OWN.keys()
        if whole and (facts or not known):
            yield LatentBlock(prefix, DEEPSEEK.name, own, held, facts, place)


def _has_folder(file: Any) -> bool:
    return isinstance(getattr(file, "path", None), Path)


def _configured(
    content: Any, sizes: Mapping[str, int], length: int
) -> tuple[dict[str, str], positions.Positions | None]:
    """Metadata and positions of blocks, from the part of a configuration with their `sizes`.

    ({}, None) if no part has these sizes and a known model type.
    """
    for way, _ in hf_config.search(content, ["model_type"]):
        own, _ = behaviours.part(content, way[:-1])
        if (own.get("qk_nope_head_dim"), own.get("qk_rope_head_dim")) != (sizes["H"], sizes["R"]):
            continue
        try:
            semantics, rotation = latent.latent_behaviour(own, length=length)
            parameters = parameters_of(own)
            scaled = rotation if isinstance(rotation, ScaledQueries) else None
            factors = QueryScale(scaled.beta, scaled.floor, scaled.first) if scaled else None
            rotate = scaled.rotate if scaled else rotation
            frequencies = rotate.keywords["frequencies"]  # type: ignore[union-attr]
            rotary = positions.Rotary(
                frequencies.values,
                bool(rotate.keywords["interleaved"]),  # type: ignore[union-attr]
                frequencies.factor,
                str(parameters["rope_type"]),
                float(parameters["rope_theta"]),
                None if length else rotary_settings.trained_length(own, parameters),
            )
        except (KeyError, TypeError, ValueError):
            continue
        kept = {"scale": semantics.scale, "dropout_rate": semantics.dropout_rate}
        facts = {name: value for name, value in kept.items() if value}
        place = positions.Positions("rotary", rotary, query_scale=factors)
        return {
            stored_semantics.METADATA: json.dumps({**facts, "from": DEEPSEEK.name}),
            positions.METADATA: str(place),
        }, place
    return {}, None


def to_metadata(blocks: Mapping[str, LatentBlock]) -> dict[str, str]:
    """Metadata of the destination; `blocks`: prefix in the destination -> block of the source."""
    return {
        f"{name}.{prefix}": text
        for prefix, block in blocks.items()
        for name, text in block.facts.items()
    }


def without(
    apart: Mapping[str, Sequence[str]], blocks: Sequence[LatentBlock]
) -> dict[str, Sequence[str]]:
    """Removes prefixes from `apart` (prefix -> tensors) whose tensors belong to one of `blocks`.

    `apart` comes from `unknown_attention.find`, which takes latent attention for unknown.
    """
    names = {name for block in blocks for name in block.keys.values()}
    return {prefix: of for prefix, of in apart.items() if not names.intersection(of)}


def notes(blocks: Sequence[LatentBlock], converted: bool) -> Iterator[str]:
    """Yields one note for all blocks of the same layout and positions.

    `converted`: the target layout can hold the blocks.
    """
    kinds: dict[tuple[str, str], int] = {}
    for block in blocks:
        kind = block.form, block.facts.get(positions.METADATA, "unknown")
        kinds[kind] = kinds.get(kind, 0) + 1
    for (form, place), count in kinds.items():
        done = "" if converted else "; --to jaxmha converts them, other layouts cannot hold them"
        yield f"latent attention, {count} x layout {form}, positions {place}{done}"


def _prefixes(names: Mapping[str, Any], sign: str, at: str | None) -> Iterator[str]:
    for name in names if at is None else {_path(at, sign)} & names.keys():
        if name == sign or name.endswith(f".{sign}"):
            yield name[: -len(sign)].removesuffix(".")


def _path(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _key(prefix: str, name: str) -> str:
    return name[len(prefix) + 1 :] if prefix else name


def _under(prefix: str, names: Sequence[str]) -> Sequence[str]:
    """The names under a prefix, from sorted names.

    Under the prefix "", of a file with one block: the names with at most one dot.
    """
    if not prefix:
        return [name for name in names if name.count(".") < 2]
    return names[bisect_left(names, f"{prefix}.") : bisect_left(names, f"{prefix}/")]
