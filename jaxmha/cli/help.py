"""Commands whose help shows no value after a flag, and breaks lines between choices."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from typer.core import TyperCommand, TyperGroup, TyperOption

if TYPE_CHECKING:
    from typer import Context


@contextmanager
def _readable(command: TyperCommand | TyperGroup, ctx: "Context") -> Iterator[None]:
    """Within the context, help shows choices as `a | b`, and no value after a flag."""
    options = [x for x in command.get_params(ctx) if isinstance(x, TyperOption)]
    kept = [option.metavar for option in options]
    for option in options:
        shown = getattr(option, "display_type", None)  # older versions of Typer lack this method
        if option.is_flag:
            option.metavar = ""
        elif option.metavar is None and shown is not None and "|" in (text := str(shown(ctx))):
            option.metavar = text.replace("|", " | ")
    try:
        yield
    finally:
        for option, metavar in zip(options, kept, strict=True):
            option.metavar = metavar


class Command(TyperCommand):
    """One command."""

    def format_help(self, ctx: "Context", formatter: object) -> None:  # type: ignore[override]
        with _readable(self, ctx):
            super().format_help(ctx, formatter)  # type: ignore[arg-type]


class Group(TyperGroup):
    """The table of commands."""

    def format_help(self, ctx: "Context", formatter: object) -> None:  # type: ignore[override]
        with _readable(self, ctx):
            super().format_help(ctx, formatter)  # type: ignore[arg-type]
