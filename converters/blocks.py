"""Attention blocks in a flat dict of tensors: which layout, under which prefix, how many heads."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxmha import MHAParams, Semantics
from jaxmha.axes import bind, parse
from jaxmha.converters import engine, equinox, flax, haiku, huggingface, keras, linear, torch
from jaxmha.converters.layout import Layout

LAYOUTS: tuple[Layout, ...] = (
    *torch.LAYOUTS,
    *keras.LAYOUTS,
    *flax.LAYOUTS,
    *huggingface.LAYOUTS,
    *linear.LAYOUTS,
    *equinox.LAYOUTS,
    *haiku.LAYOUTS,
)

# Where configurations keep the head count.
HEAD_KEYS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "nhead")


# Key of safetensors metadata that keeps a head count no shape holds.
HEADS_METADATA = "jaxmha.num_heads"


class Block(NamedTuple):
    """One attention block: its layout and the place of every array."""

    prefix: str
    layout: Layout
    keys: dict[str, str]  # key of the layout -> name in the file
    unknown: tuple[str, ...] = ()  # other names under the prefix that the layout does not know

    def read(
        self, tensors: Mapping[str, Any], num_heads: int | None = None
    ) -> tuple[MHAParams, Semantics]:
        """Imports the block. Raises ValueError as `import_params` does, and for unknown keys."""
        if self.unknown:
            raise ValueError(
                f"unknown key {', '.join(map(repr, self.unknown))} in the block: layout "
                f"{self.layout.name} has no such parameter, and dropping it could change the function"
            )
        state = {self.layout.path(self.prefix, key): tensors[n] for key, n in self.keys.items()}
        return engine.import_params([self.layout], state, num_heads=num_heads, prefix=self.prefix)


def named(name: str) -> Layout:
    """The layout of that name. Raises ValueError with the known names."""
    return engine.choose(LAYOUTS, [], name, "")


def find(shapes: Mapping[str, Sequence[int]], layouts: Iterable[Layout] = LAYOUTS) -> list[Block]:
    """Every attention block, in the order of the names.

    Raises:
      ValueError: one prefix fits two layouts.

    >>> shapes = {"a.in_proj_weight": (18, 6), "a.out_proj.weight": (6, 6), "b": (3,)}
    >>> [(block.prefix, block.layout.name) for block in find(shapes)]
    [('a', 'torch')]
    """
    found: dict[str, Block] = {}
    for variant in (v for candidate in layouts for v in _variants(candidate)):
        for prefix in _prefixes(variant, shapes):
            keys = {
                entry.key: full
                for entry in variant.entries
                if (full := variant.path(prefix, entry.key)) in shapes
            }
            if not _fits(variant, keys, shapes):
                continue
            if prefix in found and found[prefix].keys == keys:
                continue  # layouts with the same keys: the first that holds the sizes
            if prefix in found:
                raise ValueError(
                    f"prefix {prefix!r} fits two layouts, {found[prefix].layout.name} and "
                    f"{variant.name}: name one"
                )
            found[prefix] = Block(prefix, variant, keys, _unknown(variant, prefix, keys, shapes))
    return sorted(found.values(), key=lambda block: natural(block.prefix))


def damaged(
    shapes: Mapping[str, Sequence[int]], found: Sequence[Block], layouts: Iterable[Layout] = LAYOUTS
) -> list[str]:
    """Prefixes that have half of the arrays of a layout and still are no block, with the reason."""
    whole, reasons = {block.prefix for block in found}, {}
    for candidate in layouts:
        required = [entry for entry in candidate.entries if not entry.group]
        for prefix in _prefixes(candidate, shapes):
            there = [e for e in required if candidate.path(prefix, e.key) in shapes]
            if prefix in whole or 2 * len(there) < len(required):
                continue
            missing = [e.key for e in required if e not in there]
            what = (
                f"lacks {', '.join(missing)}"
                if missing
                else "has arrays of another rank: "
                + ", ".join(
                    f"{e.key} expected axes ({e.axes}), got shape "
                    f"{tuple(shapes[candidate.path(prefix, e.key)])}"
                    for e in required
                )
            )
            reasons[prefix] = f"{prefix or '(top)'} looks like layout {candidate.name} but {what}"
    return list(reasons.values())


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer.2 before layer.10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _unknown(
    layout: Layout, prefix: str, keys: Mapping[str, str], shapes: Mapping[str, Sequence[int]]
) -> tuple[str, ...]:
    """Names under a prefix that are neither of the layout nor known to stand beside it."""
    if not prefix:
        return ()
    known = {*keys.values(), *(layout.path(prefix, key) for key in layout.beside)}
    start = prefix + layout.separator
    return tuple(name for name in shapes if name.startswith(start) and name not in known)


def heads_in_config(path: Path) -> tuple[int, str] | None:
    """The head count in the config.json beside a checkpoint, with where it stands.

    None where there is no such file, no such key, or more than one answer.
    """
    config = path.parent / "config.json"
    try:
        content = json.loads(config.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    found = list(_search(content, "config.json"))
    if len({heads for _, heads in found}) != 1 or found[0][1] < 1:
        return None
    return found[0][1], found[0][0]


def num_heads_of(
    block: Block,
    shapes: Mapping[str, Sequence[int]],
    given: int | None = None,
    metadata: Mapping[str, str] | None = None,
    path: Path | None = None,
) -> tuple[int | None, str]:
    """The head count of a block and where it is from: stored, asked for, or configured."""
    stored = heads_in_shapes(block, shapes)
    if stored is not None and given in (None, stored):
        return stored, "shape"
    if given is not None:
        return given, "given"
    kept = (metadata or {}).get(HEADS_METADATA, "")
    if kept.isdigit():
        return int(kept), "metadata"
    configured = heads_in_config(path) if path is not None else None
    return configured or (None, "not stored: pass --num-heads")


def heads_in_shapes(block: Block, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """The head count where the layout's shapes hold it."""
    sizes: dict[str, int] = {}
    for entry in block.layout.entries:
        if entry.key in block.keys and ("N",) in parse(entry.axes):
            shape = shapes[block.keys[entry.key]]
            bind(entry.key, shape[len(shape) - len(parse(entry.axes)) :], entry.axes, sizes)
            return sizes["N"]
    return None


