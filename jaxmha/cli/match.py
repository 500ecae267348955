"""`jaxmha match`: the plan that fills a model from a checkpoint, and the filled arrays as a file."""

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxmha import checkpoint
from jaxmha.cli.console import (
    byte_bar,
    check_text,
    err,
    escape,
    one_message,
    out,
    print_json,
    put_text,
)
from jaxmha.cli.options import Json, option
from jaxmha.converters import matching
from jaxmha.converters.matching import loading

EXAMPLES = (
    "Examples:\n\n  jaxmha match bert/ my_model.py:build --save plan.toml\n\n"
    "  jaxmha match bert/ my_model:build --plan plan.toml --to mine.safetensors\n\n"
    "  jaxmha match model.safetensors template.npz\n\n"
    "  jaxmha match hf://org/model my_model.py:build --to mine.safetensors"
)


def command(
    source: Annotated[
        Path,
        typer.Argument(
            help="A checkpoint, a folder of save_pretrained, or hf://ORGANISATION/MODEL[@REVISION]."
        ),
    ],
    target: Annotated[
        str,
        typer.Argument(
            help="A file of the model, or MODULE:FUNCTION that builds it; the module is imported "
            "and the function is run."
        ),
    ],
    plan: Annotated[
        Path | None,
        option("--plan", "A plan, instead of a new one."),
    ] = None,
    save: Annotated[Path | None, option("--save", "Write the plan here.")] = None,
    to: Annotated[
        Path | None,
        option("--to", "Write the model's arrays here."),
    ] = None,
    unused: Annotated[
        bool, option("--keep-unused", "Leave out arrays that the model does not have.")
    ] = False,
    concatenated: Annotated[
        bool,
        option(
            "--concatenated",
            "Packed projections follow one another: all of query, then key, then value.",
        ),
    ] = False,
    force: Annotated[bool, option("--force", "Overwrite files.")] = False,
    as_json: Json = False,
) -> None:
    """Match a checkpoint with your own model, and say which array goes where, and why.

    Exit code 1: something is asked, or arrays of the checkpoint are left over.
    """
    with one_message():
        if save is not None:
            check_text(save, force, [source])
        model = built(target)
        if plan is None:
            made = matching.match(source, model, packing="concatenated" if concatenated else "ask")
        else:
            made = matching.Plan.from_toml(plan.read_text(encoding="utf-8"))
        if as_json:
            print_json(_as_json(made))
        else:
            out.print(escape(str(made), keep="\n"), soft_wrap=True, highlight=False)
        if save is not None:
            put_text(save, made.to_toml(), force, [source])
        left = bool(made.unused) and not unused
        if made.questions or left:
            asked = f"{len(made.questions)} questions, {len(made.unused)} arrays left over"
            err.print(f"{asked}: edit the plan (--save) and pass it with --plan", highlight=False)
            raise typer.Exit(1)
        if to is not None:
            policy = "keep" if unused else "refuse"
            with (
                loading.prepared(model, source, made, unused=policy) as ready,
                byte_bar("writing and reading back", as_json, passes=2) as progress,
            ):
                checkpoint.write(to, ready, force=force, source=source, progress=progress)


def built(target: str) -> Any:
    """The file, or the return value of the function named after a colon."""
    module, colon, function = target.rpartition(":")
    if not colon or Path(target).exists():
        if not Path(target).exists():
            raise ValueError(f"{target}: expected a file, or MODULE:FUNCTION that builds the model")
        return Path(target)
    name = module.removesuffix(".py").replace(os.sep, ".")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(name), function, None)
    finally:
        sys.path.pop(0)
    if found is None:
        raise ValueError(f"{target}: {name} has no function {function}")
    return found()


def _as_json(plan: matching.Plan) -> dict[str, Any]:
    return {
        "lines": [vars(line) for line in plan.lines],
        "questions": [vars(question) for question in plan.questions],
        "unused": plan.unused,
        "buffers": plan.ignored,
        "notes": plan.notes,
    }
