"""Names of the layers of a Keras file: the path, or the name that the user gave the layer."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping

SWAP = str.maketrans("./", "/.")
# Path of a layer in a container, where Keras replaces the name by the class and a number.
_NUMBERED = re.compile(r"(?:.*/)?layers/[^/]+")


def distinct_names(prefixes: Iterable[str], names: Mapping[str, str]) -> dict[str, str]:
    """Prefix -> name of each block, or the prefix itself if the name is another's name or prefix.

    All layers of a Keras model may give their attention the same name.

    >>> distinct_names(("a", "b", "c"), {"a": "mine", "b": "x", "c": "x"})
    {'a': 'mine', 'b': 'b', 'c': 'c'}
    >>> distinct_names(("a", "b"), {"a": "b", "b": "x"})  # `b` also means its block
    {'a': 'a', 'b': 'x'}
    """
    called = {prefix: names.get(prefix, prefix) for prefix in prefixes}
    count = Counter(called.values())
    return {
        prefix: name if count[name] == 1 and name not in called else prefix
        for prefix, name in called.items()
    }


def of_layer(prefix: str, names: Mapping[str, str]) -> str:
    """The prefix, with the user's name for the innermost layer that Keras only numbered.

    Other components are attributes of the model, which are better names than Keras' own counter
    (`attn/q_proj` is called `dense_8`).

    >>> names = {"layers/dense_1": "head", "layers/my_attention": "mine", "attn/q_proj": "dense_8"}
    >>> [of_layer(p, names) for p in ("layers/dense_1", "layers/my_attention/q", "attn/q_proj")]
    ['head', 'mine/q', 'attn/q_proj']
    """
    name, rest = _named(prefix, names)
    return "/".join(part for part in (name, rest) if part) if name else prefix


def dotted(prefix: str, separator: str, names: Mapping[str, str]) -> str:
    """The path with dots as separators, and with the user's name where a layer has one.

    Dots and slashes are exchanged, so that exchanging them again restores the path.

    >>> dotted("a/b.c", "/", {}), dotted("a.b", ".", {})
    ('a.b/c', 'a.b')
    """
    name, rest = _named(prefix, names)
    if not name:
        return prefix.translate(SWAP) if separator == "/" else prefix
    name = name if "." in name else name.replace("/", ".")
    return f"{name}.{rest.translate(SWAP)}" if rest else name


def target_by_name(prefix: str, separator: str, wanted: str, names: Mapping[str, str]) -> str:
    """The prefix with `wanted` as separator, and with the user's name where a layer has one.

    Dots and slashes are exchanged, so that exchanging them again restores the prefix.

    >>> target_by_name("a.b", ".", "/", {})
    'a/b'
    """
    name = dotted(prefix, separator, names)
    return name.translate(SWAP) if wanted == "/" else name


def _named(prefix: str, names: Mapping[str, str]) -> tuple[str, str]:
    """The user's name for the start of a path, and the rest; ("", "") if the user gave no name."""
    parts = prefix.split("/")
    for i in range(len(parts), 0, -1):
        start = "/".join(parts[:i])
        if start in names and _NUMBERED.fullmatch(start):
            name, group = names[start], re.sub(r"_\d+$", "", parts[i - 1])
            if re.fullmatch(
                rf"{re.escape(group)}(_\d+)?", name
            ):  # Keras chose this name, not the user
                return "", ""
            once = list(names.values()).count(name) == 1
            return (name, "/".join(parts[i:])) if once else ("", "")
    return "", ""
