"""Parameter layouts as data.

An array of a framework is three facts: its key, its axes, and the canonical leaves in it.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxmha import Semantics
from jaxmha.dims import parse
from jaxmha.params import CANONICAL


class Entry(NamedTuple):
    """One array of a layout: `axes` in the letters of the dimension key.

    Several leaves are packed along the axis named `qkv` (or `kv`). Entries of one `group` are
    there together or not at all; without a group an entry is required.
    """

    key: str
    axes: str
    leaves: tuple[str, ...]
    group: str = ""


@dataclass(frozen=True)
class Layout:
    """The parameter layout of one framework's layer.

    Attributes:
      name: how users name it (`--to torch`).
      entries: every array of it.
      ties: sizes the layer does not choose freely: letter -> letter or product, with the reason.
      apart: sizes that must not all agree, and why: another layout of the framework holds them.
      separator: joins a prefix and a key.
      semantics: what the layer does beside its weights.
      holds: further fields of `Semantics` that the layer has a setting for.
      beside: keys under the same prefix that are not attention.
      about: the framework's class and where the layout is documented.
    """

    name: str
    entries: tuple[Entry, ...]
    ties: Mapping[str, tuple[str, str]]
    apart: tuple[str, str] = ("", "")
    separator: str = "."
    semantics: Semantics = Semantics()  # noqa: RUF009 (frozen)
    holds: frozenset[str] = frozenset()
    beside: tuple[str, ...] = ()
    about: str = ""

    def __post_init__(self) -> None:
        known = {leaf for entry in self.entries for leaf in entry.leaves}
        assert known <= CANONICAL.keys(), f"{self.name}: unknown leaves {known - CANONICAL.keys()}"

    @property
    def stores_num_heads(self) -> bool:
        """Whether the head count can be read from a shape."""
        return any(("N",) in parse(entry.axes) for entry in self.entries)

    def path(self, prefix: str, key: str) -> str:
        """A key under a prefix, which may end in the separator."""
        return f"{prefix.removesuffix(self.separator)}{self.separator}{key}" if prefix else key

    def key(self, prefix: str, path: str) -> str | None:
        """The inverse of `path`; None for what is not under the prefix."""
        start = self.path(prefix, "")
        return path.removeprefix(start) if path.startswith(start) else None

    def tied(self, axes: str) -> str:
        """Axes with letters that the layout ties to another letter replaced by that one."""
        single = {a: b for a, (b, _) in self.ties.items() if " " not in b}
        return re.sub(r"\w+", lambda word: single.get(word[0], word[0]), axes)


_SHOWN = 4  # layouts in a message
# Words that people have for what the layouts are called after.
_NAMED = 8  # layouts that a message names
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
    """The known name that was likely meant, as a question; empty where none is near.

    >>> guess("jax", ["torch", "flax"]), guess("torhc", ["torch", "flax"]), guess("x", ["torch"])
    ('did you mean flax? ', 'did you mean torch? ', '')
    """
    meant = _MEANT.get(name.lower(), "")
    near = [meant] if meant in known else difflib.get_close_matches(name.lower(), known, 1)
    return f"did you mean {near[0]}? " if near else ""


def known(names: Sequence[str]) -> str:
    """The first of several names in words, and where all of them are.

    >>> known(["torch", "flax"])
    'known are torch, flax'
    """
    more = len(names) - _NAMED
    rest = f" and {more} more (`jaxmha inspect --layouts` lists all)" * (more > 0)
    return f"known are {', '.join(names[:_NAMED])}{rest}"


def choose(
    layouts: Sequence[Layout], keys: Sequence[str], name: str | None = None, prefix: str = ""
) -> Layout:
    """The layout named, or the first whose required keys are all there.

    Raises:
      ValueError: there is none; the message has the keys that the nearest of them lack.
    """
    names = [layout.name for layout in layouts]
    if name is not None:
        if name not in names:
            raise ValueError(f"unknown layout {name!r}: {guess(name, names)}{known(names)}")
        return layouts[names.index(name)]
    missing = {
        layout.name: [e.key for e in layout.entries if not e.group and e.key not in keys]
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
    raise ValueError(f"no known layout has all its keys{where}: {lacks}{more}")
