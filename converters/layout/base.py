"""Parameter layouts as tables.

An entry describes one array of a framework: its key, its axes, and the canonical leaves in it.
"""

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from jaxmha import Semantics
from jaxmha.converters.layout.parametrized import remedies
from jaxmha.dims import parse
from jaxmha.params import CANONICAL


class Entry(NamedTuple):
    """One array of a layout: `axes` in the letters of the dimension key.

    If an array holds several leaves, they are packed along the axis `qkv` or `kv`, or along an axis
    of `uneven`. Entries of one `group` are all present or all absent; an entry without a group is
    required.
    """

    key: str
    axes: str
    leaves: tuple[str, ...]
    group: str = ""


@dataclass(frozen=True)
class Layout:
    """The parameter layout of one framework's layer.

    Attributes:
      name: the name on the command line (`--to torch`).
      entries: one for each array.
      ties: sizes that the layer fixes: letter -> another letter or a product, and the reason.
      apart: letters whose sizes must not all be equal, because another layout holds that case, and
        the reason for messages.
      separator: joins a prefix and a key.
      semantics: behaviour of the layer that its weights do not determine.
      holds: further fields of `Semantics` for which the layer has a setting.
      cyclic: True if query head n attends key head n % K, and not n // (N // K) as in `MHAParams`.
      other_keys: keys under the same prefix that are not part of attention.
      convention: the convention of other layers in the same files (`layer_layouts`), or "".
      about: a description: the class or the models, and typical prefixes.
    """

    name: str
    entries: tuple[Entry, ...]
    ties: Mapping[str, tuple[str, str]]
    apart: tuple[str, str] = ("", "")
    separator: str = "."
    semantics: Semantics = Semantics()  # noqa: RUF009 (frozen)
    holds: frozenset[str] = frozenset()
    cyclic: bool = False
    other_keys: tuple[str, ...] = ()
    convention: str = "torch"
    about: str = ""

    def __post_init__(self) -> None:
        known = {leaf for entry in self.entries for leaf in entry.leaves}
        assert known <= CANONICAL.keys(), f"{self.name}: unknown leaves {known - CANONICAL.keys()}"

    @cached_property
    def keys(self) -> frozenset[str]:
        """The key of every array."""
        return frozenset(entry.key for entry in self.entries)

    @cached_property
    def dotted(self) -> "Layout":
        """The layout with dots instead of slashes in its keys, as some files have them."""
        if self.separator == ".":
            return self
        entries = tuple(e._replace(key=e.key.replace("/", ".")) for e in self.entries)
        return replace(self, entries=entries, separator=".")

    @property
    def stores_num_heads(self) -> bool:
        """True if a shape of the layout determines the head count."""
        return any(("N",) in parse(entry.axes) for entry in self.entries)

    def path(self, prefix: str, key: str) -> str:
        """The path of a key under a prefix; the prefix may end in the separator."""
        return f"{prefix.removesuffix(self.separator)}{self.separator}{key}" if prefix else key

    def key(self, prefix: str, path: str) -> str | None:
        """The key of a path under a prefix; None if the path is not under the prefix."""
        start = self.path(prefix, "")
        return path.removeprefix(start) if path.startswith(start) else None

    def tied(self, axes: str) -> str:
        """The axes, with each tied letter replaced by the letter that it is tied to."""
        if (found := self._tied.get(axes)) is None:
            single = {a: b for a, (b, _) in self.ties.items() if " " not in b}
            found = re.sub(r"\w+", lambda word: single.get(word[0], word[0]), axes)
            self._tied[axes] = found
        return found

    @cached_property
    def _tied(self) -> dict[str, str]:
        return {}


_SHOWN = 4  # closest layouts described in a message
_PREFIXES = 3  # prefixes named in a message
_NAMED = 8  # names listed in an error message
# Common names of frameworks and models -> the layout that the user probably meant.
_MEANT = {
    **dict.fromkeys(("jax", "nnx", "linen", "flax-linen", "flax-nnx", "jaxmha"), "flax"),
    **dict.fromkeys(("pytorch", "pt", "torch.nn", "nn.multiheadattention"), "torch"),
    **dict.fromkeys(("tf", "tensorflow", "keras3", "tf.keras"), "keras"),
    **dict.fromkeys(("gpt", "openai-gpt"), "gpt2"),
    **dict.fromkeys(("mistral", "qwen2", "gemma"), "llama"),
    **dict.fromkeys(("pythia", "gptneox", "gpt_neox", "bloom"), "gpt-neox"),
    **dict.fromkeys(("clip", "bart", "opt"), "linear"),
    "roberta": "bert",
    "dm-haiku": "haiku",
    "eqx": "equinox",
}


