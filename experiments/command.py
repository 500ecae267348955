"""What the commands of experiments have in common."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter


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
