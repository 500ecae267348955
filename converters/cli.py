"""The command line: a thin skin on `migrate` and `verify`.

Exit codes: 0 fine, 1 the two sides differ, 2 bad input.
"""

import json
import math
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import markup
from rich.console import Console
from rich.progress import track
from rich.table import Table

from jaxmha.converters import blocks, migrate, verify
from jaxmha.converters.blocks import Block
from jaxmha.converters.checkpoint.errors import printable
from jaxmha.converters.explain_command import EXAMPLES, explain

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Multi-head attention weights between torch, Keras, Flax and Hugging Face files.\n\n"
    "Files: .safetensors, .pt (zip), .weights.h5, .npz. Nothing in a file is ever executed.\n\n"
    "Exit codes: 0 fine, 1 the two sides differ, 2 bad input.",
)
out, err = Console(emoji=False), Console(stderr=True, emoji=False)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
NumHeads = Annotated[
    int | None,
    typer.Option(
        help="Heads of layouts that do not store them (torch, bert). "
        "Default: the config.json beside the file.",
        min=1,
    ),
]
LayoutName = Enum("LayoutName", {x.name: x.name for x in blocks.LAYOUTS}, type=str)  # type: ignore[misc]
DtypeName = Enum("DtypeName", {x: x for x in migrate.DTYPES}, type=str)  # type: ignore[misc]


def escape(text: str, keep: str = "") -> str:
    """Names from files steer neither rich nor the terminal."""
    return markup.escape(printable(text, keep))


