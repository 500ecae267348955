"""`jaxmha inspect`: the attention blocks of a checkpoint and its other layers."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from jaxmha.cli.console import (
    escape,
    for_command,
    one_message,
    print_json,
    print_line,
    print_notes,
    print_some,
    print_table,
)
from jaxmha.cli.layouts import print_layouts
from jaxmha.cli.options import Json, NumHeads, option
from jaxmha.converters.discovery import user_names
from jaxmha.converters.migrate import inspection, pipeline

EXAMPLES = (
    "Examples:\n\n  jaxmha inspect model.safetensors\n\n"
    "  jaxmha inspect encoder.pt --num-heads 8 --json"
)
_BLOCK = ("block", "layout", "family", "heads", "heads from", "dtype", "sizes", "confidence")
_LAYER = ("kind", "of", "count", "dtype", "confidence", "for example", "why")


def command(
    file: Annotated[Path | None, typer.Argument(help="The checkpoint.", show_default=False)] = None,
    num_heads: NumHeads = None,
    layouts: Annotated[bool, option("--layouts", "List the known layouts.")] = False,
    as_json: Json = False,
) -> None:
    """List the attention blocks of a checkpoint, its other layers, and all other tensors."""
    with one_message():
        if layouts:
            print_layouts(as_json)
            return
        if file is None:
            raise ValueError("name a file, or pass --layouts")
        info = pipeline.inspect(file, num_heads=num_heads)
        if as_json:
            print_json(info.to_json())
        else:
            _print(file, info)


def _print(file: Path, info: inspection.FileInfo) -> None:
    title = f"{escape(str(file))} ({info.format})"
    named = {block.prefix: block.name for block in info.blocks if block.name}
    called = user_names.distinct_names((block.prefix for block in info.blocks), named)
    rows = [_escaped(_block_row(called[block.prefix], block)) for block in info.blocks]
    print_table(title, _BLOCK, rows)
    for (layout, why), count in Counter((b.layout, b.why) for b in info.blocks).items():
        print_line(escape(f"{layout}, {count} times, for its {why}"))
    _print_layers(info.layers)
    _print_not_understood(info)
    for broken in info.damaged:
        print_line(f"[red]damaged:[/red] {escape(broken)}")
    print_notes(info.notes)
    dtypes = ", ".join(f"{count} {name}" for name, count in info.dtypes.items())
    print_line(
        f"{len(info.blocks)} attention blocks; {len(info.layers)} other layers; "
        f"{len(info.not_understood)} tensors not understood ({dtypes} in all)"
    )


def _escaped(row: Sequence[str]) -> list[str]:
    return [escape(cell) for cell in row]


def _block_row(name: str, block: inspection.BlockInfo) -> tuple[str, ...]:
    return (
        name or "(top)",
        block.layout,
        block.family or "keys alone",
        "?" if block.num_heads is None else str(block.num_heads),
        for_command(block.num_heads_from),
        block.dtype,
        ", ".join("x".join(map(str, shape)) for shape in list(block.shapes.values())[:2]),
        block.confidence,
    )


def _print_layers(layers: Sequence[inspection.LayerInfo]) -> None:
    """Prints the other layers, one row for each kind, convention, dtype and confidence."""
    groups: dict[tuple[str, ...], list[inspection.LayerInfo]] = {}
    for layer in layers:
        key = (layer.kind, layer.convention, layer.dtype, layer.confidence)
        groups.setdefault(key, []).append(layer)
    if groups:
        rows = [
            (kind, convention, str(len(same)), dtype, confidence, same[0].prefix, same[0].why)
            for (kind, convention, dtype, confidence), same in groups.items()
        ]
        print_table("other layers", _LAYER, [_escaped(row) for row in rows])


def _print_not_understood(info: inspection.FileInfo) -> None:
    lines = []
    for name, why in info.not_understood.items():
        shape = "x".join(map(str, info.other_tensors[name])) or "scalar"
        lines.append(escape(f"not understood: {name} ({shape}): {why}"))
    print_some(lines)
