"""Prints the known layouts (`jaxmha inspect --layouts`)."""

from rich.table import Table

from jaxmha.cli.console import out, print_json
from jaxmha.converters.layout import registry


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
