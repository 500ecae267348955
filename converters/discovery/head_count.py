"""Determines the head count of a block from shapes, metadata, arguments or configurations."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from jaxmha.checkpoint import errors as checkpoint_errors
from jaxmha.checkpoint.errors import printable
from jaxmha.checkpoint.limits import Limits
from jaxmha.converters.discovery import (
    architectures,
    head_defaults,
    hf_config,
    layer_settings,
    named_parts,
    part_types,
    towers,
)
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.hf_config import Json
from jaxmha.converters.discovery.model_types import MODEL_TYPES
from jaxmha.dims import bind, parse

# Key of a configuration that holds the head count -> the part of the model it applies to.
CONFIG_KEYS = {
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "nhead"), ()),
    "attention_heads": (),  # XGLM, Kosmos
    "encoder_attention_heads": ("encoder",),
    "decoder_attention_heads": ("decoder",),
    "decoder_num_attention_heads": ("decoder",),
    "encoder_num_attention_heads": ("encoder",),
    "num_encoder_attention_heads": ("encoder",),
    "num_decoder_attention_heads": ("decoder",),
    "speech_encoder_attention_heads": ("speech_encoder",),
    "t2u_encoder_attention_heads": ("t2u", "encoder"),
    "t2u_decoder_attention_heads": ("t2u", "decoder"),
    "memory_attention_num_attention_heads": ("memory_attention",),
}
_DIGITS = 15  # the most digits of a head count in metadata; longer texts are ignored
_SHOWN = 8  # the most values that a message lists
_MOST_PARTS, _DEEPEST = 100, 3  # the most parts without a count, and the deepest, that are read
# Key of safetensors metadata for a head count that no shape holds; `.PREFIX` is added per block.
METADATA = "jaxmha.num_heads"
_SINGLY = (
    "write a plan and set num_heads for each module (jaxmha plan ... --num-heads N -o plan.toml, N one "
    "of them, or 1; jaxmha convert ... --plan plan.toml)"
)


class UnusableConfigError(ValueError):
    """The head count is required, and the config.json next to the file does not give one."""


class Count(NamedTuple):
    """A head count, its source, and the parts of the model it applies to.

    `parts` runs from the outermost to the innermost. `alone`: the count applies to these parts only,
    not to the model. `way`: the keys that lead to it in the configuration. `stages`: the counts of a
    model's stages, of which `heads` is the first. `layers`: (layer, count) where the count differs.
    """

    heads: int
    where: str
    parts: tuple[str, ...] = ()
    alone: bool = False
    way: tuple[str, ...] = ()
    stages: tuple[int, ...] = ()
    layers: tuple[tuple[int, int], ...] = ()

    @property
    def values(self) -> tuple[object, ...]:
        """Everything that decides the count of a block; equal for two counts that never differ."""
        return self.heads, self.stages, self.layers

    @property
    def every(self) -> set[int]:
        """Every head count that a block may have: the usual one, and those of stages and layers."""
        return {self.heads, *self.stages, *dict(self.layers).values()}


class Configured(NamedTuple):
    """Head counts of a configuration; `wrong` is the reason if none of them is usable.

    `families`: names of the model families of its model_type (see `model_types`). `towers`: pairs
    of a prefix pattern and the count of the blocks that match it (see `towers`). `silent`: parts
    without a count. `known`: the model type is in `architectures`. `rest`: the count of the blocks
    that belong to no part (see `over`).
    """

    path: Path
    counts: tuple[Count, ...]
    wrong: str = ""
    families: tuple[str, ...] = ()
    towers: tuple[tuple[str, Count], ...] = ()
    silent: tuple[tuple[str, ...], ...] = ()
    known: bool = False
    rest: Count | None = None

    def over(self, prefixes: Sequence[str]) -> "Configured":
        """Adds `rest`, if it is certain, for the blocks at these prefixes.

        In a model of known type, blocks that belong to no part have the count at the top of the
        configuration. It is certain that a prefix without the name of a part belongs to none if
        other prefixes name every part that has a count.
        """
        top = [count for count in self.counts if len(count.way) == 1 and not count.parts]
        parts = {count.parts for count in self.counts if len(count.way) > 1}
        paths = [named_parts.path(prefix) for prefix in prefixes]
        named = all(any(named_parts.positions(part, path) for path in paths) for part in parts)
        certain = self.known and parts and named and len(top) == 1
        return self._replace(rest=top[0] if certain else None)

    def _tower(self, prefix: str) -> Count | None:
        return next((c for pattern, c in self.towers if towers.fits(pattern, prefix)), None)

    def _at(self, count: Count, prefix: str) -> Count | str:
        """`count` with the heads of a prefix's layer or stage, or why no stage is that of the prefix.

        The first number in the prefix is the index of the layer, or of the stage if there are any.
        """
        numbers = [int(part) for part in re.split("[./]", prefix) if part.isdigit()]
        if numbers and (heads := dict(count.layers).get(numbers[0])):
            way = (self.path.name, *count.way[:-1], f"the head count of layer {numbers[0]}")
            return count._replace(heads=heads, where=": ".join(way))
        if not count.stages:
            return count
        if not numbers or numbers[0] >= len(count.stages):
            return (
                f"{count.where} has a head count for each stage, and no stage is that of {prefix}"
            )
        return count._replace(heads=count.stages[numbers[0]])

    @property
    def several(self) -> bool:
        """True if parts of the model have different counts."""
        return len({count.values for count in self.counts}) > 1

    @property
    def in_parts(self) -> bool:
        """True if the counts cover only parts of the model, so that other parts may differ."""
        whole = len({count.parts for count in self.counts}) > 1 or not any(
            count.alone for count in self.counts
        )
        return bool(self.towers) or self.several or not whole

    def of(self, prefix: str) -> tuple[int | None, str]:
        """The head count of the block at a prefix, and its source; or None and the reason.

        Among several counts, the outermost part named in the prefix decides. The last component is
        the name of the block itself and is ignored: a block `encoder_attn` is part of the decoder.
        """
        count = self.count_of(prefix)
        return (None, count) if isinstance(count, str) else count[:2]

    def count_of(self, prefix: str) -> Count | str:
        """The `Count` for the block at a prefix, or the reason why no count applies."""
        if self.wrong:
            return self.wrong
        if (tower := self._tower(prefix)) is not None:
            return self._at(tower, prefix)
        path = named_parts.path(prefix)
        placed = self._placed(path)
        if silent := self._silent(path, placed):
            return f"{self.path} has no head count for {': '.join(silent)}"
        if not self.several:
            if self.in_parts and not placed:
                return f"{self.counts[0].where} is of its part of the model"
            return self._at(placed[0][1] if placed else self.counts[0], prefix)
        if not placed and self.rest is not None:
            return self._at(self.rest, prefix)
        best = [c for position, c in placed if position == min(at for at, _ in placed)]
        if len({count.values for count in best}) == 1:
            return self._at(best[0], prefix)
        shown = ", ".join(f"{count.where} is {count.heads}" for count in self.counts[:_SHOWN])
        return f"{self.path} has several head counts ({shown})"

    def _placed(self, path: Sequence[str]) -> list[tuple[tuple[int, ...], Count]]:
        """(positions, count) for every count whose parts a path names; positions are in the path."""
        return [
            (at, count) for count in self.counts if (at := named_parts.positions(count.parts, path))
        ]

    def _silent(
        self, path: Sequence[str], placed: Sequence[tuple[tuple[int, ...], Count]]
    ) -> tuple[str, ...]:
        """The part without a count that a path names before any part with a count; () for none.

        The block belongs to that part, so its count is not known.
        """
        first = min((at for at, _ in placed), default=None)
        found = [(at, parts) for parts in self.silent if (at := named_parts.positions(parts, path))]
        return next((parts for at, parts in found if first is None or at < first), ())

    def part_of(self, prefix: str) -> Count | None:
        """The head count of the block at a prefix, from its part of the model; None: unknown.

        `way` of the count leads to the settings of this part in the configuration.
        """
        path = named_parts.path(prefix)
        placed = self._placed(path)
        count = self._tower(prefix)
        if count is None and self._silent(path, placed):
            return None
        if count is None and placed:
            count = min(placed, key=lambda one: one[0])[1]
        elif count is None and self.rest is not None:
            count = self.rest
        elif count is None and self.counts and not self.in_parts:
            count = next((c for c in self.counts if not c.parts), self.counts[0])
        found = None if count is None else self._at(count, prefix)
        return None if isinstance(found, str) else found


def find(
    block: Block,
    shapes: Mapping[str, Sequence[int]],
    given: int | None = None,
    metadata: Mapping[str, str] | None = None,
    configured: Configured | None = None,
) -> tuple[int | None, str]:
    """The head count of a block, and its source: the file, the caller, or a configuration.

    `configured` is the result of `in_config`, which the caller reads once for all blocks.

    Raises:
      UnusableConfigError: only the configuration could give the count, and it does not.
      ValueError: the given count contradicts the file.
    """
    in_shape = in_shapes(block, shapes)
    if in_shape is not None and given in (None, in_shape):
        return in_shape, "shape"
    kept: tuple[int | None, str] | None = next(
        (
            (int(text), "metadata")
            for key in (f"{METADATA}.{block.prefix}", METADATA)
            if (text := (metadata or {}).get(key, "")).isascii()
            and text.isdigit()
            and len(text) <= _DIGITS
        ),
        None,
    )
    several: set[int] = set()  # counts that a configuration gives for parts of the model
    in_parts = False
    if kept is None and configured is not None:
        kept, in_parts = configured.of(block.prefix), configured.in_parts
        heads = {n for count in configured.counts for n in count.every}
        several = heads if len(heads) > 1 else set()
    if given is None and kept is not None and kept[0] is None:
        remedy = (
            f"none of them belongs to {block.prefix or '(top)'}; {_SINGLY}"
            if in_parts
            else "correct it, or pass num_heads= (--num-heads)"
        )
        raise UnusableConfigError(f"{kept[1]}: {remedy}")
    if given is None:
        return kept or (None, "not stored: pass --num-heads")
    if in_shape is None and kept is not None and kept[0] not in (None, given):
        remedy = (
            f"leave it out, or {_SINGLY}"
            if in_parts
            else "leave it out, or correct the one that is wrong"
        )
        raise ValueError(
            f"a head count of {given} is given, and {kept[1]} says {kept[0]}"
            + f" for {block.prefix or '(top)'}" * in_parts
            + f": {remedy}"
        )
    if in_shape is None and kept is not None and several and given not in several:
        raise ValueError(
            f"a head count of {given} is given for {block.prefix or '(top)'}, and {kept[1]}: {_SINGLY}"
        )
    return given, "given"


def by_default(block: Block, given: int | None, configured: Configured | None = None) -> int | None:
    """The head count that the caller gave, for a block of a draft plan.

    None if `configured` describes parts of the model and gives a count for the block: that count
    goes before the caller's.
    """
    covered = configured is not None and configured.in_parts and configured.of(block.prefix)[0]
    return None if covered else given


def to_metadata(heads: Mapping[str, int], whole: bool) -> dict[str, str]:
    """Metadata for head counts, given by prefix.

    If these are all blocks of the file (`whole`) and they agree, one entry holds the count for the
    file; otherwise each block has an entry.

    >>> to_metadata({"a": 2, "b": 2}, whole=True)
    {'jaxmha.num_heads': '2'}
    >>> to_metadata({"a": 2, "b": 3}, whole=True)
    {'jaxmha.num_heads.a': '2', 'jaxmha.num_heads.b': '3'}
    """
    if whole and len(set(heads.values())) == 1:
        return {METADATA: str(next(iter(heads.values())))}
    return {f"{METADATA}.{prefix}": str(count) for prefix, count in heads.items()}


def in_config(path: Path) -> Configured | None:
    """The head counts in the config.json next to a checkpoint; None if it is absent or has none."""
    config = hf_config.file_of(path)
    try:
        own = hf_config.read(path)
        stated = {way for way, _ in hf_config.search(own, CONFIG_KEYS)}
        content = head_defaults.filled(own, CONFIG_KEYS)
        found = [x for x in hf_config.search(content, CONFIG_KEYS) if x[1] is not None]
    except (ValueError, RecursionError) as error:
        return Configured(config, (), hf_config.unreadable(path, error))
    found = [x for x in found if not layer_settings.OF_LAYERS.intersection(x[0])]
    stages = [(way, _positive(value)) for way, value in found]
    if impossible := [pair for pair, (_, read) in zip(found, stages, strict=True) if not read]:
        shown = ", ".join(
            f"{printable(': '.join((config.name, *way)))} is {checkpoint_errors.shown(x)}"
            for way, x in impossible[:_SHOWN]
        )
        wrong = f"{config} has an impossible head count ({shown})"
        return Configured(config, (), wrong)
    try:
        counts = tuple(
            _count(config.name, way, heads, way in stated)._replace(layers=_layers(content, way))
            for way, heads in stages
        )
    except ValueError as error:
        return Configured(config, (), f"{config}: {error}")
    types = {*hf_config.types_in(content)}
    named = tuple(f for f, known in MODEL_TYPES.items() if types & set(known.split()))
    placed = tuple(_tower(config.name, *row) for row in towers.rows(content) if _positive(row[2]))
    if not counts and not placed:
        return None
    known = isinstance(content, dict) and part_types.of_top(content) in architectures.KNOWN
    return Configured(
        config, counts, "", named, placed, (*islice(_silent(content), _MOST_PARTS),), known
    )


def _silent(content: Json, outer: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the nested names of each part of a configuration that holds no head count, however deep."""
    for key, part in content.items() if isinstance(content, dict) else ():
        if (
            isinstance(part, dict)
            and named_parts.is_part(key)
            and key not in layer_settings.OF_LAYERS
        ):
            parts = (*outer, named_parts.name(key))
            if not any(True for _ in hf_config.search(part, CONFIG_KEYS)):
                yield parts
            elif len(parts) < _DEEPEST:
                yield from _silent(part, parts)


