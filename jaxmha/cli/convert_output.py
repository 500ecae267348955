"""Prints the result of `jaxmha convert`."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from jaxmha import checkpoint
from jaxmha.cli.console import GOOD, SHOWN, err, escape, out, print_line, print_some, print_table
from jaxmha.converters.migrate.pipeline import Conversion
from jaxmha.converters.verify import report


def print_conversion(
    destination: Path, done: Conversion, checked: report.ConversionReport | None
) -> None:
    named = [[escape(cell or "(top)") for cell in row] for row in done.blocks]
    rows = [(source, target, before, after) for source, before, target, after in named]
    columns = ("from", "to", "layout of the source", "layout")
    if rows:
        print_table(escape(str(destination)), columns, rows, names=2)
    for (count, where), blocks in Counter(x[1:] for x in done.heads).items():
        what = "1 block" if blocks == 1 else f"{blocks} blocks"
        print_line(escape(f"heads {count} ({where}): {what}"))
    dtype = done.plan.dtype if done.plan else None
    kinds = ", ".join(
        f"{n} {kind}" for kind, n in Counter(k for k, *_ in done.other_layers).items()
    )
    copied = done.plan is not None and not done.plan.to
    print_line(
        f"no layout was named: {len(done.carried)} tensors copied under their names"
        + (f", cast to {dtype}" if dtype else "")
        if copied
        else f"{len(done.blocks)} attention blocks converted"
        + (f"; other layers: {kinds}" if kinds else "")
        + f"; {len(done.carried)} other tensors carried over unchanged"
        + (f" but for the cast to {dtype}" if dtype else "")
    )
    if not done.files or not done.files[-1].endswith(destination.name):
        print_line(f"{len(done.files)} shards of this part, no index yet")
    elif len(done.files) > 1:
        print_line(f"{len(done.files) - 1} shards and their index")
    if done.kept:
        print_line(f"kept from an earlier run, and checked: {len(done.kept)} shards")
    _print_losses(done.losses)
    print_some([] if copied else [f"carried over: {escape(name)}" for name in done.carried])
    for note in done.notes if checked is None else checked.notes:
        print_line(f"note: {escape(note)}")
    if checked is None:
        print_line("[yellow]not compared[/yellow] with the source: `jaxmha verify` does that")
        return
    if not checked.same:
        err.print(escape(str(checked), keep="\n"), highlight=False)
        out.print("[red]the files differ[/red]")
        return
    errors = [error for one in checked.modules for pair in one.errors.values() for error in pair]
    ran = f"; forward errors up to {max(errors):.3g} rounding floors ({GOOD})" if errors else ""
    tensors = checked.target["tensors"]
    if done.unchecked:
        print_line(
            f"[yellow]not verified[/yellow]: {tensors} tensors are identical, but "
            + escape("; ".join(done.unchecked))
        )
        return
    cast = f" to the source cast to {checked.dtype}" if checked.dtype else ""
    print_line(f"[green]verified[/green]: {tensors} tensors identical{cast}{ran}")


def _print_losses(losses: Mapping[str, checkpoint.Loss]) -> None:
    """Prints the tensors that the cast changed most."""
    lossy = {name: loss for name, loss in losses.items() if not loss.exact}
    if losses and not lossy:
        print_line("the cast lost nothing")
    if not lossy:
        return
    table = Table(title="lost by the cast: largest relative error, and how many became 0")
    for column in ("tensor", "from", "to", "error", "became 0"):
        table.add_column(column, overflow="fold")
    worst = sorted(lossy.items(), key=lambda x: (-x[1].underflowed, -x[1].max_relative_error))
    for name, loss in worst[:SHOWN]:
        error = f"{loss.max_relative_error:.3g}"
        table.add_row(escape(name), loss.before, loss.after, error, str(loss.underflowed))
    out.print(table)
    if (more := len(lossy) - SHOWN) > 0:
        print_line(f"and {more} more (--json lists all)")
