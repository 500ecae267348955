"""The Typer application: the table of commands.

Exit codes: 0 success; 1 the files differ, or were not fully compared; 2 bad input.
"""

from typing import Annotated

import typer

from jaxmha import __version__
from jaxmha.cli import (
    bench,
    convert,
    describe,
    diff,
    explain,
    inspect,
    layouts,
    match,
    plan,
    plot,
    recipes,
    verify,
)
from jaxmha.cli.console import out
from jaxmha.cli.help import Command, Group
from jaxmha.cli.options import suffixes

# One module per command, with its `command` and EXAMPLES, in the order of `--help`.
COMMANDS = {
    "inspect": inspect,
    "match": match,
    "plan": plan,
    "convert": convert,
    "verify": verify,
    "explain": explain,
    "bench": bench,
    "diff": diff,
    "describe": describe,
    "plot": plot,
    "layouts": layouts,
    "recipes": recipes,
}

app = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Converts checkpoints between torch, Keras, Flax and Hugging Face: attention and the other "
    "layers.\n\n"
    f"Files: {suffixes()}. Nothing in a file is ever executed.\n\n"
    "Exit codes: 0 success, 1 the two sources differ or a part was not compared, 2 bad input.",
)


def _print_version(wanted: bool | None) -> None:
    if wanted:
        out.print(f"jaxmha {__version__}", highlight=False)
        raise typer.Exit()


@app.callback()
def main(
    version: Annotated[
        bool | None,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = None,
) -> None:
    pass


for _name, _module in COMMANDS.items():
    app.command(_name, cls=Command, epilog=_module.EXAMPLES)(_module.command)