def guess(name: str, known: Sequence[str]) -> str:
    """Suggests the known name that was likely meant, or returns "" if none is similar.

    >>> guess("jax", ["torch", "flax"]), guess("torhc", ["torch", "flax"]), guess("x", ["torch"])
    ('did you mean flax? ', 'did you mean torch? ', '')
    """
    meant = _MEANT.get(name.lower(), "")
    near = [meant] if meant in known else difflib.get_close_matches(name.lower(), known, 1)
    return f"did you mean {near[0]}? " if near else ""


def known(names: Sequence[str]) -> str:
    """A text with the first names, and with the command that lists all of them if there are more.

    >>> known(["torch", "flax"])
    'known are torch, flax'
    """
    more = len(names) - _NAMED
    rest = f" and {more} more (`jaxmha inspect --layouts` lists all)" * (more > 0)
    return f"known are {', '.join(names[:_NAMED])}{rest}"


def choose(
    layouts: Sequence[Layout], paths: Collection[str], name: str | None = None, prefix: str = ""
) -> Layout:
    """The named layout, or the first whose required keys are all among the paths under the prefix.

    Raises:
      ValueError: no layout fits; the message lists the keys missing from the closest ones.
    """
    names = [layout.name for layout in layouts]
    if name is not None:
        if name not in names:
            raise ValueError(f"unknown layout {name!r}: {guess(name, names)}{known(names)}")
        return layouts[names.index(name)]
    missing = {
        layout.name: [
            e.key for e in layout.entries if not e.group and layout.path(prefix, e.key) not in paths
        ]
        for layout in layouts
    }
    for layout in layouts:
        if not missing[layout.name]:
            return layout
    where = f" under prefix {prefix!r}" if prefix else ""
    share = {x.name: len(missing[x.name]) / sum(not e.group for e in x.entries) for x in layouts}
    near = sorted(missing, key=lambda name: share[name])[:_SHOWN]
    lacks = "; ".join(f"{name} lacks {', '.join(missing[name])}" for name in near)
    more = f"; {len(missing) - len(near)} more lack no fewer" * (len(missing) > len(near))
    paths_of = {x.name: [x.path(prefix, key) for key in missing[x.name]] for x in layouts}
    computed = remedies(dict.fromkeys(path for name in near for path in paths_of[name]), paths)
    found = computed or _elsewhere(layouts, paths)
    raise ValueError(f"no known layout has all its keys{where}: {lacks}{more}{found}")


def _elsewhere(layouts: Sequence[Layout], paths: Collection[str]) -> str:
    """Says under which prefixes the paths have all required keys of a layout, or "" if nowhere."""
    for layout in layouts:
        if found := _prefixes(layout, set(paths)):
            more = f" and {len(found) - _PREFIXES} more" * (len(found) > _PREFIXES)
            shown = ", ".join(map(repr, found[:_PREFIXES])) + more
            return f"; layout {layout.name} has them under {shown}: pass prefix={found[0]!r}"
        other = "." if layout.separator == "/" else "/"
        renamed = {path.replace(other, layout.separator) for path in paths}
        if _prefixes(layout, renamed) or _required(layout) <= renamed:
            return (
                f"; layout {layout.name} joins names by {layout.separator!r}, and these are joined by "
                f"{other!r}: pass {{key.replace({other!r}, {layout.separator!r}): array for key, array "
                "in state.items()}"
            )
    return ""


def _required(layout: Layout) -> set[str]:
    return {entry.key for entry in layout.entries if not entry.group}


def _prefixes(layout: Layout, paths: Collection[str]) -> list[str]:
    """The prefixes under which all required keys of the layout are; keys without one do not count."""
    required = _required(layout)
    end = layout.separator + min(required)
    starts = [path.removesuffix(end) for path in paths if path.endswith(end)]
    return sorted(
        start for start in starts if all(layout.path(start, key) in paths for key in required)
    )
