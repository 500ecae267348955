"""The order of layers in a file, by which a conversion numbers the layers of a Keras file."""

import re
from collections.abc import Callable, Iterable

Key = list[tuple[int, int]]


def of_source(names: Iterable[str]) -> Callable[[str], Key]:
    """A key function that sorts prefixes in the order of the file.

    Names under one parent sort by first appearance. Numbers sort as numbers, because the header of
    a file may list names alphabetically.

    >>> key = of_source(["l.10.self.w", "l.10.cross.w", "l.2.self.w", "l.2.cross.w"])
    >>> sorted(["l.10.self", "l.10.cross", "l.2.cross", "l.2.self"], key=key)
    ['l.2.self', 'l.2.cross', 'l.10.self', 'l.10.cross']
    """
    ranks_by_parent: dict[tuple[str, ...], dict[str, int]] = {}
    for name in names:
        tokens = _tokens(name)
        for i, token in enumerate(tokens):
            ranks = ranks_by_parent.setdefault(tokens[:i], {})
            ranks.setdefault(token, len(ranks))

    def key(prefix: str) -> Key:
        tokens = _tokens(prefix)
        return [
            (0, int(token)) if token[0] in "0123456789" else (1, ranks_by_parent[tokens[:i]][token])
            for i, token in enumerate(tokens)
        ]

    return key


def _tokens(name: str) -> tuple[str, ...]:
    """Splits a name into words, numbers and separators."""
    return tuple(re.findall(r"[./]|[0-9]+|[^0-9./]+", name))
