"""`jaxmha match`: a plan that fills a model from a checkpoint, and the filled arrays as a file."""

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxmha.checkpoint import toml_text
from jaxmha.cli import functions, like
from jaxmha.cli.console import (
    check_text,
    err,
    escape,
    for_command,
    one_message,
    out,
    print_json,
    put_text,
)
from jaxmha.cli.options import DtypeName, Json, option
from jaxmha.converters import matching
from jaxmha.converters.matching import filling, loading, model_inputs

EXAMPLES = (
    "Examples:\n\n  jaxmha match bert/ my_model.py:build --save plan.toml\n\n"
    "  jaxmha match bert/ my_model:build --plan plan.toml --to mine.safetensors\n\n"
    "  jaxmha match model.safetensors template.npz\n\n"
    "  jaxmha match hf://org/model my_model.py:build --to mine.safetensors\n\n"
    "  jaxmha match theirs.py:build mine.py:build --inputs mine.py:inputs"
)

KeepUnused = Annotated[
    bool, option("--keep-unused", "Leave out arrays that the model does not have.")
]
Concatenated = Annotated[
    bool,
    option(
        "--concatenated",
        "Packed projections follow one another: all of query, then key, then value.",
    ),
]


def command(
    source: Annotated[
        str,
        typer.Argument(
            help="A checkpoint, a folder of save_pretrained, hf://ORGANISATION/MODEL@REVISION, or "
            "MODULE:FUNCTION that builds the model."
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
    unused: KeepUnused = False,
    missing: Annotated[
        bool,
        option(
            "--keep-missing",
            "Where the plan has no line for an array of the model, keep the model's own values.",
        ),
    ] = False,
    concatenated: Concatenated = False,
    inputs: Annotated[
        str | None,
        option(
            "--inputs",
            "MODULE:FUNCTION that draws the arguments of both models from a NumPy generator: the "
            "model is filled, both run in float64 (Keras: float32), and the first layer that departs is "
            "named.",
        ),
    ] = None,
    dtype: Annotated[
        DtypeName | None,
        option("--dtype", "Dtype of every floating array, rounded where it has fewer digits."),
    ] = None,
    force: Annotated[bool, option("--force", "Overwrite files.")] = False,
    as_json: Json = False,
) -> None:
    """Match a checkpoint with your own model, and say which array goes where, and why.

    Exit code 1: something is asked, arrays of the checkpoint are left over, or a comparison failed.
    """
    with one_message():
        if plan is not None and concatenated:
            raise ValueError("--concatenated is for a new plan: edit the arrows of the given one")
        given = functions.source_of(source)
        files = [given] if isinstance(given, Path) else []
        if save is not None:
            check_text(save, force, files)
        draw = None if inputs is None else functions.found(inputs)
        model = functions.built(target)
        if draw is not None:
            model_inputs.check(draw, {"source": given, "target": model})
        if plan is None:
            made = matching.match(given, model, packing="concatenated" if concatenated else "ask")
        else:
            given_plan = matching.Plan.from_toml(toml_text.read(plan))
            made = loading.with_unused(given_plan, given, model)
        if save is not None:
            put_text(save, made.to_toml(), force, files)
        print_plan(made, as_json)
        refuse_rest(made, unused)
        rest = like.policies(unused, missing)
        kind = None if dtype is None else dtype.value
        if to is not None:
            kept = {"unused": unused, "missing": missing}
            like.write(given, to, model, made, quiet=as_json, dtype=kind, force=force, **kept)
            like.show(matching.prove(given, to, made, **rest), as_json)
        if draw is not None:
            with like.prepared(model, given, made, dtype=kind, **rest) as ready:
                model = filling.fill(model, ready)
            proof = matching.prove(given, model, made, inputs=draw, **rest)
            like.show(proof, as_json)


def print_plan(plan: matching.Plan, as_json: bool) -> None:
    if as_json:
        print_json(_as_json(plan))
    else:
        out.print(escape(for_command(str(plan)), keep="\n"), soft_wrap=True, highlight=False)


def refuse_rest(plan: matching.Plan, unused: bool) -> None:
    """Ends the command with exit code 1 if a question is open or source arrays are left over.

    `unused`: True allows arrays that are left over.
    """
    if plan.questions or (plan.unused and not unused):
        asked = f"{len(plan.questions)} questions, {len(plan.unused)} arrays left over"
        edit = "answer the questions in the plan (jaxmha match --save) and pass it to jaxmha match --plan"
        leave = "--keep-unused leaves out arrays that no line uses"
        advice = [edit] * bool(plan.questions) + [leave] * bool(plan.unused and not unused)
        err.print(f"{asked}: {'; '.join(advice)}", soft_wrap=True)
        raise typer.Exit(1)


def _as_json(plan: matching.Plan) -> dict[str, Any]:
    return {
        "lines": [vars(line) for line in plan.lines],
        "questions": [
            {
                "target": one.target,
                "candidates": one.candidates,
                "reason": one.reason,
                "line": one.line,
                "arrays": one.arrays,
            }
            for one in plan.questions
        ],
        "unused": plan.unused,
        "buffers": plan.ignored,
        "notes": plan.notes,
    }
