"""`jaxmha recipes`: complete models in single files, to be copied and changed."""

import ast
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from jaxmha.checkpoint.atomic import replace_by
from jaxmha.cli.console import escape, one_message, out, print_json, print_line
from jaxmha.cli.options import Json
from jaxmha.converters.layout.base import guess

EXAMPLES = "Examples:\n\n  jaxmha recipes\n\n  jaxmha recipes copy llama ."


class Action(StrEnum):
    """A task of the command, which without one lists the recipes."""

    copy = "copy"


def command(
    action: Annotated[Action | None, typer.Argument(help="copy; none lists the recipes.")] = None,
    name: Annotated[str | None, typer.Argument(help="Name of a recipe.")] = None,
    folder: Annotated[Path, typer.Argument(help="Where to put the file.")] = Path(),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    as_json: Json = False,
) -> None:
    """List complete flax.nnx models, or copy one: BERT, GPT-2, Llama, Gemma, ViT, T5, Whisper.

    Each is one file that loads a folder of save_pretrained and trains; all but bert and vit decode
    with a cache.
    """
    with one_message():
        known = recipes()
        if action is None:
            _print(known, as_json)
            return
        if name not in known:
            got = "none" if name is None else repr(name)
            meant = "" if name is None else guess(name, list(known))
            raise ValueError(f"{meant}the recipes are {', '.join(known)}; got {got}")
        target = folder / f"{name}.py"
        replace_by(target, known[name].read_bytes(), force=force, mode=0o644)
        print_json({"file": str(target)}) if as_json else out.print(f"wrote {escape(str(target))}")


def recipes() -> dict[str, Path]:
    """Name of a recipe -> its file; in a checkout, the files are in `experiments/recipes`."""
    package = Path(__file__).parents[1]
    inside = package / "recipes"
    folder = inside if inside.is_dir() else package.parent / "experiments" / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.py")) if path.stem != "__init__"}


def _print(known: dict[str, Path], as_json: bool) -> None:
    about = {
        name: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
        for name, path in known.items()
    }
    if as_json:
        print_json(about)
        return
    table = Table("recipe", "lines", "what it is")
    for name, text in about.items():
        lines = known[name].read_text().count("\n")
        table.add_row(name, str(lines), escape(text.partition(":")[0]))
    out.print(table)
    print_line("`jaxmha recipes copy NAME FOLDER` writes one of them.")
