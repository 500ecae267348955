"""Parts of a model that nested configurations describe, and the names that block prefixes give them."""

import re
from collections.abc import Sequence

# Keys of nested configurations that do not end in `_config`.
_PARTS = ("encoder", "decoder")
# Part of a configuration -> the names of that part in tensor names.
_CALLED = {
    "text": "text|language",
    "vision": "vision|visual",
    "encoder": "(text_)?encoder",
    "decoder": "(text_)?decoder",
}


def name(key: str) -> str:
    """The part of a model that a nested configuration describes, from its key.

    Without `_model` too: the tensors of `semantic_model_config` are under `semantic_encoder`.
    """
    return key.removesuffix("_config").removesuffix("_cfg").removesuffix("_model")


def is_part(key: str) -> bool:
    return key.endswith(("_config", "_cfg")) or key in _PARTS


def path(prefix: str) -> list[str]:
    """The components of a prefix, without the name of the block itself."""
    return re.split("[./]", prefix)[:-1]


def positions(parts: Sequence[str], path: Sequence[str]) -> tuple[int, ...]:
    """The index in `path` at which each of the parts is named, in order, then the path's length.

    () if there are no parts, or if the path does not name all of them. Of several tuples, the
    smallest belongs to the outermost part; if they begin alike, to the one with the most parts.
    """
    positions: list[int] = []
    for part in parts:
        start = positions[-1] + 1 if positions else 0
        named = re.compile(rf"({_CALLED.get(part, re.escape(part))})(?![a-z])")
        at = next((i for i in range(start, len(path)) if named.match(path[i])), None)
        if at is None:
            return ()
        positions.append(at)
    return (*positions, len(path)) if positions else ()
