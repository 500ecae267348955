"""The frame of every experiment: measure, store results and figures, print the page.

An experiment is a folder `<name>/` with `__main__.py`, which ends in `frame.main(EXPERIMENT)`, and
the template `page.md` (see `experiments.pages`).
"""

import importlib
import json
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar
from unittest import mock

from experiments.pages import Page
from jaxmha.bench import machine

HERE = Path(__file__).parent
Found = dict[str, Any]
# File -> a function that draws it, an .svg or a .png, whose docstring says what one sees.
Figures = Mapping[str, Callable[[Found], Any]]
NOTHING: Any = MappingProxyType({})
Item = TypeVar("Item")


class Experiment(NamedTuple):
    """One experiment and its command.

    Attributes:
      name: of its folder.
      about: what `--help` says, and examples of command lines.
      measure: from the options to the results, for JSON. A ValueError, an OSError or a missing package ends with 2 and its message.
      options: flag -> arguments of `add_argument`, next to --json and --write.
      figures: drawn from the results.
      seed: that the draws start from, if it is no option; None where nothing is drawn.
      packages: with a version in the results, next to those of every record.
      result: path of the results in this folder, if not `<name>/results.json`.
      fine: whether the exit code is 0 and not 1.
    """

    name: str
    about: str | None
    examples: str
    measure: Callable[[Namespace], Found]
    options: Mapping[str, dict[str, Any]] = NOTHING
    figures: Figures = NOTHING
    seed: int | str | None = None
    packages: Sequence[str] = ()
    result: str = ""
    fine: Callable[[Found], bool] = lambda found: True

    @property
    def path(self) -> Path:
        """Of the results."""
        return HERE / (self.result or f"{self.name}/results.json")


def of(measure: Callable[[Namespace], Found], examples: str, **settings: Any) -> Experiment:
    """The experiment whose `__main__` has this function: named as its folder, about its docstring."""
    module = sys.modules[measure.__module__]
    name = Path(str(module.__file__)).parent.name
    return Experiment(name, module.__doc__, examples, measure, **settings)


def main(experiment: Experiment) -> NoReturn:
    """`run`, then the end of the process with its exit code."""
    sys.exit(run(experiment))


def bare(name: str, about: str | None, examples: str) -> ArgumentParser:
    """The argument parser of `python -m experiments.<name>`, without options."""
    return ArgumentParser(
        prog=f"python -m experiments.{name}",
        description=about,
        epilog=examples,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parser(name: str, about: str | None, examples: str) -> ArgumentParser:
    """The same with --json, which prints the results as JSON, and --write, which stores them.

    >>> parser("x", "Why?", "examples: none").parse_args(["--json"])
    Namespace(json=True, write=False)
    """
    made = bare(name, about, examples)
    made.add_argument("--json", action="store_true", help="print the results as JSON")
    made.add_argument("--write", action="store_true", help="write the results and figures")
    return made


def number(default: float, about: str = "", least: int = 0) -> dict[str, Any]:
    """An option that takes a number of the type of its default.

    >>> number(7, "rounds", least=1)["help"]
    'rounds; default 7'
    """

    def parsed(text: str) -> float:
        value = type(default)(text)
        if value < least:
            raise ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    parsed.__name__ = type(default).__name__  # for messages
    about = f"{about}; default {default}" if about else f"default {default}"
    return {"type": parsed, "default": default, "help": about}


def run(experiment: Experiment, arguments: list[str] | None = None) -> int:
    """The whole command: 0; 1 where what was found is not fine; exits with 2 on bad input."""
    from experiments import records  # JAX too: the benchmarks' own process stays small

    made = parser(experiment.name, experiment.about, experiment.examples)
    for flag, given in experiment.options.items():
        made.add_argument(flag, **given)
    chosen = made.parse_args(arguments)
    try:
        if chosen.write:
            writable(experiment.path.parent, [experiment.path.name])
        found = experiment.measure(chosen)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        made.exit(2, f"{error}\n")
    except KeyboardInterrupt:
        made.exit(130, "stopped" + "; --resume goes on" * hasattr(chosen, "resume") + "\n")
    sources = found.pop("worker_sources", {}) | records.loaded()  # before the page is loaded
    page = Page(f"{experiment.name}/page.md")
    if chosen.write:
        store(experiment, found, page.command, getattr(chosen, "seed", experiment.seed), sources)
    if chosen.json:
        print(json.dumps(found, indent=1))
    else:
        show(page.text(found))
    return 0 if experiment.fine(found) else 1


def store(experiment: Experiment, found: Found, command: str, seed: Any, sources: Any) -> None:
    """Writes the results, then the figures made of them."""
    from experiments import records

    found["versions"] = machine.versions() | {n: version(n) for n in experiment.packages}
    records.save(experiment.path, found, command=command, seed=seed, sources=sources)
    for name, draw in experiment.figures.items():
        from experiments import figures

        with figures.style() if name.endswith(".svg") else nullcontext():
            figure = draw(records.load(experiment.path))
        about = (draw.__doc__ or "").removesuffix(".")
        figures.save(figure, experiment.path.parent / name, about=about)


def show(text: str, width: int = 116) -> None:
    """Prints Markdown on the terminal, at least `width` columns wide."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    console.width = max(console.width, width)  # the widest tables need it
    console.print(Markdown(text, hyperlinks=False))


@contextmanager
def bars(**totals: int | None) -> Iterator[Callable[..., None]]:
    """Progress on stderr: a bar for each name, which `tick(name, text)` moves by one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Left())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as progress:
        tasks = {name: progress.add_task(name, total=total) for name, total in totals.items()}

        def tick(name: str, text: str = "") -> None:
            progress.update(tasks[name], advance=1, description=text or name)
            if text and not console.is_terminal:
                print(text, file=sys.stderr, flush=True)

        yield tick


def each(tick: Callable[[str], None], name: str, items: Iterable[Item]) -> Iterator[Item]:
    """The items; the bar of a name moves after each."""
    for item in items:
        yield item
        tick(name)


def alone(
    function: Callable[..., Item], *arguments: Any, environment: Mapping[str, str] = NOTHING
) -> Item:
    """Runs a function in a process of its own, which also starts with this environment; returns its result."""
    command = sys.modules["__main__"].__spec__
    if function.__module__ == "__main__" and command:  # a name that the other process cannot import
        function = getattr(importlib.import_module(command.name), function.__name__)
    with (
        mock.patch.dict(os.environ, environment),
        ProcessPoolExecutor(1, get_context("spawn"), os.dup2, initargs=(2, 1)) as pool,
    ):
        return pool.submit(function, *arguments).result()


def writable(folder: Path, files: Sequence[str] = ()) -> None:
    """Raises ValueError where such files cannot be put into a folder: asked before measuring."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{folder}: results cannot be stored there: {error.strerror}") from error
    for name in files:
        if (folder / name).exists() and not (folder / name).is_file():
            raise ValueError(f"{folder / name}: results cannot be stored there: it is no file")
