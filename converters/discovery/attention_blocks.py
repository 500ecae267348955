"""Finds attention blocks in a flat dict of tensors: layout, prefix, reason for the layout."""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from jaxmha import MHAParams, Semantics, checkpoint
from jaxmha.converters.discovery import model_families, other_forms, places, role_names
from jaxmha.converters.discovery.model_families import Family
from jaxmha.converters.layout import meaning, registry, transform, uneven
from jaxmha.converters.layout.base import Entry, Layout
from jaxmha.converters.layout.by_hand import KERNELS
from jaxmha.converters.layout.registry import LAYOUTS
from jaxmha.dims import parse


def shapes(file: checkpoint.Checkpoint) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a checkpoint."""
    return {name: info.shape for name, info in file.info.items()}


# `ASKS`: layout whose arrays models use in different functions -> the reason why its blocks are
# refused if no configuration decides between the functions. `_ASK` is the text of every reason.
_ASK = (
    "no tensor tells how {} (over each head or all, with an offset of 1, before or after the rotation; "
    "a gate by sigmoid or another function): put the model's config.json next to the file. Where it "
    "is there, jaxmha does not know these arrays of its model_type: read the other arrays by "
    "import_params(layout='llama'), and compute the rest around dot_product_attention"
)
ASKS = {
    layout: _ASK.format(meaning.OPEN.get(layout, "q_norm and k_norm normalise"))
    for layout in meaning.ASKING
}


def _asks(layout: Layout) -> str:
    """The reason why a layout must not be read without a configuration; "" if it may be read."""
    if layout.name in ASKS:
        return ASKS[layout.name]
    if not layout.name.startswith(tuple(KERNELS)) or layout.semantics.qk_norm is None:
        return ""
    return _ASK.format(f"{' and '.join(layout.name.partition('+')[2].split(','))} normalise")


_Shapes = Mapping[str, Sequence[int]]


class Block(NamedTuple):
    """One attention block: its layout, and the name of every array in the file."""

    prefix: str
    layout: Layout
    keys: dict[str, str]  # key of the layout -> name in the file
    unknown: tuple[str, ...] = ()  # names under the prefix that the layout does not know
    family_match: tuple[Family, str] | None = None  # the model family, and its prefix pattern
    also: tuple[str, ...] = ()  # other layouts with the same keys, if no family decides
    configured: bool = False  # `behaviours` set the layout semantics from config.json or metadata
    unlike: str = ""  # why the model type computes more than the layout, see `unlike.why`
    unread: str = ""  # why `behaviours` could not read the settings of the model type
    given: bool = False  # the user named the layout, so no configuration chooses another one

    @property
    def family(self) -> tuple[str, str] | None:
        """Name and prefix pattern of the model family that the block belongs to; None if unknown."""
        return (self.family_match[0].name, self.family_match[1]) if self.family_match else None

    @property
    def refused(self) -> str:
        """Reason why the block must not be read without a configuration; "" if it may be read."""
        if self.configured:
            return ""
        if self.unread:
            return f"{self.prefix or '(top)'}: {self.unread}"
        if asked := _asks(self.layout):
            return f"{self.prefix}: {self.unlike or asked}"
        if self.family_match is None or not self.family_match[0].refused:
            return ""
        return f"{self.prefix} is of {self.family_match[0].name}: {self.family_match[0].refused}"

    @property
    def whole(self) -> bool:
        """True if no array is unknown, and every group (such as biases) is complete or absent."""
        lacking = {entry.group for entry in self.layout.entries if entry.key not in self.keys}
        present = {entry.group for entry in self.layout.entries if entry.key in self.keys}
        return not self.unknown and not lacking & present

    @property
    def why(self) -> str:
        """Reason for choosing this layout: the keys found, and the prefix if it matches a family."""
        family_match = f"and the prefix of {': '.join(self.family)}" if self.family else "alone"
        other = f"; they fit {', '.join(self.also)} as well" if self.also else ""
        return f"{len(self.keys)} keys {family_match}{other}"

    def read(
        self, tensors: Mapping[str, Any], num_heads: int | None = None
    ) -> tuple[MHAParams, Semantics]:
        """Imports the block's arrays as parameters and semantics.

        Raises:
          ValueError: the block is refused (see `refuse`), or a shape does not fit the layout.
        """
        self.refuse()
        state = {self.layout.path(self.prefix, key): tensors[n] for key, n in self.keys.items()}
        return transform.import_params(
            [self.layout], state, num_heads=num_heads, prefix=self.prefix
        )

    def refuse(self) -> None:
        """Raises ValueError if the block has unknown keys or a reason in `refused`."""
        if self.refused:
            raise ValueError(self.refused)
        if self.unknown:
            because = f"{self.unlike}; " if self.unlike else ""
            raise ValueError(
                f"{because}unknown key {', '.join(map(repr, self.unknown))} in the block: layout "
                f"{self.layout.name} has no such parameter, and dropping it could change the function"
            )


def named(name: str) -> Layout:
    """The layout of this name, as `registry.named` finds it."""
    return registry.named(name)


# Prefixes of blocks that are not read as attention: GroupViT assigns each token to one group, DaViT
# attends over channels in every second block, the MSA Transformer sums the logits of all rows, and
# linear attention has no softmax.
_ASSIGNS = (
    r"(^|[./])downsample[./]assign$|(^|[._/])(channel|linear)_?(block|attn|attention)([._/]|$)"
    r"|(^|[./])row_self_attention([./]|$)|(^|[./])stages[./]\d+[./]blocks[./]\d+[./]1[./]attn$"
)


# Key -> another key, next to which it is not the array of a layout: `bias_v` next to `bias_u` is added
# to queries (Transformer-XL), and elsewhere it is a learned value.
_NOT_NEXT_TO = {"bias_v": "bias_u"}


def find(shapes: Mapping[str, Sequence[int]], layouts: Iterable[Layout] = LAYOUTS) -> list[Block]:
    """Every attention block, sorted by prefix.

    Raises:
      ValueError: two layouts fit the same prefix.

    >>> shapes = {"a.in_proj_weight": (18, 6), "a.out_proj.weight": (6, 6), "b": (3,)}
    >>> [(block.prefix, block.layout.name) for block in find(shapes)]
    [('a', 'torch')]
    """
    found: dict[str, list[Block]] = {}
    # Files may separate the names of parameter trees by dots instead of slashes.
    pairs = ((one, one.dotted) for one in layouts if one.entries)
    variants = [v for one, dotted in pairs for v in ((one,) if dotted is one else (one, dotted))]
    ends, names = name_ends(shapes, variants), sorted(shapes)
    for variant in variants:
        first = next(entry.key for entry in variant.entries if not entry.group)
        for prefix in prefixes_with(variant, ends, first):
            keys = {
                entry.key: full
                for entry in variant.entries
                if (full := variant.path(prefix, entry.key)) in shapes
                and variant.path(prefix, _NOT_NEXT_TO.get(entry.key, "")) not in shapes
            }
            if _fits(variant, keys, shapes) and places.allow(variant, prefix, keys, shapes):
                unknown = unknown_under(variant, prefix, keys, names)
                if other_forms.of(unknown):
                    continue
                family_match = model_families.match(variant.name, prefix, shapes)
                if layouts is LAYOUTS and variant.name in places.NAMED and not family_match:
                    continue
                found.setdefault(prefix, []).append(
                    Block(prefix, variant, keys, unknown, family_match)
                )
    chosen = [_decide(candidates, shapes) for candidates in found.values()]
    held = {name for block in chosen if block.whole for name in block.keys.values()}
    chosen = [b for b in chosen if b.whole or not held.intersection(b.keys.values())]
    if layouts is LAYOUTS:
        named_too = list(_named(chosen, shapes))
        chosen += named_too
    else:
        chosen = [block._replace(given=True) for block in chosen]
    return sorted(chosen, key=lambda block: natural(block.prefix))


def _named(chosen: list[Block], shapes: _Shapes) -> Iterator[Block]:
    """Yields the blocks of `role_names.named_blocks`; removes blocks they replace from `chosen`."""
    taken = {n for b in chosen if b.whole for n in b.keys.values()}
    taken |= {n for b in chosen for n in b.unknown}
    for one in role_names.named_blocks(shapes, taken, _other_keys()[0]):
        if not re.search(_ASSIGNS, one.prefix):
            chosen[:] = [block for block in chosen if block.prefix != one.prefix]
            yield Block(*one)


def excluded(layout: Layout, prefix: str, shapes: _Shapes) -> bool:
    """True if the arrays at a prefix fit a layout, but `other_forms` or `places` excludes it there.

    The arrays are then of another kind of attention, and not a damaged block of the layout.
    """
    paths = {entry.key: layout.path(prefix, entry.key) for entry in layout.entries}
    keys = {key: name for key, name in paths.items() if name in shapes}
    if not _fits(layout, keys, shapes):
        return False
    under = unknown_under(layout, prefix, keys, sorted(shapes))
    return bool(other_forms.of(under)) or not places.allow(layout, prefix, keys, shapes)


def _decide(candidates: Sequence[Block], shapes: Mapping[str, Sequence[int]]) -> Block:
    """Returns the candidate block of a known family at one prefix, or else the first candidate.

    Before, it drops incomplete candidates if others are complete, packings that the widths
    contradict, and candidates whose arrays are a proper subset of another candidate's.

    Raises:
      ValueError: two layouts use different arrays, and no family decides.
    """
    candidates = [block for block in candidates if block.whole] or candidates
    even = [b for b in candidates if _is_packed(b) and _is_even(b, shapes)]
    if even and len(even) < len(candidates):
        candidates = [b for b in candidates if b in even or not (_is_packed(b) or _is_uneven(b))]
    elif any(map(_is_uneven, candidates)):
        candidates = [b for b in candidates if not _is_packed(b)] or candidates
    names = [frozenset(block.keys.values()) for block in candidates]
    candidates = [
        c for c, own in zip(candidates, names, strict=True) if not any(own < n for n in names)
    ]
    placed = [block for block in candidates if block.family]
    own = [block for block in placed if block.layout.name in places.OF_FAMILIES]
    if own or len({block.layout.name for block in placed}) == 1:
        return (own or placed)[0]
    first, *others = candidates
    for other in others:
        if set(other.keys.values()) != set(first.keys.values()):
            raise ValueError(
                f"prefix {first.prefix!r} fits two layouts, {first.layout.name} and "
                f"{other.layout.name}: name one"
            )
    also = dict.fromkeys(b.layout.name for b in others if b.layout.name != first.layout.name)
    return first._replace(also=tuple(also))


def _is_packed(block: Block) -> bool:
    """True if the layout packs query, key and value with the same number of heads."""
    return any(len(entry.leaves) > 1 and not uneven.letter(entry) for entry in block.layout.entries)


def _is_uneven(block: Block) -> bool:
    """True if the layout packs query, key and value, and allows fewer key and value heads."""
    return any(map(uneven.letter, block.layout.entries))


def _is_even(block: Block, shapes: Mapping[str, Sequence[int]]) -> bool:
    """True if the packed kernel is three times as wide as the heads in the output kernel, `N * H`.

    Queries, keys and values then have equally many heads.
    """
    widths = set()
    for entry in block.layout.entries:
        if entry.key not in block.keys or entry.leaves[0].endswith("bias"):
            continue
        shape = shapes[block.keys[entry.key]]
        groups = parse(block.layout.tied(entry.axes))
        for group, size in zip(groups, shape[len(shape) - len(groups) :], strict=True):
            if {"N", "H"} <= set(group):
                widths.add(size / (3 if "qkv" in group else 1))
    return len(widths) <= 1


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts layer.2 before layer.10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


# Norms and reductions before the projections or after the output, which a conversion copies. Blocks may
# have them in known model families only: in other models, a norm of the same name may be between the
# heads and the output projection.
BEFORE = (
    "LayerNorm", "ln", "layer_norm", "self_attn_layer_norm", "self.layernorm1", "self.layernorm2",
    "self.sr", "self.layer_norm", "self.sequence_reduction", "spatial_reduction",
)  # fmt: skip
# Names of the arrays of a norm, in any framework.
_OF_NORMS = {"weight", "bias", "scale", "gamma", "beta", "offset"}


@cache
def _other_keys() -> tuple[frozenset[str], frozenset[str]]:
    """Returns the `other_keys` of all layouts, and the modules of the keys that end in `.weight`.

    These are arrays next to the projections, such as norms. A conversion copies them unchanged, so
    a block may have the `other_keys` of any layout.
    """
    known = frozenset(key for layout in LAYOUTS for key in layout.other_keys)
    return known, frozenset(key.removesuffix(".weight") for key in known if key.endswith(".weight"))


def unknown_under(
    layout: Layout, prefix: str, keys: Mapping[str, str], names: Sequence[str]
) -> tuple[str, ...]:
    """Names under a prefix that are neither in the layout nor known to accompany attention.

    `names` are the sorted names of all tensors, so that bisection finds those under the prefix.
    """
    if not prefix:
        return ()
    known_keys, norms = _other_keys()
    start = prefix + layout.separator

    def known(key: str) -> bool:
        module, _, array = key.replace("/", ".").rpartition(".")
        before = placed and module in BEFORE and array in _OF_NORMS
        # Rotary frequencies are known, and layers before the projections or after the output, `first`.
        if array == "inv_freq" or (module or array) in first:
            return True
        return key in known_keys or (module in norms and array in _OF_NORMS) or before

    placed = model_families.stands_any(prefix)
    own, after = set(keys.values()), prefix + chr(ord(layout.separator) + 1)
    under = names[bisect_left(names, start) : bisect_left(names, after)]
    keys_under = [n.removeprefix(start).replace("/", ".") for n in under]
    # The module of every array; an array outside any module counts as one.
    rest = [key.rpartition(".")[0] or key for key in keys_under]
    first = role_names.outside({*rest}, prefix)
    return tuple(n for n in under if n not in own and not known(n.removeprefix(start)))


_SEPARATOR = re.compile("[./]")
Ends = Mapping[tuple[str, str], Sequence[str]]


def name_ends(names: Iterable[str], layouts: Iterable[Layout]) -> Ends:
    """Maps (separator, key) to the prefixes of all names that end so; ("", key): to the prefix "".

    Only ends that are keys of the layouts are kept: a name may have hundreds of other ends.
    """
    found: dict[tuple[str, str], list[str]] = {}
    keys = frozenset[str]().union(*(layout.keys for layout in layouts))
    longest = max(map(len, keys), default=0)
    for name in names:
        if name in keys:
            found.setdefault(("", name), []).append("")
        for match in _SEPARATOR.finditer(name, max(0, len(name) - longest - 1)):
            if (rest := name[match.end() :]) in keys:
                found.setdefault((match[0], rest), []).append(name[: match.start()])
    return found


def prefixes_with(candidate: Layout, ends: Ends, key: str) -> Iterator[str]:
    """Yields the prefixes at which a key of the layout occurs, except those that fit `_ASSIGNS`."""
    for separator in ("", candidate.separator):
        for prefix in ends.get((separator, key), ()):
            if not re.search(_ASSIGNS, prefix):
                yield prefix


def _fits(candidate: Layout, keys: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> bool:
    """True if every required array is present with its rank, and sizes that must agree do."""
    sizes: dict[str, int] = {}
    products: dict[tuple[str, ...], float] = {}
    leading: int | None = None
    if any(not entry.group and entry.key not in keys for entry in candidate.entries):
        return False
    near = any(map(_decides, candidate.entries))
    for entry in candidate.entries:
        if entry.key not in keys:
            continue
        groups = parse(entry.axes)
        shape = shapes[keys[entry.key]]
        if len(shape) < len(groups) or (
            len(groups) == 2 and len(shape) in (3, 4) and {*shape[2:]} == {1}
        ):
            return False  # a convolution, and not a stack of linear layers
        last = shape[len(shape) - len(groups) :]
        leading = len(shape) - len(groups) if leading is None else leading
        if _decides(entry) and len(shape) - len(groups) != leading:
            return False
        for group, n in zip(parse(candidate.tied(entry.axes)), last, strict=True) if near else ():
            letters = tuple(letter for letter in group if letter not in uneven.PACKED)
            size = n / (len(entry.leaves) if letters != group else 1)
            if products.setdefault(letters, size) != size:
                return False
        own = {g[0]: n for g, n in zip(groups, last, strict=True) if len(g) == 1}
        if any(sizes.get(letter, n) != n for letter, n in own.items()):
            return False
        sizes |= own
    # A packing that allows fewer key than query heads has the same keys as one with equally many, so
    # its output width must fit as well.
    checked = ["K", "h", *(["Do"] if any(map(uneven.letter, candidate.entries)) else [])]
    return all(
        sizes[letter] == sizes[tied]
        for letter, (tied, _) in candidate.ties.items()
        if letter in sizes and tied in sizes and letter in checked
    )


def _decides(entry: Entry) -> bool:
    """True if the rank of this array distinguishes layouts with the same keys (gates and norms)."""
    return any(leaf.startswith(("gate", "query_norm", "key_norm")) for leaf in entry.leaves)
