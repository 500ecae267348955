"""`jaxmha plan`: prints or writes the plan that `jaxmha convert` would execute."""

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxmha import checkpoint
from jaxmha.cli.console import (
    check_text,
    escape,
    one_message,
    print_json,
    print_line,
    print_notes,
    put_text,
)
from jaxmha.cli.options import DtypeName, Json, NumHeads, Source, layout_name, option
from jaxmha.converters.layout.fill import FILLS
from jaxmha.converters.migrate import pipeline, plan_toml
from jaxmha.converters.migrate.plans import OTHERS, Plan
from jaxmha.converters.migrate.resolved import Resolved

EXAMPLES = (
    "Examples:\n\n  jaxmha plan model.safetensors --to flax\n\n"
    "  jaxmha plan model.safetensors --to flax --output plan.toml"
)
OthersName = Enum("OthersName", {x: x for x in OTHERS}, type=str)  # type: ignore[misc]
To = typer.Option(callback=layout_name, metavar="LAYOUT", help="Layout of the attention blocks.")
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        callback=layout_name,
        metavar="LAYOUT",
        help="Convert only blocks of this layout; carry the rest over.",
    ),
]
Dtype = Annotated[
    DtypeName | None, option("--dtype", "Cast every floating tensor, and print the loss.")
]
Others = Annotated[
    OthersName | None,
    option(
        "--others",
        "Tensors that are not understood: pass (default) carries them over by their names.",
        show_default=False,
    ),
]
AttentionOnly = Annotated[
    bool, option("--attention-only", "Convert attention, and carry all other tensors over.")
]
FoldScale = Annotated[
    bool,
    option(
        "--fold-scale",
        "If the layout has another scale of the logits (T5: 1), multiply the queries by the ratio.",
    ),
]
FillBiasName = Enum("FillBiasName", {x: x for x in FILLS}, type=str)  # type: ignore[misc]
FillBias = Annotated[
    FillBiasName | None,
    option(
        "--fill-bias",
        "If the layout requires biases that a block lacks (Whisper's keys, Qwen2's output): zeros adds "
        "biases of zeros, which change nothing.",
        show_default=False,
    ),
]


@dataclass(frozen=True)
class Choices:
    """The options that determine the plan for every tensor, common to `plan` and `convert`."""

    to: str | None
    from_: str | None
    num_heads: int | None
    dtype: DtypeName | None
    others: OthersName | None
    attention_only: bool
    fold_scale: bool
    fill_bias: FillBiasName | None

    @property
    def beyond_layout(self) -> bool:
        """True if an option other than --to was given."""
        given = (self.from_, self.num_heads, self.dtype, self.others, self.fill_bias)
        return any(given) or self.attention_only or self.fold_scale

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments of `pipeline.plan` and `pipeline.convert`."""
        return vars(self) | {
            "dtype": self.dtype and self.dtype.value,
            "others": "pass" if self.others is None else self.others.value,
            "fill_bias": self.fill_bias and self.fill_bias.value,
        }

    def arguments(self) -> dict[str, Any]:
        """These options as arguments of the command line."""
        return {
            "--to": self.to,
            "--from": self.from_,
            "--num-heads": self.num_heads,
            "--dtype": self.dtype and self.dtype.value,
            "--others": self.others and self.others.value,
            "--attention-only": self.attention_only,
            "--fold-scale": self.fold_scale,
            "--fill-bias": self.fill_bias and self.fill_bias.value,
        }


def command(
    source: Source,
    to: Annotated[str, To],
    from_: From = None,
    num_heads: NumHeads = None,
    dtype: Dtype = None,
    others: Others = None,
    attention_only: AttentionOnly = False,
    fold_scale: FoldScale = False,
    fill_bias: FillBias = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the plan as TOML, to edit and to convert by."),
    ] = None,
    force: Annotated[bool, option("--force", "Overwrite the plan.")] = False,
    as_json: Json = False,
) -> None:
    """Print what convert would do to every tensor; with --output write it as an editable file."""
    with one_message():
        if output is not None:
            check_text(output, force, files_of(source))
        choices = Choices(
            to, from_, num_heads, dtype, others, attention_only, fold_scale, fill_bias
        )
        plan, resolved = pipeline.plan(source, **choices.keywords(), in_file=to.endswith("-file"))
        if output is not None:
            text = plan_toml.dumps(plan, dict(resolved.by_step))
            put_text(output, text, force, files_of(source))
        if as_json:
            print_json(_to_json(plan, resolved))
        else:
            _print(plan, resolved, output)


def files_of(source: Path) -> list[Path]:
    """Every file of a checkpoint."""
    with checkpoint.open(source) as file:
        return list(file.files)


def _to_json(plan: Plan, resolved: Resolved) -> dict[str, Any]:
    modules = [
        {
            "kind": step.kind,
            "layout": step.layout,
            "from": step.source,
            "to": step.target,
            "as": step.becomes,
            "num_heads": step.num_heads,
            "confidence": step.confidence,
            "why": step.why,
            "tensors": {
                name: {
                    "sources": one.sources,
                    "shape": one.info.shape,
                    "dtype": str(one.info.dtype),
                    "arrow": one.arrow,
                }
                for name, one in tensors.items()
            },
        }
        for step, tensors in resolved.by_step
    ]
    head = {
        key: getattr(plan, key) for key in ("source", "digest", "to", "others", "dtype", "notes")
    }
    return {**head, "modules": modules}


def _print(plan: Plan, resolved: Resolved, output: Path | None) -> None:
    for step, tensors in resolved.by_step:
        heads = f", {step.num_heads} heads ({step.heads_from})" * (step.num_heads is not None)
        sure = f" ({step.confidence}: {step.why})" if step.confidence else f" ({step.why})"
        kind = "carried over" if step.kind == "other" else f"{step.kind}, {step.layout}{heads}"
        start = f"{kind}: {step.source or '(top)'} -> {step.target or '(top)'}{sure}"
        print_line(escape(start))
        for name, one in tensors.items() if step.kind != "other" else ():
            arrow = f"  {one.arrow}" if one.arrow else ""
            line = f"    {', '.join(one.sources) or 'zeros'} -> {name} {one.info.shape}{arrow}"
            print_line(f"[dim]{escape(line)}[/dim]")
    counts = Counter(step.kind for step in plan.steps)
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    print_line(f"{len(resolved.made)} tensors: {kinds}")
    print_notes([*plan.notes, *resolved.notes])
    written = f"written to {output}" if output else "nothing is written without --output plan.toml"
    print_line(escape(written))
