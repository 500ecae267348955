"""Changes to the JSON of an input: a text that parses gets further than damaged bytes."""

import json
import random
import struct
from collections.abc import Callable
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**53, 2**63, 2**64, 10**30),
    *(0.5, -0.0, 1e-5, 1e308, float("nan"), float("inf")),
    *("", "a", "llama", "F32", "float32", "../a", "\0", "\ud800", "é" * 40, "x" * 2000),
    *([], {}, [[]], [{}], {"a": {}}, [0], [1, 2], [2**40, 2**40], ["a"], {"": None}),
)


def changed(data: bytes, seed: int, mutate: Callable[[bytes, int], bytes], most: int) -> bytes:
    """An input with one value of its JSON changed; without JSON as `mutate` damages its bytes."""
    chosen = random.Random(seed)
    document, wrap = _document(data[1:])
    if document is None or chosen.random() < 0.4:
        return mutate(data, most)
    text = json.dumps(_edited(document, chosen)).encode()
    return (data[:1] + wrap(text))[:most]


def _document(data: bytes) -> tuple[Any, Callable[[bytes], bytes]]:
    """The JSON of a document or of a safetensors file, and what puts another in its place."""
    start, end = 0, len(data)
    if data[8:9] == b"{" and len(data) > 8:
        start, end = 8, 8 + struct.unpack("<Q", data[:8])[0]
    try:
        document = json.loads(data[start:end])
    except (ValueError, RecursionError, OverflowError):
        return None, bytes
    rest = data[end:]
    return document, lambda text: (struct.pack("<Q", len(text)) if start else b"") + text + rest


def _edited(value: Any, chosen: random.Random) -> Any:
    """A value with one part of it replaced, removed, renamed or added."""
    if not isinstance(value, dict | list) or not value or chosen.random() < 0.15:
        return chosen.choice(VALUES)
    if isinstance(value, list):
        at = chosen.randrange(len(value))
        new = chosen.choice(([], [value[at], value[at]], [_edited(value[at], chosen)]))
        return [*value[:at], *new, *value[at + 1 :]]
    key = chosen.choice(list(value))
    match chosen.randrange(8):
        case 0:
            return {k: v for k, v in value.items() if k != key}
        case 1:
            name = str(chosen.choice(VALUES))
            return {name if k == key else k: v for k, v in value.items()}
        case 2:
            return {**value, chosen.choice(list(value)): value[key]}
        case _:
            return {**value, key: _edited(value[key], chosen)}