def _prefixes(candidate: Layout, names: Iterable[str]) -> Iterator[str]:
    """Where the layout's first required key stands."""
    first = next(entry.key for entry in candidate.entries if not entry.group)
    for name in names:
        if name == first or name.endswith(candidate.separator + first):
            yield name.removesuffix(first).removesuffix(candidate.separator)


def _variants(candidate: Layout) -> list[Layout]:
    """Trees are also saved with dots."""
    if candidate.separator == ".":
        return [candidate]
    dotted = tuple(e._replace(key=e.key.replace("/", ".")) for e in candidate.entries)
    return [candidate, replace(candidate, entries=dotted, separator=".")]


def _fits(candidate: Layout, keys: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether every required array is there with its rank, and stored sizes obey the ties."""
    sizes: dict[str, int] = {}
    for entry in candidate.entries:
        groups = parse(entry.axes)
        if entry.key not in keys:
            if not entry.group:
                return False
            continue
        shape = shapes[keys[entry.key]]
        if len(shape) < len(groups):
            return False
        last = shape[len(shape) - len(groups) :]
        own = {g[0]: n for g, n in zip(groups, last, strict=True) if len(g) == 1}
        if any(sizes.get(letter, n) != n for letter, n in own.items()):
            return False
        sizes |= own
    return all(
        sizes[letter] == sizes[tied]
        for letter, (tied, _) in candidate.ties.items()
        if letter in sizes and tied in sizes and letter in ("K", "h")
    )


def _search(content: Any, where: str) -> Iterable[tuple[str, int]]:
    if isinstance(content, dict):
        for key, value in content.items():
            if key in HEAD_KEYS and isinstance(value, int) and not isinstance(value, bool):
                yield f"{where}: {key}", value
            yield from _search(value, f"{where}: {key}")
    elif isinstance(content, list):
        for value in content:
            yield from _search(value, where)
