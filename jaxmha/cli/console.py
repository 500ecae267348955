"""Consoles, progress bars, output and error handling that all commands share."""

import json
import math
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import typer
from rich import markup
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
    track,
)
from rich.table import Table

from jaxmha.checkpoint import atomic
from jaxmha.checkpoint.errors import printable
from jaxmha.checkpoint.formats import table

Item = TypeVar("Item")
_NAMES = 60  # characters of all columns of names, in a terminal of 80
GOOD = "1 is the least, similar in both files is good"  # of errors in rounding floors
SHOWN = 10  # names listed before "and more"
_PIPED = 100_000  # columns of a pipe or file: every line is shorter


def _console(*, stderr: bool = False) -> Console:
    """A console that breaks no line in a pipe or file, where scripts look for whole names.

    COLUMNS in the environment sets another width.
    """
    console = Console(stderr=stderr, emoji=False)
    if not console.file.isatty() and "COLUMNS" not in os.environ:
        console.width = _PIPED
    return console


out, err = _console(), _console(stderr=True)


def escape(text: str, keep: str = "") -> str:
    """Escapes names from files, so that neither rich nor the terminal interprets them."""
    return markup.escape(printable(text, keep))


# An argument of a function and its option, as errors name both: dtype='float32' (--dtype float32).
_ARGUMENT = re.compile(r"\b[a-z_]+=(?:'[^']*'|\w*) \((--[^()]+)\)")


def for_command(message: str) -> str:
    """A message without the arguments that only callers from Python have.

    >>> for_command("pass num_heads= (--num-heads)")
    'pass --num-heads'
    """
    return _ARGUMENT.sub(r"\1", message)


@contextmanager
def one_message() -> Iterator[None]:
    """Turns every exception into one message and exit code 2, without a traceback.

    JAXMHA_DEBUG=1 in the environment prints the traceback before the message.
    """
    try:
        yield
    except typer.Exit:
        raise
    except Exception as error:  # noqa: BLE001 (no traceback for users)
        if os.environ.get("JAXMHA_DEBUG"):
            traceback.print_exc()
        expected = isinstance(error, ValueError | TypeError | OSError | ImportError)
        what = (
            for_command(str(error)) if expected else f"unexpected {type(error).__name__}: {error}"
        )
        more = "" if expected else " (JAXMHA_DEBUG=1 shows where)"
        err.print(f"[red]error:[/red] {escape(what)}{more}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None


def check_text(path: Path, force: bool, sources: Sequence[Path]) -> None:
    """Raises ValueError unless `put_text` can write this file; call it before long work."""
    if table.by_suffix(path) is not None:
        raise ValueError(
            f"{path}: refusing to write text to a file named as a checkpoint: choose another suffix"
        )
    if path.exists() and not path.is_file():
        raise ValueError(
            f"{path}: expected the path of a file to write, and this is a folder, device or pipe: "
            "choose another name (--json prints on standard output)"
        )
    check_place(path, force, sources)


def check_place(path: Path, force: bool, sources: Sequence[Path]) -> None:
    """Raises an error if the folder of the path is missing or takes no file, or if the path exists
    (without `force`) or overlaps one of `sources`."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{path}: there is no such folder")
    if path.is_file() or not path.exists():  # else a device or a pipe, whose folder takes no files
        empty = folder / f".{uuid4().hex}"
        try:
            empty.open("xb").close()
            empty.unlink()
        except OSError as error:
            raise ValueError(f"{path}: no file can be written there: {error.strerror}") from error
    with atomic.typed(path):
        atomic.check_target(path, force, sources)


def put_text(path: Path, text: str, force: bool, sources: Sequence[Path]) -> None:
    """Writes a text file in one step; refuses to overwrite the checkpoints that it describes."""
    print_notes(atomic.replace_by(path, text.encode(), force=force, sources=sources), err)


def print_json(data: object) -> None:
    """Prints data as JSON on stdout."""
    json.dump(finite(data), sys.stdout, indent=2, allow_nan=False)
    print()


def finite(data: object) -> object:
    """Replaces NaN and infinity by null, because JSON has neither."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def items(what: str, quiet: bool) -> Callable[[Sequence[Item]], Iterable[Item]]:
    """A progress bar over a sequence; silent if stderr is not a terminal."""
    silent = quiet or not err.is_terminal
    return lambda work: track(work, what, console=err, transient=True, disable=silent)


@contextmanager
def byte_bar(what: str, quiet: bool, passes: int = 1) -> Iterator[Callable[[int, int], None]]:
    """A progress bar of bytes with their rate; silent if stderr is not a terminal.

    Yields a function of the bytes done and in total. `passes`: how often these count each byte,
    such as 2 for writing and reading back; the bar shows each byte once.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    silent = quiet or not err.is_terminal
    with Progress(*columns, console=err, transient=True, disable=silent) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done // passes, total=total // passes)


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, names: int = 1
) -> None:
    """Prints rows of markup as a table. A column with the same value in all rows moves to a line
    below the table.

    `names`: number of columns at the left that hold names; only very long names are broken.
    """
    shared = [n for n in range(names, len(columns)) if len({row[n] for row in rows}) == 1]
    shown = [n for n in range(len(columns)) if n not in shared]
    table = Table()
    for n in shown:
        longest = max((len(row[n]) for row in rows), default=0) if n < names else 0
        table.add_column(columns[n], overflow="fold", min_width=min(longest, _NAMES // names))
    for row in rows:
        table.add_row(*(row[n] for n in shown))
    if title:
        print_line(title)
    out.print(table)
    if shared:
        print_line(f"in all: {'; '.join(f'{columns[n]} {rows[0][n]}' for n in shared)}")


def print_line(text: str, console: Console = out) -> None:
    """Prints one line of markup, on a terminal wrapped between words, so that names stay whole."""
    if console.is_terminal:  # rich itself breaks words that are longer than a line
        text = "\n".join(
            textwrap.fill(line, console.width, break_long_words=False, break_on_hyphens=False)
            for line in text.split("\n")
        )
    console.print(text, soft_wrap=True, highlight=False)


def print_notes(notes: Sequence[str], console: Console = out) -> None:
    """Prints one line for each note."""
    for note in notes:
        print_line(f"note: {escape(note)}", console)


def print_outside(
    differing: Mapping[str, str], left: Sequence[object], facts: Sequence[str]
) -> None:
    """Prints tensors outside attention and facts that differ, and tensors that were not compared."""
    print_some([f"[red]differs, in no tensor:[/red] {escape(fact)}" for fact in facts])
    lines = [
        (f"[red]differs, outside attention:[/red] {escape(n)}: {escape(how)}")
        for n, how in differing.items()
    ]
    print_some(lines)
    print_some([f"[yellow]not compared:[/yellow] {escape(str(one))}" for one in left])


def print_some(lines: Sequence[str]) -> None:
    """Prints the first lines, and the number of the others."""
    for line in lines[:SHOWN]:
        print_line(line)
    if (more := len(lines) - SHOWN) > 0:
        print_line(f"and {more} more (--json lists all)")


def print_verdict(same: bool, verdict: str) -> None:
    """Prints the last line of a comparison."""
    colour = "green" if same else "red"
    print_line(f"[{colour}]{escape(verdict)}[/{colour}]")
