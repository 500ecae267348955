"""Hostile JSON: texts that take far more memory than their size once they are parsed."""

import struct
from pathlib import Path

from jaxmha import checkpoint as ck
from tests.checkpoint.hostile.cases import case
from tests.checkpoint.hostile.indexes import INDEX
from tests.checkpoint.hostile.orbax_folders import orbax

SIZE = 6_000_000
# Texts that are repeated in a list, and the memory that each takes once it is parsed.
SHAPES = {
    "lists": "[],", "dicts": "{},", "pairs": '{"a":1},', "texts": '"ab",', "numbers": "1234,",
    "nested": '[[[{"a":[]}]]],',
}  # fmt: skip


def of(shape: str, size: int = SIZE) -> str:
    """An object of about a size: a list of one shape, or keys, or one wide text."""
    if shape == "keys":
        return "{" + ",".join(f'"{i:05x}":1' for i in range(size // 10)) + "}"
    if shape == "wide":
        return '{"a":"' + "a" * 3 * size + '\\ud83d\\ude00"}'
    if shape == "emoji":
        return '{"a":"' + "a" * 3 * size + '\U0001f600"}'
    return '{"a":[' + SHAPES[shape] * (size // len(SHAPES[shape])) + "0]}"


def header(text: str) -> bytes:
    """A file of safetensors with a header and no data."""
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _register(shape: str) -> None:
    def safetensors(path: Path) -> None:
        path.write_bytes(header(of(shape)))

    def index(path: Path) -> None:
        path.write_text(of(shape))

    def tree(path: Path) -> None:
        orbax(path)
        (path / "_METADATA").write_text(of(shape))

    def document(path: Path) -> None:
        orbax(path)
        (path / "w" / ".zarray").write_text(of(shape))

    for kind, suffix, build in (
        ("header", ".safetensors", safetensors),
        ("index", INDEX, index),
        ("tree", ".orbax", tree),
        ("zarray", ".orbax", document),
    ):
        case(suffix, ck.BudgetExceeded, f"json_{shape}_in_{kind}")(build)


for _shape in (*SHAPES, "keys", "wide", "emoji"):
    _register(_shape)
