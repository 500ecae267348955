"""The Typer application; commands call `inspection`, `pipeline`, `report` and `comparison`.

Exit codes: 0 success; 1 the files differ, or were not fully compared; 2 bad input.
"""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from jaxmha import __version__
from jaxmha.cli import describe, diff, explain, plot
from jaxmha.cli.console import (
    SHOWN,
    Json,
    NumHeads,
    escape,
    one_message,
    out,
    print_json,
    print_outside,
    print_verdict,
)
from jaxmha.cli.convert import convert, plan
from jaxmha.converters.layout import registry
from jaxmha.converters.migrate import inspection, pipeline
from jaxmha.converters.verify import comparison

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Checkpoints between torch, Keras, Flax and Hugging Face: attention and what is beside it.\n\n"
    "Files: .safetensors (one, or shards with an index), .pt (zip), .weights.h5, .keras (read only), "
    ".npz, folders of orbax. Nothing in a file is ever executed.\n\n"
    "Exit codes: 0 fine, 1 the two sides differ or a part was not compared, 2 bad input.",
)


def _version(asked: bool | None) -> None:
    if asked:
        out.print(f"jaxmha {__version__}", highlight=False)
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = None,
) -> None:
    pass


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
    with one_message():
        if layouts:
            _print_layouts(as_json)
            return
        if file is None:
            raise ValueError("name a file, or pass --layouts")
        info = pipeline.inspect(file, num_heads=num_heads)
        if as_json:
            print_json(info.to_json())
            return
        table = Table(title=f"{escape(str(file))} ({info.format})", title_justify="left")
        for column in ("block", "layout", "family", "heads", "from", "dtype", "sizes", "sure"):
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
                block.confidence,
            )
            table.add_row(*(escape(cell) for cell in cells))
        out.print(table)
        for (layout, why), count in Counter((b.layout, b.why) for b in info.blocks).items():
            reason = escape(f"{layout}, {count} times, for its {why}")
            out.print(reason, soft_wrap=True, highlight=False)
        _print_layers(info)
        for broken in info.damaged:
            out.print(f"[red]damaged:[/red] {escape(broken)}", soft_wrap=True, highlight=False)
        for note in info.notes:
            out.print(f"note: {escape(note)}", soft_wrap=True, highlight=False)
        dtypes = ", ".join(f"{count} {name}" for name, count in info.dtypes.items())
        out.print(
            f"{len(info.blocks)} attention blocks; {len(info.layers)} layers beside them; "
            f"{len(info.not_understood)} tensors not understood ({dtypes} in all)",
            highlight=False,
        )


def _print_layers(info: inspection.FileInfo) -> None:
    """Prints the other layers by kind, and the tensors that are not understood."""
    groups = Counter((x.kind, x.convention, x.dtype, x.confidence) for x in info.layers)
    if groups:
        table = Table(title="beside attention", title_justify="left")
        for column in ("kind", "of", "count", "dtype", "sure", "for example", "why"):
            table.add_column(column, overflow="fold")
        for group, count in groups.items():
            first = next(
                x for x in info.layers if (x.kind, x.convention, x.dtype, x.confidence) == group
            )
            kind, convention, dtype, confidence = group
            shown = (kind, convention, str(count), dtype, confidence, first.prefix, first.why)
            table.add_row(*(escape(cell) for cell in shown))
        out.print(table)
    for name, why in list(info.not_understood.items())[:SHOWN]:
        shape = "x".join(map(str, info.other_tensors[name])) or "scalar"
        out.print(
            escape(f"not understood: {name} ({shape}): {why}"), soft_wrap=True, highlight=False
        )
    if (more := len(info.not_understood) - SHOWN) > 0:
        out.print(f"and {more} more (--json lists all)", highlight=False)


app.command(
    epilog="Examples:\n\n  jaxmha plan model.safetensors --to flax\n\n"
    "  jaxmha plan model.safetensors --to flax --output plan.toml"
)(plan)
app.command(
    epilog="Examples:\n\n  jaxmha convert model.safetensors flax.safetensors --to flax\n\n"
    "  jaxmha convert encoder.pt encoder.weights.h5 --to keras --num-heads 8\n\n"
    "  jaxmha convert model.safetensors half.npz --to flax --dtype float16 --report report.json\n\n"
    "  jaxmha convert model.safetensors flax.safetensors --plan plan.toml\n\n"
    "  jaxmha convert checkpoints/llama/ flax.safetensors --to flax --shard-size 5GB --resume\n\n"
    "  jaxmha convert model.safetensors.index.json flax.orbax --to flax --digest sha256"
)(convert)


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
    """Compare two checkpoints: every tensor bit by bit, outputs of attention against float64.

    Other layers are read by the conventions of their frameworks. Exit code 1 if anything differs,
    or if a tensor has no counterpart and was not compared.
    """
    with one_message():
        report = comparison.compare(a, b, num_heads=num_heads)
        if as_json:
            print_json(report.to_json())
        else:
            _print_report(report)
    raise typer.Exit(0 if report.same else 1)


app.command(epilog=explain.EXAMPLES)(explain.explain)
app.command(epilog=diff.EXAMPLES)(diff.diff)
app.command("describe", epilog=describe.EXAMPLES)(describe.describe_)
app.command(epilog=plot.EXAMPLES)(plot.plot)


def _print_report(report: comparison.Report) -> None:
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
    print_outside(report.outside, report.not_compared)
    for note in report.notes:
        out.print(f"note: {escape(note)}", highlight=False)
    print_verdict(report.same, report.verdict)


def _print_layouts(as_json: bool) -> None:
    rows = {
        layout.name: {e.key: {"axes": e.axes, "leaves": e.leaves} for e in layout.entries}
        for layout in registry.LAYOUTS
    }
    if as_json:
        print_json(rows)
        return
    for layout in registry.LAYOUTS:
        table = Table(title=f"{layout.name}: {layout.about}", title_justify="left")
        for column in ("key", "axes", "holds"):
            table.add_column(column, overflow="fold")
        for entry in layout.entries:
            table.add_row(entry.key, entry.axes, ", ".join(entry.leaves))
        out.print(table)
