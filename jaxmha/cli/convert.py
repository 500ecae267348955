"""`jaxmha plan` and `jaxmha convert`."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxmha import checkpoint
from jaxmha.cli.console import (
    DtypeName,
    Json,
    NumHeads,
    byte_bar,
    check_text,
    err,
    escape,
    finite,
    items,
    layout_name,
    one_message,
    out,
    print_json,
    put_text,
)
from jaxmha.cli.convert_output import print_conversion
from jaxmha.converters.migrate import multiprocess, pipeline, plan_toml
from jaxmha.converters.migrate.plans import OTHERS, Plan
from jaxmha.converters.migrate.resolved import Resolved
from jaxmha.converters.verify import report

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
}  # fmt: skip
Others = Enum("Others", {x: x for x in OTHERS}, type=str)  # type: ignore[misc]
Check = Enum("Check", {x: x for x in ("all", "weights", "none")}, type=str)  # type: ignore[misc]

Digest = Enum("Digest", {x: x for x in ("fast", *checkpoint.ALGORITHMS, "none")}, type=str)  # type: ignore[misc]

Source = Annotated[
    Path,
    typer.Argument(
        help="The checkpoint to read: a file, the index of a sharded one, the folder of either (as "
        "Hugging Face saves models), or a folder of orbax.",
        show_default=False,
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        callback=layout_name,
        metavar="LAYOUT",
        help="Take only blocks of this layout; the rest is carried over.",
    ),
]
Dtype = Annotated[
    DtypeName | None, typer.Option(help="Cast every floating tensor, and say what it cost.")
]
_OTHERS = "What is not understood: pass (default) carries it over by its name."
OptionalOthers = Annotated[
    Others | None, typer.Option("--others", help=_OTHERS, show_default=False)
]
AttentionOnly = Annotated[
    bool, typer.Option("--attention-only", help="Carry over everything but attention as it is.")
]

FoldScale = Annotated[
    bool,
    typer.Option(
        "--fold-scale",
        help="Where the layout has another scale of the logits (T5's is 1), multiply the queries.",
    ),
]


def plan(
    source: Source,
    to: Annotated[
        str,
        typer.Option(
            callback=layout_name, metavar="LAYOUT", help="Layout of the attention blocks."
        ),
    ],
    from_: From = None,
    num_heads: NumHeads = None,
    dtype: Dtype = None,
    others: OptionalOthers = None,
    attention_only: AttentionOnly = False,
    fold_scale: FoldScale = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the plan as TOML, to edit and convert by."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the plan.")] = False,
    as_json: Json = False,
) -> None:
    """Print what convert would do to every tensor; with --output write it as an editable file."""
    with one_message():
        if output is not None:
            check_text(output, force, _files(source))
        made, resolved = pipeline.plan(
            source,
            to=to,
            from_=from_,
            num_heads=num_heads,
            dtype=dtype.value if dtype else None,
            others=(others or Others("pass")).value,
            attention_only=attention_only,
            in_file=to.endswith("-file"),
            fold_scale=fold_scale,
        )
        if output is not None:
            text = plan_toml.dumps(made, dict(resolved.by_step))
            put_text(output, text, force, _files(source))
        if as_json:
            print_json(_plan_data(made, resolved))
            return
        _print_plan(made, resolved)
        where = (
            f"written to {output}" if output else "nothing is written without --output plan.toml"
        )
        out.print(escape(where), highlight=False)


def _plan_data(made: Plan, resolved: Resolved) -> dict[str, Any]:
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
        key: getattr(made, key) for key in ("source", "digest", "to", "others", "dtype", "notes")
    }
    return {**head, "modules": modules}


def _print_plan(made: Plan, resolved: Resolved) -> None:
    for step, tensors in resolved.by_step:
        heads = f", {step.num_heads} heads ({step.heads_from})" * (step.num_heads is not None)
        sure = f" ({step.confidence}: {step.why})" if step.confidence else f" ({step.why})"
        kind = "carried over" if step.kind == "other" else f"{step.kind}, {step.layout}{heads}"
        start = f"{kind}: {step.source or '(top)'} -> {step.target or '(top)'}{sure}"
        out.print(escape(start), soft_wrap=True, highlight=False)
        for name, one in tensors.items() if step.kind != "other" else ():
            arrow = f"  {one.arrow}" if one.arrow else ""
            line = f"    {', '.join(one.sources)} -> {name} {one.info.shape}{arrow}"
            out.print(f"[dim]{escape(line)}[/dim]", soft_wrap=True, highlight=False)
    counts = Counter(step.kind for step in made.steps)
    shown = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    out.print(f"{len(resolved.made)} tensors: {shown}", highlight=False)
    for note in [*made.notes, *resolved.notes]:
        out.print(f"note: {escape(note)}", soft_wrap=True, highlight=False)


def convert(
    source: Source,
    destination: Annotated[
        Path,
        typer.Argument(
            help="The file to write; its suffix names the format: .safetensors, "
            ".safetensors.index.json (shards), .pt, .weights.h5, .npz or .orbax (a folder).",
            show_default=False,
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            callback=layout_name, metavar="LAYOUT", help="Layout of the attention blocks."
        ),
    ] = None,
    by_plan: Annotated[
        Path | None, typer.Option("--plan", help="Do exactly what this plan says (jaxmha plan).")
    ] = None,
    from_: From = None,
    num_heads: NumHeads = None,
    dtype: Dtype = None,
    others: OptionalOthers = None,
    attention_only: AttentionOnly = False,
    fold_scale: FoldScale = False,
    check: Annotated[
        Check,
        typer.Option(
            "--check",
            help="What to compare afterwards: all runs every block as well, weights compares every "
            "tensor, none trusts the writer, which reads back what it wrote.",
        ),
    ] = Check("all"),
    report_to: Annotated[
        Path | None,
        typer.Option("--report", help="Write what was compared as JSON; --force replaces one."),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option(
            "--shard-size",
            metavar="BYTES",
            help="Write shards of at most this size, such as 5GB or 500MiB, and their index.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Of shards: keep the complete ones if interrupted, and go on where the same "
            "conversion with --resume was interrupted.",
        ),
    ] = False,
    part: Annotated[
        str | None,
        typer.Option(
            "--part",
            metavar="I/N",
            help="With --resume: write every N-th shard from the I-th on, and no index. Other "
            "processes, on any machine that reaches both files, write the other parts meanwhile; the "
            "same command without --part then completes and checks the whole.",
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            "--processes",
            min=1,
            help="Of shards: as many parts at once, each by a process of its own, and then the "
            "whole; implies --resume.",
        ),
    ] = 1,
    digest: Annotated[
        Digest,
        typer.Option(
            "--digest",
            help="Kept for every tensor and checked on reading: fast takes xxh3_128 where xxhash "
            "is installed, sha256 also withstands whoever wants a collision.",
        ),
    ] = Digest("fast"),
    like: Annotated[
        Path | None,
        typer.Option(
            "--like",
            help="For .weights.h5: a file that the Keras model saved; every layer goes to the "
            "group of the layer of its name there.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the destination and the report.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint in another framework's layout: attention and the layers beside it.

    What is not understood is carried over, or refused; nothing is dropped. Both files are compared
    afterwards; exit code 1 if anything differs.
    """
    with one_message():
        others_given = from_ or num_heads or dtype or others or attention_only or fold_scale
        _refuse_contradictions(to, by_plan, bool(others_given))
        if report_to is not None and check.value == "none":
            raise ValueError("--report has nothing to say with --check none")
        if part is not None and (not resume or processes > 1):
            raise ValueError("--part needs --resume, and no --processes beside it")
        share = None if part is None else multiprocess.parsed(part)
        size = None if shard_size is None else _bytes(shard_size)
        destination = _of_shards(destination, size, processes)
        if report_to is not None:
            plans = [by_plan] if by_plan else []
            check_text(report_to, force, [*_files(source), destination, *plans])
        options: dict[str, Any] = {
            "--to": to,
            "--plan": by_plan,
            "--from": from_,
            "--num-heads": num_heads,
            "--dtype": dtype and dtype.value,
            "--others": others and others.value,
            "--shard-size": shard_size,
            "--digest": digest.value,
            "--attention-only": attention_only,
            "--fold-scale": fold_scale,
            "--force": force,
        }
        failed = _parts(processes, source, destination, options, as_json)
        with byte_bar("writing and reading back", as_json, passes=2) as progress:
            done = pipeline.convert(
                source,
                destination,
                to=to,
                from_=from_,
                num_heads=num_heads,
                dtype=dtype.value if dtype else None,
                others=(others or Others("pass")).value,
                attention_only=attention_only,
                plan=plan_toml.read(by_plan) if by_plan else None,
                fold_scale=fold_scale,
                like=like,
                force=force,
                shard_size=size,
                resume=resume or processes > 1,
                part=share,
                digest=None if digest.value == "none" else digest.value,
                progress=progress,
            )
        for number, code in failed.items():
            err.print(f"note: part {number} of {processes} ended with code {code}: done here")
        checked = None
        if check.value != "none" and part is None:
            assert done.plan is not None
            checked = report.check(
                source,
                destination,
                done.plan,
                forward=check.value == "all",
                progress=items("comparing", as_json),
                notes=done.notes,
                losses=done.losses,
            )
        if as_json:
            print_json(done.to_json() | {"report": None if checked is None else checked.to_json()})
        else:
            print_conversion(destination, done, checked)
        if report_to is not None and checked is not None:
            told = checked.to_json() | {"unchecked": list(done.unchecked)}
            text = json.dumps(finite(told), indent=1) + "\n"
            put_text(report_to, text, force, [*_files(source), *map(Path, done.files)])
    if checked is not None and not checked.same:
        raise typer.Exit(1)


