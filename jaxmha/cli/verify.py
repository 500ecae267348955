"""`jaxmha verify`: compares two checkpoints of any formats and layouts."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from jaxmha.cli.console import (
    escape,
    one_message,
    out,
    print_json,
    print_notes,
    print_outside,
    print_verdict,
)
from jaxmha.cli.options import Json, NumHeads
from jaxmha.converters.verify import comparison

EXAMPLES = (
    "Examples:\n\n  jaxmha verify model.safetensors flax.safetensors\n\n"
    "  jaxmha verify encoder.pt encoder.weights.h5 --num-heads 8 --json"
)


def command(
    a: Annotated[Path, typer.Argument(help="One checkpoint.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="The other.", show_default=False)],
    num_heads: NumHeads = None,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints: every tensor bit by bit, outputs of attention against float64.

    Other layers are read by the conventions of their frameworks. Exit code 1 if anything differs,
    or if a tensor has no counterpart and was not compared.
    """
    with one_message():
        report = comparison.compare(a, b, num_heads=num_heads)
        if as_json:
            print_json(report.to_json())
        else:
            _print(report)
    raise typer.Exit(0 if report.same else 1)


def _print(report: comparison.Report) -> None:
    table = Table(caption="error: RMS against float64, in rounding floors of the output")
    for column in ("block", "layouts", "heads", "weights", "error, no mask", "padding", "causal"):
        table.add_column(column, overflow="fold")
    for block in report.blocks:
        weights = "identical (0 ULP)" if not block.differences else "equal but for zeros"
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
    print_outside(report.outside, report.not_compared)
    print_notes(report.notes)
    print_verdict(report.same, report.verdict)
