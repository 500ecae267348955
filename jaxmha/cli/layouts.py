"""`jaxmha layouts`: the families of models, and the known layouts (`jaxmha inspect --layouts`)."""

from typing import Annotated

import typer
from rich.table import Table

from jaxmha.cli.console import escape, one_message, out, print_json
from jaxmha.cli.options import Json
from jaxmha.converters.discovery import families
from jaxmha.converters.layout import registry
from jaxmha.converters.layout.base import guess

EXAMPLES = (
    "Examples:\n\n  jaxmha layouts\n\n  jaxmha layouts qwen3 gemma2\n\n"
    "`jaxmha inspect --layouts` lists the keys and axes of every layout."
)


def command(
    model_types: Annotated[
        list[str] | None,
        typer.Argument(help="Values of model_type in config.json.  [default: all]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say for every model type of transformers what is converted, and what is refused and why."""
    with one_message():
        rows = families.checked()
        known = {row.model_type for row in rows}
        if unknown := [name for name in model_types or () if name not in known]:
            raise ValueError(
                f"model type {unknown[0]!r} was not checked: {guess(unknown[0], sorted(known))}"
                "`jaxmha layouts` lists all, and `jaxmha inspect` says what a file holds"
            )
        rows = [row for row in rows if not model_types or row.model_type in model_types]
        if as_json:
            print_json([row._asdict() for row in rows])
            return
        table = Table(title="model types of transformers", title_justify="left")
        for column in families.Checked._fields:
            table.add_column(column.replace("_", " "), overflow="fold")
        for row in rows:
            table.add_row(*map(escape, row))
        out.print(table)


def print_layouts(as_json: bool) -> None:
    """Prints a table of keys, axes and parameters for every layout, or all of them as JSON."""
    if as_json:
        rows = {
            layout.name: {e.key: {"axes": e.axes, "leaves": e.leaves} for e in layout.entries}
            for layout in registry.LAYOUTS
        }
        print_json(rows)
        return
    for layout in registry.LAYOUTS:
        table = Table(title=f"{layout.name}: {layout.about}", title_justify="left")
        for column in ("key", "axes", "holds"):
            table.add_column(column, overflow="fold")
        for entry in layout.entries:
            table.add_row(entry.key, entry.axes, ", ".join(entry.leaves))
        out.print(table)
