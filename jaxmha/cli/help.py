"""Commands that refuse empty paths; their help shows no value after a flag, and breaks lines between
choices. Errors of usage are whole in a pipe or file."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from typer import BadParameter
from typer.core import (
    DEFAULT_MARKUP_MODE,
    TyperArgument,
    TyperCommand,
    TyperGroup,
    TyperOption,
)

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

    def parse_args(self, ctx: "Context", args: list[str]) -> list[str]:  # type: ignore[override]
        """Refuses an empty path, which `Path` would turn into the working folder."""
        assert self.callback is not None
        hints = get_type_hints(inspect.unwrap(self.callback))
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        for one in self.params:
            kind = hints.get(str(one.name))
            is_path = kind is Path or Path in get_args(kind) or isinstance(one, TyperArgument)
            if is_path and given.get(str(one.name)) == "":
                problem = "it is empty: expected a path or name (is a variable of the shell unset?)"
                raise BadParameter(problem, param_hint=repr(one.opts[0]))
        return super().parse_args(ctx, args)

    def format_help(self, ctx: "Context", formatter: object) -> None:  # type: ignore[override]
        with _readable(self, ctx):
            super().format_help(ctx, formatter)  # type: ignore[arg-type]


class Group(TyperGroup):
    """The table of commands."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Runs a command. Only a terminal gets errors of usage in a box, which breaks words."""
        boxes = self.rich_markup_mode
        if not sys.stderr.isatty():
            self.rich_markup_mode = None
        try:
            return super().main(*args, **options)
        finally:
            self.rich_markup_mode = boxes

    def format_help(self, ctx: "Context", formatter: object) -> None:  # type: ignore[override]
        plain, self.rich_markup_mode = self.rich_markup_mode, DEFAULT_MARKUP_MODE
        try:
            with _readable(self, ctx):
                super().format_help(ctx, formatter)  # type: ignore[arg-type]
        finally:
            self.rich_markup_mode = plain
