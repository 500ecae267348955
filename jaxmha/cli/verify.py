"""`jaxmha verify`: compares two checkpoints of any formats and layouts."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from jaxmha import checkpoint
from jaxmha.cli.console import (
    GOOD,
    check_text,
    escape,
    one_message,
    print_json,
    print_line,
    print_notes,
    print_outside,
    print_table,
    print_verdict,
    put_text,
)
from jaxmha.cli.options import DtypeName, Json, NumHeads, option
from jaxmha.cli.plan import files_of
from jaxmha.converters.migrate.plans import DTYPES
from jaxmha.converters.verify import comparison, comparison_report, page

EXAMPLES = (
    "Examples:\n\n  jaxmha verify model.safetensors flax.safetensors\n\n"
    "  jaxmha verify encoder.pt encoder.weights.h5 --num-heads 8 --json\n\n"
    "  jaxmha verify model.safetensors flax.safetensors --html report.html\n\n"
    "  jaxmha verify model.safetensors bfloat16.safetensors --dtype bfloat16"
)


def command(
    a: Annotated[Path, typer.Argument(help="One checkpoint.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="The other.", show_default=False)],
    num_heads: NumHeads = None,
    dtype: Annotated[
        DtypeName | None,
        option(
            "--dtype",
            "Round every floating tensor of the first to this dtype before the comparison, as "
            "`convert --dtype` does.",
        ),
    ] = None,
    as_json: Json = False,
    html: Annotated[
        Path | None,
        option("--html", "Write a page with pictures and digests; --force replaces the file."),
    ] = None,
    force: Annotated[bool, option("--force", "Overwrite the page.")] = False,
) -> None:
    """Compare two checkpoints: every tensor bit by bit, outputs of attention against float64.

    Other layers are read by the conventions of their frameworks, also in files without attention.
    Positions, masks, kinds and epsilons of norms are compared if a config.json of its model is next
    to each file. Exit code 1 if anything differs, or if a tensor has no counterpart and was not
    compared. Another dtype is a difference, even of the same values: --dtype rounds the first before
    the comparison.
    """
    cast = None if dtype is None else dtype.value
    with one_message():
        if html is not None:
            check_text(html, force, [*files_of(a), *files_of(b)])
        report = comparison.compare(a, b, num_heads=num_heads, dtype=cast)
        if html is not None:
            made = page.of_files(report, a, b, _again(a, b, num_heads, cast))
            put_text(html, made, force, [*files_of(a), *files_of(b)])
        if as_json:
            print_json(report.to_json())
        else:
            _print(report)
            if to := _rounded_to(report, b):
                print_line(f"next: {escape(_again(a, b, num_heads, to))}")
    raise typer.Exit(0 if report.same else 1)


def _again(a: Path, b: Path, num_heads: int | None, dtype: str | None) -> str:
    """The command line that repeats the comparison."""
    heads = () if num_heads is None else ("--num-heads", str(num_heads))
    cast = () if dtype is None else ("--dtype", dtype)
    return shlex.join(("jaxmha", "verify", str(a), str(b), *heads, *cast))


def _rounded_to(report: comparison_report.Report, second: Path) -> str | None:
    """The dtype with which the comparison may succeed: the second source is the first, rounded."""
    if not report.only_rounded:
        return None
    found = {block.dtypes[1] for block in report.blocks if not block.same}
    with checkpoint.open(second, dequantise=True, unbox=True) as file:
        found |= {str(file.info[name].dtype) for name in report.unlike[1]}
    return next((dtype for dtype in found if dtype in DTYPES and len(found) == 1), None)


def _print(report: comparison_report.Report) -> None:
    rows = []
    for block in report.blocks:
        weights = "identical (0 ULP)" if not block.differences else "equal but for zeros"
        if not all(difference.harmless for difference in block.differences):
            weights = "[red]differ[/red]"
        errors = [" / ".join(f"{e:.3g}" for e in pair) for pair in block.errors.values()]
        errors += ["not run"] * (3 - len(errors))  # for masks with which the block did not run
        layouts = " / ".join(dict.fromkeys(block.layouts))
        name = escape(block.a or block.b or "(top)")
        rows.append((name, layouts, str(block.num_heads), weights, *errors))
    columns = ("block", "layouts", "heads", "weights", "error, no mask", "padding", "causal")
    if rows:
        print_table("", columns, rows)
    if any(block.errors for block in report.blocks):
        print_line(f"errors: RMS against float64, in rounding floors of the output ({GOOD})")
    for block in report.blocks:
        if not block.same or block.not_finite:
            print_line(escape(str(block), keep="\n"))
    for name in report.only_a:
        print_line(f"only in the first: {escape(name)}")
    for name in report.only_b:
        print_line(f"only in the second: {escape(name)}")
    print_outside(report.outside, report.not_compared, report.facts)
    print_notes(report.notes)
    print_verdict(report.same, report.verdict)
