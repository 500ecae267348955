"""What the commands of experiments have in common."""

import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments import folders, records


def parser(name: str, about: str | None, examples: str) -> ArgumentParser:
    """Of `python -m experiments.<name>`: --json prints the results as JSON, --write stores them.

    >>> parser("x", "Why?", "examples: none").parse_args(["--json"])
    Namespace(json=True, write=False)
    """
    made = ArgumentParser(
        prog=f"python -m experiments.{name}",
        description=about,
        epilog=examples,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--json", action="store_true", help="print the results as JSON")
    made.add_argument("--write", action="store_true", help="write results.json and the figures")
    return made


def in_rounds(
    folder: Path,
    about: str | None,
    examples: str,
    arguments: Sequence[str] | None,
    collect: Callable[[int], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
    *,
    rounds: int,
) -> None:
    """The whole command of an experiment that only times: measures, prints, writes where asked.

    Args:
      folder: of the experiment.
      about, examples: of its help.
      arguments: of the command line.
      collect: what is found in so many rounds; a ValueError of it is said, and ends with 2.
      show: prints what was found.
      rounds: how many, where none are asked for.
    """
    made = parser(folder.name, about, examples)
    made.add_argument("--rounds", type=int, default=rounds, help=f"default {rounds}")
    chosen = made.parse_args(arguments)
    if chosen.rounds < 1:
        made.exit(2, f"--rounds must be at least 1, got {chosen.rounds}\n")
    try:
        if chosen.write:
            folders.check(folder, ["results.json"])
        found = collect(chosen.rounds)
    except ValueError as error:
        made.exit(2, f"{error}\n")
    print(json.dumps(found, indent=1)) if chosen.json else show(found)
    if chosen.write:
        again = f"{made.prog} --write"
        records.save(folder / "results.json", found, command=again, seed="T of the case")