@contextmanager
def _one_message() -> Iterator[None]:
    """Whatever goes wrong ends in one message and exit code 2, never in a traceback.

    With JAXMHA_DEBUG=1 in the environment the traceback goes before the message.
    """
    try:
        yield
    except (typer.Exit, BrokenPipeError):
        raise
    except Exception as error:  # noqa: BLE001 (no traceback for users)
        if os.environ.get("JAXMHA_DEBUG"):
            traceback.print_exc()
        expected = isinstance(error, ValueError | TypeError | OSError)
        what = str(error) if expected else f"unexpected {type(error).__name__}: {error}"
        more = "" if expected else " (JAXMHA_DEBUG=1 shows where)"
        err.print(f"[red]error:[/red] {escape(what)}{more}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None


@app.command(
    epilog="Examples:\n\n  jaxmha inspect model.safetensors\n\n"
    "  jaxmha inspect encoder.pt --num-heads 8 --json"
)
def inspect(
    file: Annotated[Path | None, typer.Argument(help="The checkpoint.", show_default=False)] = None,
    num_heads: NumHeads = None,
    layouts: Annotated[bool, typer.Option("--layouts", help="List the known layouts.")] = False,
    as_json: Json = False,
) -> None:
    """List the attention blocks in a checkpoint, and what else is in it."""
    with _one_message():
        if layouts:
            _print_layouts(as_json)
            return
        if file is None:
            raise ValueError("name a file, or pass --layouts")
        info = migrate.inspect(file, num_heads=num_heads)
        if as_json:
            _print_json(info.to_json())
            return
        table = Table(title=f"{escape(str(file))} ({info.format})", title_justify="left")
        for column in ("block", "layout", "family", "heads", "from", "dtype", "sizes"):
            table.add_column(column, overflow="fold")
        for block in info.blocks:
            sizes = ", ".join("x".join(map(str, s)) for s in list(block.shapes.values())[:2])
            heads = "?" if block.num_heads is None else str(block.num_heads)
            name = block.name or block.prefix or "(top)"
            cells = (
                name,
                block.layout,
                block.family or "keys alone",
                heads,
                block.num_heads_from,
                block.dtype,
                sizes,
            )
            table.add_row(*(escape(cell) for cell in cells))
        out.print(table)
        for (layout, why), count in Counter((b.layout, b.why) for b in info.blocks).items():
            reason = escape(f"{layout}, {count} times, for its {why}")
            out.print(reason, soft_wrap=True, highlight=False)
        for broken in info.damaged:
            out.print(f"[red]damaged:[/red] {escape(broken)}", soft_wrap=True, highlight=False)
        dtypes = ", ".join(f"{count} {name}" for name, count in info.dtypes.items())
        out.print(
            f"{len(info.blocks)} attention blocks; {len(info.other_tensors)} other tensors "
            f"({dtypes} in all)",
            highlight=False,
        )


@app.command(
    epilog="Examples:\n\n  jaxmha convert model.safetensors flax.safetensors --to flax\n\n"
    "  jaxmha convert encoder.pt encoder.weights.h5 --to keras --num-heads 8\n\n"
    "  jaxmha convert model.safetensors half.npz --to flax --dtype float16"
)
def convert(
    source: Annotated[Path, typer.Argument(help="The checkpoint to read.", show_default=False)],
    destination: Annotated[
        Path, typer.Argument(help="The file to write; its suffix names the format.")
    ],
    to: Annotated[LayoutName, typer.Option(help="Layout of the attention blocks.")],
    from_: Annotated[
        LayoutName | None, typer.Option("--from", help="Take only blocks of this layout.")
    ] = None,
    num_heads: NumHeads = None,
    dtype: Annotated[
        DtypeName | None, typer.Option(help="Cast every floating tensor, and say what it cost.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the destination.")] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint with its attention blocks in another layout; the rest is carried over."""

    def progress(found: list[Block]) -> Iterator[Block]:
        quiet = as_json or not err.is_terminal
        return iter(track(found, "converting", console=err, transient=True, disable=quiet))

    with _one_message():
        done = migrate.convert(
            source,
            destination,
            to=to.value,
            from_=from_.value if from_ else None,
            num_heads=num_heads,
            dtype=dtype.value if dtype else None,
            force=force,
            progress=progress,
        )
        if as_json:
            _print_json(done.to_json())
            return
        table = Table(title=escape(str(destination)), title_justify="left")
        for column in ("from", "layout", "to", "layout"):
            table.add_column(column, overflow="fold")
        for row in done.blocks:
            table.add_row(*(escape(cell or "(top)") for cell in row))
        out.print(table)
        out.print(
            f"{len(done.blocks)} attention blocks converted, {len(done.carried)} other tensors "
            "carried over unchanged" + (f" but for the cast to {dtype.value}" if dtype else ""),
            highlight=False,
        )
        if done.largest_rounding:
            name, change = max(done.largest_rounding.items(), key=lambda item: item[1])
            out.print(f"largest rounding: {change:.3g} in {escape(name)}", highlight=False)
        for note in done.notes:
            out.print(f"note: {escape(note)}", soft_wrap=True, highlight=False)


@app.command(
    "verify",
    epilog="Examples:\n\n  jaxmha verify model.safetensors flax.safetensors\n\n"
    "  jaxmha verify encoder.pt encoder.weights.h5 --num-heads 8 --json",
)
def verify_(
    a: Annotated[Path, typer.Argument(help="One checkpoint.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="The other.", show_default=False)],
    num_heads: NumHeads = None,
    as_json: Json = False,
) -> None:
    """Compare the attention of two checkpoints: weights bit by bit, outputs against float64.

    Exit code 1 if anything differs.
    """
    with _one_message():
        report = verify.compare(a, b, num_heads=num_heads)
        if as_json:
            _print_json(report.to_json())
        else:
            _print_report(report)
    raise typer.Exit(0 if report.same else 1)


app.command(epilog=EXAMPLES)(explain)


def _print_report(report: verify.Report) -> None:
    table = Table(caption="error: RMS against float64, in rounding floors of the output")
    for column in ("block", "layouts", "heads", "weights", "error, no mask", "padding", "causal"):
        table.add_column(column, overflow="fold")
    for block in report.blocks:
        weights = "identical (0 ULP)" if not block.differences else "the same but for zeros"
        if not all(difference.harmless for difference in block.differences):
            weights = "[red]differ[/red]"
        errors = (" / ".join(f"{e:.3g}" for e in pair) for pair in block.errors.values())
        layouts = " / ".join(dict.fromkeys(block.layouts))
        name = escape(block.a or block.b or "(top)")
        table.add_row(name, layouts, str(block.num_heads), weights, *errors)
    out.print(table)
    for block in report.blocks:
        if not block.same:
            out.print(escape(str(block), keep="\n"), highlight=False)
    for name in report.only_a:
        out.print(f"only in the first: {escape(name)}", highlight=False)
    for name in report.only_b:
        out.print(f"only in the second: {escape(name)}", highlight=False)
    for note in report.notes:
        out.print(escape(note), highlight=False)
    out.print("[green]the same[/green]" if report.same else "[red]different[/red]")


def _print_layouts(as_json: bool) -> None:
    rows = {
        layout.name: {e.key: {"axes": e.axes, "leaves": e.leaves} for e in layout.entries}
        for layout in blocks.LAYOUTS
    }
    if as_json:
        _print_json(rows)
        return
    for layout in blocks.LAYOUTS:
        table = Table(title=f"{layout.name}: {layout.about}", title_justify="left")
        for column in ("key", "axes", "holds"):
            table.add_column(column, overflow="fold")
        for entry in layout.entries:
            table.add_row(entry.key, entry.axes, ", ".join(entry.leaves))
        out.print(table)


def _print_json(data: Any) -> None:
    json.dump(_finite(data), sys.stdout, indent=2, allow_nan=False)
    print()


def _finite(data: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
