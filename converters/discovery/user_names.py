"""Names of the layers of a Keras file: the path, or the name that the user gave."""

import re
from collections.abc import Mapping

SWAP = str.maketrans("./", "/.")
# Keras numbers the layers of a container by their class, and keeps their names as attributes.
_NUMBERED = re.compile(r"(?:.*/)?layers/[^/]+")


def of_layer(prefix: str, names: Mapping[str, str]) -> str:
    """The name of the innermost layer on the way that Keras only numbered, and what follows it.

    Other components are attributes of the model, which name layers better than Keras' own counter
    does (`attn/q_proj` is called `dense_8`).

    >>> names = {"layers/dense_1": "head", "layers/my_attention": "mine", "attn/q_proj": "dense_8"}
    >>> [of_layer(p, names) for p in ("layers/dense_1", "layers/my_attention/q", "attn/q_proj")]
    ['head', 'mine/q', 'attn/q_proj']
    """
    name, rest = _named(prefix, names)
    return "/".join(part for part in (name, rest) if part) if name else prefix


def dotted(prefix: str, separator: str, names: Mapping[str, str]) -> str:
    """The same as a path with dots, where dots and slashes are exchanged so that it comes back.

    >>> dotted("a/b.c", "/", {}), dotted("a.b", ".", {})
    ('a.b/c', 'a.b')
    """
    name, rest = _named(prefix, names)
    if not name:
        return prefix.translate(SWAP) if separator == "/" else prefix
    name = name if "." in name else name.replace("/", ".")
    return f"{name}.{rest.translate(SWAP)}" if rest else name


def target_by_name(prefix: str, separator: str, wanted: str, names: Mapping[str, str]) -> str:
    """The prefix with the other separator; both are exchanged, so that it comes back the same.

    >>> target_by_name("a.b", ".", "/", {})
    'a/b'
    """
    name = dotted(prefix, separator, names)
    return name.translate(SWAP) if wanted == "/" else name


def _named(prefix: str, names: Mapping[str, str]) -> tuple[str, str]:
    """The name that stands for the start of a path, and the rest; ("", "") where none does."""
    parts = prefix.split("/")
    for i in range(len(parts), 0, -1):
        start = "/".join(parts[:i])
        if start in names and _NUMBERED.fullmatch(start):
            name, group = names[start], re.sub(r"_\d+$", "", parts[i - 1])
            if re.fullmatch(rf"{re.escape(group)}(_\d+)?", name):  # Keras' own counter
                return "", ""
            once = list(names.values()).count(name) == 1
            return (name, "/".join(parts[i:])) if once else ("", "")
    return "", ""