def _refuse_contradictions(to: str | None, by_plan: Path | None, others: bool) -> None:
    """Raises ValueError unless either a layout is named, or a plan without options that it sets."""
    if (to is None) == (by_plan is None):
        raise ValueError("name a layout with --to, or a plan with --plan: one of them, not both")
    if by_plan is not None and others:
        raise ValueError("a plan says it all: edit it instead of passing other options")


def _of_shards(destination: Path, size: int | None, processes: int) -> Path:
    """The path of the index if shards are written.

    Raises ValueError if several processes would write a single file.
    """
    if size is not None and destination.suffix in (".safetensors", ".bin"):
        destination = destination.with_name(f"{destination.name}.index.json")
    if processes > 1 and not destination.name.endswith(".index.json"):
        raise ValueError(
            f"--processes writes shards, and {destination} is one file: give --shard-size, or name "
            "an index, such as model.safetensors.index.json"
        )
    return destination


def _parts(
    processes: int, source: Path, destination: Path, options: Mapping[str, Any], quiet: bool
) -> Mapping[int, int]:
    """Runs several processes that write a part each; returns failed parts and their exit codes."""
    if processes == 1:
        return {}
    if not quiet:
        err.print(f"{processes} processes write a part each, then all is checked")
    return multiprocess.convert(processes, source, destination, options)


def _files(source: Path) -> list[Path]:
    with checkpoint.open(source) as file:
        return list(file.files)


def _bytes(text: str) -> int:
    """Parses a size in bytes, such as 5GB.

    >>> _bytes("5GB"), _bytes("1.5 MiB"), _bytes("700")
    (5000000000, 1572864, 700)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]i?)?b?", text.strip().lower())
    if found is None or not (size := int(float(found[1]) * _UNITS[found[2] or ""])):
        raise ValueError(f"--shard-size: {text!r} is no size: give bytes, or such as 5GB or 500MiB")
    return size