def _tower(file: str, pattern: str, way: tuple[str, ...], value: Json) -> tuple[str, Count]:
    heads = _positive(value)
    stages = heads if len(heads) > 1 else ()
    return pattern, Count(heads[0], ": ".join((file, *way)), way[:-1], True, way, stages)


def _layers(content: Json, way: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """(layer, head count) for each layer whose count is not the one that `way` leads to."""
    model_type = part_types.of_top(content) if isinstance(content, dict) else ""
    for key in way[:-1]:
        content = content.get(key) if isinstance(content, dict) else None
        model_type = (content.get("model_type") if isinstance(content, dict) else "") or model_type
    if not isinstance(content, dict) or type(content.get(way[-1])) is not int:
        return ()
    return layer_settings.heads(content, str(model_type), way[-1])


def _positive(value: Json) -> tuple[int, ...]:
    """One head count, or one for every stage; empty if a value is not a valid head count."""
    values = value if isinstance(value, list) else [value]
    counts = [n for n in values if type(n) is int and 0 < n <= Limits.dimension]
    return tuple(counts) if len(counts) == len(values) else ()


def _count(file: str, way: Sequence[str], heads: tuple[int, ...], stated: bool = True) -> Count:
    own = CONFIG_KEYS[way[-1]]
    parts = (*map(named_parts.name, way[:-1]), *own)
    alone = bool(own) or any(map(named_parts.is_part, way[:-1]))
    stages = heads if len(heads) > 1 else ()
    where = ": ".join((file, *way)) + ", the default of its class," * (not stated)
    return Count(heads[0], where, parts, alone, tuple(way), stages)


def in_shapes(block: Block, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """The head count from the shapes of a block; None if no shape holds it."""
    sizes: dict[str, int] = {}
    for entry in block.layout.entries:
        if entry.key in block.keys and ("N",) in parse(entry.axes):
            shape = shapes[block.keys[entry.key]]
            bind(entry.key, shape[len(shape) - len(parse(entry.axes)) :], entry.axes, sizes)
            return sizes["N"]
    return None
