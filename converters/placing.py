"""Where a layer goes in the destination: its prefix by another separator, or the user's name of it."""

from collections.abc import Mapping

_SWAP = str.maketrans("./", "/.")


def user_name(prefix: str, separator: str, names: Mapping[str, str]) -> str:
    """What a .weights.h5 file keeps as a layer's name: a path with dots."""
    name = names.get(prefix)
    if name is None or list(names.values()).count(name) > 1:
        return prefix.translate(_SWAP) if separator == "/" else prefix
    return name if "." in name else name.replace("/", ".")


def target_by_name(prefix: str, separator: str, wanted: str, names: Mapping[str, str]) -> str:
    """The prefix with the other separator; both are exchanged, so that it comes back the same."""
    name = user_name(prefix, separator, names)
    return name.translate(_SWAP) if wanted == "/" else name


def target_of(prefix: str, separator: str, wanted: str) -> str:
    """Where a layer goes that has no name of its own.

    >>> target_of("a.b", ".", "/")
    'a/b'
    """
    return target_by_name(prefix, separator, wanted, {})
